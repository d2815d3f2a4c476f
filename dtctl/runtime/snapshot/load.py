"""Loading of intact snapshots into new tensors, or straight into existing tensors.

Into existing tensors each byte is read once, and hashed while it is in the cache. Their former values are overwritten
before the snapshot is verified. If it is damaged, older ones are read over it; if none is intact, the state is lost,
and that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import assembly, read
from dtctl.runtime.snapshot.format import headers, layout
from dtctl.runtime.snapshot.format.packing import DTYPES
from dtctl.runtime.snapshot.state import raw, tensors
from dtctl.runtime.snapshot.storage.place import Place, place

Extent = tuple[str, int, int]
"""File, and where in its data a tensor begins and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The newest good snapshot of a folder."""

    step: int
    facts: Mapping[str, Any]
    """Facts that were given to `save`."""
    parts: Mapping[str, Any]
    """Parts that were given to `save`, on the CPU; tuples are lists."""
    rejected: tuple[str, ...]
    """Newer ones that were passed over, each with the reason."""


def newest(folder: str | Place, *, into: Mapping[str, Any] | None = None) -> Loaded | None:
    """Return the newest snapshot that verifies, loaded; None if there is none.

    Args:
        folder: of all snapshots, or its URL.
        into: tensors to be filled, by part and name, such as `{"model": model.state_dict()}`: the fastest way to load.
            Those that fit are then part of what is returned; others are made as ever.

    Raises:
        SnapshotError: as `read.verify`; or there are snapshots, none is right, and what was to be filled is spoilt.
    """
    folder = place(folder)
    if into is not None:
        return _newest_into(folder, into)
    contents: dict[str, memoryview] = {}
    verdict, rejected = read.newest_good(folder, contents)
    if verdict is None or verdict.manifest is None:
        return None
    reasons = tuple(f"{bad.path.name} is {bad.status}: {'; '.join(bad.bad)}" for bad in rejected)
    return Loaded(
        step=verdict.step, facts=verdict.manifest.facts, parts=parts(contents, verdict.manifest), rejected=reasons
    )


def load(verdict: read.SnapshotVerdict) -> dict[str, Any]:
    """The parts of a snapshot that verified, on the CPU; digests are compared once more, with the bytes that are used.

    Raises:
        SnapshotError: it did not verify, or changed since.
    """
    contents: dict[str, memoryview] = {}
    again = read.verify(verdict.path, contents) if verdict.status == "ok" else verdict
    if again.manifest is None:
        raise SnapshotError(f"the snapshot is {again.status}: {'; '.join(again.bad)}", where=str(verdict.path))
    return parts(contents, again.manifest)


def parts(contents: read.Contents, manifest: layout.Manifest) -> dict[str, Any]:
    """Return the parts in the contents of a snapshot's files; tensors are views of them, where they are in one piece.

    Raises:
        SnapshotError: a tensor is not all there.
    """
    trees, data = read.opened(contents, manifest)
    loaded = {}
    for part, tree in trees.items():
        values = {}
        for leaf in assembly.leaves(tree):
            pieces = list(assembly.content(leaf, data))
            whole = pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces))
            shape, dtype = leaf.shape, DTYPES[leaf.dtype]
            flat = torch.frombuffer(whole, dtype=dtype) if len(whole) else torch.empty(0, dtype=dtype)
            values[leaf.path] = flat.view(shape)
        loaded[part] = assembly.replaced(tree, values)
    return loaded


def _newest_into(folder: Place, into: Mapping[str, Any]) -> Loaded | None:
    """Load as `newest` does, into the tensors of `into` with the same path, type and shape.

    Args:
        folder: of all snapshots.
        into: part -> tree; its contiguous tensors on the CPU are filled.

    Raises:
        SnapshotError: as `read.verify`; or there are snapshots and none is right, so that `into` has nothing of use.
    """
    places = {name: tensor.detach() for name, tensor in tensors(into) if _can_be_filled(tensor)}
    rejected: list[str] = []
    for _, path in layout.listing(folder):
        verdict = read.record(path)
        status, bad = verdict.status, list(verdict.bad)
        if verdict.manifest is not None:
            heads: dict[str, headers.Header] = {}
            filled: dict[Extent, torch.Tensor] = {}
            bad = _faults(path, verdict.manifest, places, heads, filled)
            if not bad:
                try:
                    parts = _parts(verdict.manifest, heads, filled)
                except assembly.Misfit as exc:
                    bad = [exc.message]
                else:
                    return Loaded(
                        step=verdict.step, facts=verdict.manifest.facts, parts=parts, rejected=tuple(rejected)
                    )
            absent = [name for name in verdict.manifest.files if not (path / name).exists()]  # a phrase each
            status = "incomplete" if len(absent) == len(bad) else "corrupt"
        rejected.append(f"{path.name} is {status}: {'; '.join(bad)}")
    if rejected:
        raise SnapshotError(
            f"no snapshot is usable: {'; '.join(rejected)}", where=str(folder), hint="start over in another folder"
        )
    return None


def _can_be_filled(tensor: torch.Tensor) -> bool:
    return type(tensor.detach()) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()


def _faults(
    path: Place,
    manifest: layout.Manifest,
    places: Mapping[str, torch.Tensor],
    heads: dict[str, headers.Header],
    filled: dict[Extent, torch.Tensor],
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
            raise  # not a fault of the snapshot
        except OSError as exc:
            return f"{name} cannot be read: {exc.strerror}"
        except Exception:  # noqa: BLE001  # whatever a header of garbage leads to
            return f"{name} does not have the size and digest that were recorded"
        filled.update(tensors)
        return None

    with ThreadPoolExecutor(max_workers=read.READERS) as pool:
        return [phrase for phrase in pool.map(one, manifest.files) if phrase]


def _fill(
    path: Place, manifest: layout.Manifest, places: Mapping[str, torch.Tensor]
) -> tuple[headers.Header, dict[Extent, torch.Tensor]]:
    """Read one file.

    Raises:
        ValueError: its size or its digest is another one; a header that is not right may raise anything.
        OSError: it cannot be read.
    """
    entry, part, state = manifest.files[path.name], manifest.part_of(path.name), layout.hasher(manifest.hash)
    tensors: dict[Extent, torch.Tensor] = {}
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
            tensors[path.name, begin, end] = place
            read_bytes += end - begin
        if file.read(1) or read_bytes != entry.size_bytes or state.hexdigest() != entry.digest:
            raise ValueError(path.name)
    return header, tensors


def _pour(file: Any, place: memoryview, state: layout.Hasher) -> None:
    """Fill a stretch of memory, and hash what has come while it is in the cache."""
    while place:
        count = file.readinto(place[: layout.CHUNK_BYTES])
        if not count:
            raise ValueError("the file is shorter than its header says")
        state.update(place[:count])
        place = place[count:]


def _parts(
    manifest: layout.Manifest, heads: Mapping[str, headers.Header], filled: Mapping[Extent, torch.Tensor]
) -> dict[str, Any]:
    loaded = {}
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
        loaded[part] = assembly.replaced(tree, whole)
    return loaded
