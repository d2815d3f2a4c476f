"""Loading of intact snapshots into new tensors, or directly into existing ones.

When existing tensors are filled, each byte is read once and hashed while it is in the cache. The former values are
overwritten before the snapshot is verified. If it is damaged, an older snapshot is loaded over it. If none is intact,
the state is lost, and an error is raised.
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
from dtctl.runtime.snapshot.state import iter_named_tensors, view_tensor_bytes
from dtctl.runtime.snapshot.storage.place import Place, parse_place

Extent = tuple[str, int, int]
"""File of a tensor, and the begin and end of the tensor in the data of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSnapshot:
    """The newest good snapshot of a folder."""

    step: int
    facts: Mapping[str, Any]
    """Facts that were passed to `save`."""
    parts: Mapping[str, Any]
    """Parts that were passed to `save`, on the CPU; tuples have become lists."""
    rejected: tuple[str, ...]
    """Newer snapshots that were passed over, each with the reason."""


def newest(folder: str | Place, *, into: Mapping[str, Any] | None = None) -> LoadedSnapshot | None:
    """Load and return the newest snapshot that verifies; None if there is none.

    Args:
        folder: folder of all snapshots, or its URL.
        into: tensors to fill, by part and name, such as `{"model": model.state_dict()}`: the fastest way to load.
            Tensors that fit are part of the result; for the others new ones are made.

    Raises:
        SnapshotError: as in `read.verify_snapshot`; or all snapshots are damaged, and the tensors to fill have been
            overwritten.
    """
    folder = parse_place(folder)
    if into is not None:
        return _newest_into(folder, into)
    contents: dict[str, memoryview] = {}
    verdict, rejected = read.find_newest_good(folder, contents)
    if verdict is None or verdict.manifest is None:
        return None
    reasons = tuple(f"{bad.path.name} is {bad.status}: {'; '.join(bad.bad)}" for bad in rejected)
    return LoadedSnapshot(
        step=verdict.step,
        facts=verdict.manifest.facts,
        parts=build_parts_from_contents(contents, verdict.manifest),
        rejected=reasons,
    )


def load(verdict: read.SnapshotVerdict) -> dict[str, Any]:
    """Return the parts of a verified snapshot, on the CPU; compare digests once more with the bytes that are used.

    Raises:
        SnapshotError: the snapshot did not verify, or has changed since.
    """
    contents: dict[str, memoryview] = {}
    again = read.verify_snapshot(verdict.path, contents) if verdict.status == "ok" else verdict
    if again.manifest is None:
        raise SnapshotError(f"the snapshot is {again.status}: {'; '.join(again.bad)}", where=str(verdict.path))
    return build_parts_from_contents(contents, again.manifest)


def build_parts_from_contents(contents: read.Contents, manifest: layout.Manifest) -> dict[str, Any]:
    """Return the parts in the contents of a snapshot's files; tensors in one piece are views of the contents.

    Raises:
        SnapshotError: a tensor is incomplete.
    """
    trees, data = read.parse_snapshot_contents(contents, manifest)
    loaded = {}
    for part, tree in trees.items():
        values = {}
        for leaf in assembly.iter_tree_entries(tree):
            pieces = list(assembly.iter_tensor_bytes(leaf, data))
            whole = pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces))
            shape, dtype = leaf.shape, DTYPES[leaf.dtype]
            flat = torch.frombuffer(whole, dtype=dtype) if len(whole) else torch.empty(0, dtype=dtype)
            values[leaf.path] = flat.view(shape)
        loaded[part] = assembly.replace_tree_entries(tree, values)
    return loaded


def _newest_into(folder: Place, into: Mapping[str, Any]) -> LoadedSnapshot | None:
    """Load as `newest` does, into the tensors of `into` with the same path, type and shape.

    Args:
        folder: folder of all snapshots.
        into: part -> tree, whose contiguous tensors on the CPU are filled.

    Raises:
        SnapshotError: as in `read.verify_snapshot`; or all snapshots are damaged, and `into` has no usable values.
    """
    places = {name: tensor.detach() for name, tensor in iter_named_tensors(into) if _can_be_filled(tensor)}
    rejected: list[str] = []
    for _, path in layout.list_step_folders(folder):
        verdict = read.verify_commit_record(path)
        status, bad = verdict.status, list(verdict.bad)
        if verdict.manifest is not None:
            heads: dict[str, headers.FileHeader] = {}
            filled: dict[Extent, torch.Tensor] = {}
            bad = _load_snapshot_files(path, verdict.manifest, places, heads, filled)
            if not bad:
                try:
                    parts = _assemble_loaded_parts(verdict.manifest, heads, filled)
                except assembly.InconsistentSnapshot as exc:
                    bad = [exc.message]
                else:
                    return LoadedSnapshot(
                        step=verdict.step, facts=verdict.manifest.facts, parts=parts, rejected=tuple(rejected)
                    )
            # each file has one phrase in `bad`
            absent = [name for name in verdict.manifest.files if not (path / name).exists()]
            status = "incomplete" if len(absent) == len(bad) else "corrupt"
        rejected.append(f"{path.name} is {status}: {'; '.join(bad)}")
    if rejected:
        raise SnapshotError(
            f"no snapshot is usable: {'; '.join(rejected)}", where=str(folder), hint="start over in another folder"
        )
    return None


