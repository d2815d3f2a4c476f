"""What can be done with snapshots from outside of a training, as JSON; imports no torch, so that it runs anywhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import headers, layout, read
from dtctl.runtime.snapshot.durable import sync_folder

Answer = dict[str, Any]


def snapshots(place: Path) -> list[Path]:
    """The snapshots that are meant by a path: one, those of a folder, or those in `snapshots` below it; newest first.

    Raises:
        SnapshotError: there is no folder.
    """
    if layout.step_of(place) is not None and place.is_dir():
        return [place]
    if not place.is_dir():
        raise SnapshotError("there is no folder of snapshots here", where=str(place))
    inner = place / "snapshots"
    return [path for _, path in layout.listing(place) or layout.listing(inner)]


def ls(place: Path) -> Answer:
    """Step, size, age and whether it is committed, of each snapshot; nothing is verified."""
    rows = []
    for path in snapshots(place):
        files = [file.stat() for file in path.iterdir()]
        rows.append(
            {
                "path": str(path),
                "step": layout.step_of(path),
                "committed": (path / layout.COMMIT).is_file(),
                "size_bytes": sum(file.st_size for file in files),
                "time": round(path.stat().st_mtime, 3),
            }
        )
    return {"snapshots": rows}


def verify(place: Path) -> Answer:
    """Every byte of every snapshot is read and compared."""
    verdicts = [read.verify(path) for path in snapshots(place)]
    rows = [
        {"path": str(found.path), "step": found.step, "status": found.status, "bad": list(found.bad)}
        for found in verdicts
    ]
    good = [str(found.path) for found in verdicts if found.status == "ok"]
    return {"snapshots": rows, "newest_good": good[0] if good else None}


def newest(place: Path, contents: read.Contents | None = None) -> tuple[read.Verdict, Answer]:
    """The newest good snapshot, and an answer that begins with its step and the newer ones that were passed over.

    Raises:
        SnapshotError: there is none.
    """
    rejected: list[str] = []
    for path in snapshots(place):
        found = read.verify(path, contents)
        if found.manifest is not None:
            return found, {"path": str(path), "step": found.step, "rejected": rejected}
        rejected.append(f"{path.name} is {found.status}: {'; '.join(found.bad)}")
        if contents is not None:
            contents.clear()
    raise SnapshotError(
        f"there is no good snapshot here: {'; '.join(rejected)}" if rejected else "there is no snapshot here",
        where=str(place),
    )


def show(place: Path) -> Answer:
    """The manifest of the newest good snapshot, and its tensors."""
    found, answer = newest(place)
    assert found.manifest is not None  # noqa: S101  # for the type checker
    tensors = {}
    for name in found.manifest.files:
        part = name.removesuffix(layout.PART_SUFFIX)
        header = _header(found.path / name)
        for path, entry in header.named(header.tree, part):
            tensors[path] = {"dtype": headers.DTYPES[entry["dtype"]], "shape": entry["shape"]}
    files = {
        name: {"size_bytes": file.size_bytes, "digest": file.digest} for name, file in found.manifest.files.items()
    }
    return answer | {
        "hash": found.manifest.hash,
        "facts": dict(found.manifest.facts),
        "files": files,
        "tensors": tensors,
    }


def digest(place: Path) -> Answer:
    """BLAKE3 of the newest good snapshot's model and optimizer, the same that `state.digest` computes in training.

    Raises:
        SnapshotError: there is none, or it has no model.
    """
    contents: dict[str, memoryview] = {}
    found, answer = newest(place, contents)
    entries: dict[str, tuple[memoryview, Mapping[str, Any]]] = {}
    for part in ("model", "optimizer"):
        file = contents.get(part + layout.PART_SUFFIX)
        if file is None:
            raise SnapshotError(f"the snapshot has no part {part}", where=str(found.path))
        header = headers.parse(file)
        data = file[header.size_bytes :]
        tree = header.tree["state"] if part == "optimizer" else header.tree
        entries |= {path: (data, entry) for path, entry in header.named(tree, part)}
    state = layout.hasher("blake3")
    for path in sorted(entries):
        data, entry = entries[path]
        begin, end = entry["data_offsets"]
        title = [path, f"torch.{headers.DTYPES[entry['dtype']]}", entry["shape"]]
        state.update(json.dumps(title).encode() + b"\n")
        state.update(data[begin:end])
    return answer | {"digest": state.hexdigest()}


def prune(place: Path, *, keep: int, every_h: float | None = None, dry_run: bool = False) -> Answer:
    """Remove all but the newest good snapshots; bad ones go too, unless no good one would be left to vouch for it.

    Args:
        place: folder of snapshots.
        keep: how many good ones stay; at least 1.
        every_h: of older ones, those that are this many hours apart stay as well.
        dry_run: only say what would go.
    """
    good = 0
    stays: list[Path] = []
    goes: list[Path] = []
    last_s = float("inf")
    verdicts = [read.verify(path) for path in snapshots(place)]
    if any(found.status == "ok" for found in verdicts):
        for found in verdicts:
            made_s = found.path.stat().st_mtime
            wanted = found.status == "ok" and (
                good < keep or (every_h is not None and last_s - made_s >= every_h * 3600)
            )
            if wanted:
                good, last_s = good + 1, made_s
            (stays if wanted else goes).append(found.path)
    else:
        stays = [found.path for found in verdicts]  # nothing that is left is certain, so nothing goes
    for path in goes if not dry_run else []:
        (path / layout.COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)  # nodes with one disk do the same at the same time
    return {"kept": [str(path) for path in stays], "removed": [str(path) for path in goes], "dry_run": dry_run}


def export(place: Path, *, part: str, out: Path | BinaryIO) -> Answer:
    """Write a part of the newest good snapshot, by default the weights, as a safetensors file without our additions.

    Args:
        place: folder of snapshots.
        part: model, or another one.
        out: file, replaced whole or not at all; or an open one.

    Raises:
        SnapshotError: there is no good snapshot, no such part, or it holds more than named tensors.
    """
    contents: dict[str, memoryview] = {}
    found, answer = newest(place, contents)
    file = contents.get(part + layout.PART_SUFFIX)
    if file is None:
        known = ", ".join(name.removesuffix(layout.PART_SUFFIX) for name in contents)
        raise SnapshotError(f"the snapshot has no part {part}", where=str(found.path), hint=f"its parts are {known}")
    header = headers.parse(file)
    beginning = headers.to_bytes(header.tensors, {"format": "pt", "step": str(found.step)})
    data = file[header.size_bytes :]
    size_bytes = len(beginning) + len(data)
    if not isinstance(out, Path):
        out.write(beginning)
        out.write(data)
        return answer | {"out": None, "size_bytes": size_bytes}
    draft = out.with_name(f".{out.name}.{os.getpid()}{layout.DRAFT_SUFFIX}")
    try:
        with draft.open("wb") as stream:
            stream.write(beginning)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(out)
        sync_folder(out.absolute().parent)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        raise SnapshotError(f"the export cannot be written: {exc}", where=str(out)) from exc
    return answer | {"out": str(out), "size_bytes": size_bytes}


def _header(path: Path) -> headers.Header:
    with path.open("rb") as file:
        beginning = file.read(8)
        return headers.parse(memoryview(beginning + file.read(int.from_bytes(beginning, "little"))))
