"""Reading straight into tensors that are there: each byte is read once, and hashed while it is in the cache.

What a tensor held is gone before its snapshot was found right; where that is not, older ones are read over it, and if
none is, there is nothing to go on with, and that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import assembly, headers, layout, read
from dtctl.runtime.snapshot.packing import DTYPES
from dtctl.runtime.snapshot.place import Place as Where
from dtctl.runtime.snapshot.state import raw, tensors

Place = tuple[str, int, int]
"""File, and where in its data a tensor begins and ends."""


def newest_into(folder: Where, into: Mapping[str, Any]) -> read.Loaded | None:
    """As `read.newest`, with tensors of `into` in the place of those with the same path, type and shape.

    Args:
        folder: of all snapshots.
        into: part -> tree; its contiguous tensors on the CPU are filled.

    Raises:
        SnapshotError: as `read.verify`; or there are snapshots and none is right, so that `into` has nothing of use.
    """
    places = {name: tensor.detach() for name, tensor in tensors(into) if _can_be_filled(tensor)}
    rejected: list[str] = []
    for _, path in layout.listing(folder):
        found = read.record(path)
        status, bad = found.status, list(found.bad)
        if found.manifest is not None:
            heads: dict[str, headers.Header] = {}
            filled: dict[Place, torch.Tensor] = {}
            bad = _faults(path, found.manifest, places, heads, filled)
            if not bad:
                try:
                    parts = _parts(found.manifest, heads, filled)
                except assembly.Misfit as exc:
                    bad = [exc.message]
                else:
                    return read.Loaded(
                        step=found.step, facts=found.manifest.facts, parts=parts, rejected=tuple(rejected)
                    )
            status = "incomplete" if all(phrase.endswith("is missing") for phrase in bad) else "corrupt"
        rejected.append(f"{path.name} is {status}: {'; '.join(bad)}")
    if rejected:
        raise SnapshotError(
            f"no snapshot is right: {'; '.join(rejected)}", where=str(folder), hint="begin anew in another folder"
        )
    return None


def _can_be_filled(tensor: torch.Tensor) -> bool:
    return type(tensor.detach()) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()


def _faults(
    path: Where,
    manifest: layout.Manifest,
    places: Mapping[str, torch.Tensor],
    heads: dict[str, headers.Header],
    filled: dict[Place, torch.Tensor],
) -> list[str]:
    """Read all files side by side, into what is there for them. Returns what is wrong, a phrase a file."""

    def one(name: str) -> str | None:
        try:
            heads[name], tensors = _fill(path / name, manifest, places)
        except FileNotFoundError:
            return f"{name} is missing"
        except assembly.Misfit as exc:
            return f"{name}: {exc.message}"
        except SnapshotError:
            raise  # says nothing about the snapshot
        except OSError as exc:
            return f"{name} cannot be read: {exc.strerror}"
        except Exception:  # noqa: BLE001  # whatever a header of garbage leads to
            return f"{name} does not have the size and digest that were recorded"
        filled.update(tensors)
        return None

    with ThreadPoolExecutor(max_workers=read.READERS) as pool:
        return [phrase for phrase in pool.map(one, manifest.files) if phrase]


def _fill(
    path: Where, manifest: layout.Manifest, places: Mapping[str, torch.Tensor]
) -> tuple[headers.Header, dict[Place, torch.Tensor]]:
    """Read one file.

    Raises:
        ValueError: its size or its digest is another one; a header that is not right may raise anything.
        OSError: it cannot be read.
    """
    entry, part, state = manifest.files[path.name], manifest.part_of(path.name), layout.hasher(manifest.hash)
    found: dict[Place, torch.Tensor] = {}
    with path.open("rb", buffering=0) as file:
        length = file.read(8)
        beginning = length + file.read(min(entry.size_bytes, int.from_bytes(length, "little")))
        state.update(beginning)
        header = headers.parse(memoryview(beginning))
        headers.check_data(header, entry.size_bytes)
        (tree,) = assembly.assembled([(part, path.name, header)], pieces=True).values()
        leaves = {(leaf.sources[0].begin, leaf.sources[0].end): leaf for leaf in assembly.leaves(tree)}
        read_bytes = len(beginning)
        for (begin, end), leaf in sorted(leaves.items()):
            shape, dtype = leaf.sources[0].box[1], DTYPES[leaf.dtype]
            place = places.get(f"{part}.{leaf.name}") if shape == leaf.shape else None
            if place is None or place.dtype != dtype or tuple(place.shape) != shape:
                place = torch.empty(shape, dtype=dtype)
            if place.numel():
                _pour(file, raw(place).numpy().data, state)
            found[path.name, begin, end] = place
            read_bytes += end - begin
        if file.read(1) or read_bytes != entry.size_bytes or state.hexdigest() != entry.digest:
            raise ValueError(path.name)
    return header, found


def _pour(file: Any, place: memoryview, state: layout.Hasher) -> None:
    """Fill a stretch of memory, and hash what has come while it is in the cache."""
    while place:
        count = file.readinto(place[: layout.CHUNK_BYTES])
        if not count:
            raise ValueError("the file is shorter than its header says")
        state.update(place[:count])
        place = place[count:]


def _parts(
    manifest: layout.Manifest, heads: Mapping[str, headers.Header], filled: Mapping[Place, torch.Tensor]
) -> dict[str, Any]:
    found = {}
    trees = assembly.assembled((manifest.part_of(name), name, heads[name]) for name in manifest.files)
    for part, tree in trees.items():
        whole = {}
        for leaf in assembly.leaves(tree):
            pieces = [(source, filled[source.file, source.begin, source.end]) for source in leaf.sources]
            if len(pieces) == 1 and pieces[0][0].box[1] == leaf.shape:
                whole[leaf.path] = pieces[0][1]
                continue
            whole[leaf.path] = torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype])
            for source, piece in pieces:
                offset, shape = source.box
                cuts = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
                whole[leaf.path][cuts] = piece
        found[part] = assembly.replaced(tree, whole)
    return found