def _can_be_filled(tensor: torch.Tensor) -> bool:
    return type(tensor.detach()) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()


def _load_snapshot_files(
    path: Place,
    manifest: layout.Manifest,
    places: Mapping[str, torch.Tensor],
    heads: dict[str, headers.FileHeader],
    filled: dict[Extent, torch.Tensor],
) -> list[str]:
    """Read all files in parallel, into the tensors for them; return the damage, a phrase for each file."""

    def one(name: str) -> str | None:
        try:
            heads[name], tensors = _load_snapshot_file(path / name, manifest, places)
        except FileNotFoundError:
            return f"{name} is missing"
        except assembly.InconsistentSnapshot as exc:
            return f"{name}: {exc.message}"
        except SnapshotError:
            raise  # not a fault of the snapshot
        except OSError as exc:
            return f"{name} cannot be read: {exc.strerror}"
        except Exception:  # noqa: BLE001  # a header of garbage may lead to any error
            return f"{name} does not have the size and digest that were recorded"
        filled.update(tensors)
        return None

    with ThreadPoolExecutor(max_workers=read.READERS) as pool:
        return [phrase for phrase in pool.map(one, manifest.files) if phrase]


def _load_snapshot_file(
    path: Place, manifest: layout.Manifest, places: Mapping[str, torch.Tensor]
) -> tuple[headers.FileHeader, dict[Extent, torch.Tensor]]:
    """Read one file.

    Raises:
        ValueError: the size or the digest of the file differs; an invalid header may raise any error.
        OSError: the file cannot be read.
    """
    entry, part, state = manifest.files[path.name], manifest.part_of(path.name), layout.build_hasher(manifest.hash)
    tensors: dict[Extent, torch.Tensor] = {}
    with path.open("rb", buffering=0) as file:
        length = file.read(8)
        beginning = length + file.read(min(entry.size_bytes, int.from_bytes(length, "little")))
        state.update(beginning)
        header = headers.parse_header(memoryview(beginning))
        headers.check_data(header, entry.size_bytes)
        (tree,) = assembly.assemble_part_trees([(part, path.name, header)], pieces=True).values()
        leaves = {(leaf.sources[0].begin, leaf.sources[0].end): leaf for leaf in assembly.iter_tree_entries(tree)}
        read_bytes = len(beginning)
        for (begin, end), leaf in sorted(leaves.items()):
            shape, dtype = leaf.sources[0].box[1], DTYPES[leaf.dtype]
            place = places.get(f"{part}.{leaf.name}") if shape == leaf.shape else None
            if place is None or place.dtype != dtype or tuple(place.shape) != shape:
                place = torch.empty(shape, dtype=dtype)
            if place.numel():
                _read_and_hash_bytes(file, view_tensor_bytes(place).numpy().data, state)
            tensors[path.name, begin, end] = place
            read_bytes += end - begin
        if file.read(1) or read_bytes != entry.size_bytes or state.hexdigest() != entry.digest:
            raise ValueError(path.name)
    return header, tensors


def _read_and_hash_bytes(file: Any, place: memoryview, state: layout.Hasher) -> None:
    """Fill a stretch of memory from a file, and hash each chunk while it is in the cache."""
    while place:
        count = file.readinto(place[: layout.CHUNK_BYTES])
        if not count:
            raise ValueError("the file is shorter than its header says")
        state.update(place[:count])
        place = place[count:]


def _assemble_loaded_parts(
    manifest: layout.Manifest, heads: Mapping[str, headers.FileHeader], filled: Mapping[Extent, torch.Tensor]
) -> dict[str, Any]:
    loaded = {}
    trees = assembly.assemble_part_trees((manifest.part_of(name), name, heads[name]) for name in manifest.files)
    for part, tree in trees.items():
        whole = {}
        for leaf in assembly.iter_tree_entries(tree):
            pieces = [(source, filled[source.file, source.begin, source.end]) for source in leaf.sources]
            if len(pieces) == 1 and pieces[0][0].box[1] == leaf.shape:
                whole[leaf.path] = pieces[0][1]
                continue
            whole[leaf.path] = torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype])
            for source, piece in pieces:
                offset, shape = source.box
                cuts = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
                whole[leaf.path][cuts] = piece
        loaded[part] = assembly.replace_tree_entries(tree, whole)
    return loaded
