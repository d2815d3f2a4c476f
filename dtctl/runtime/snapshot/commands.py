"""Commands on snapshots from outside of a run, as JSON; imports no torch, so that it runs anywhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import assembly, read
from dtctl.runtime.snapshot.format import headers, layout
from dtctl.runtime.snapshot.storage import retention
from dtctl.runtime.snapshot.storage.durable import sync_folder
from dtctl.runtime.snapshot.storage.place import Place

Answer = dict[str, Any]


def snapshots(place: Place) -> list[Any]:
    """The snapshots that are meant by a path: one, those of a folder, or those in `snapshots` below it; newest first.

    Raises:
        SnapshotError: there is no folder.
    """
    if layout.step_of(place) is not None and place.is_dir():
        return [place]
    listed = layout.listing(place) or layout.listing(place / "snapshots")
    if not listed and not place.is_dir():
        raise SnapshotError("there is no folder of snapshots here", where=str(place))
    return [path for _, path in listed]


def ls(place: Place) -> Answer:
    """Step, size, age and whether it is committed, of each snapshot; nothing is verified."""
    rows = []
    for path in snapshots(place):
        files = layout.entries(path)
        rows.append(
            {
                "path": str(path),
                "step": layout.step_of(path),
                "committed": files.get(layout.COMMIT) is not None,
                "size_bytes": sum(size or 0 for size in files.values()),
                "time": round(retention.made_s(path), 3),
            }
        )
    return {"snapshots": rows}


def verify(place: Place) -> Answer:
    """Return every byte of every snapshot is read and compared."""
    verdicts = [read.verify(path) for path in snapshots(place)]
    rows = [
        {"path": str(verdict.path), "step": verdict.step, "status": verdict.status, "bad": list(verdict.bad)}
        for verdict in verdicts
    ]
    good = [str(verdict.path) for verdict in verdicts if verdict.status == "ok"]
    return {"snapshots": rows, "newest_good": good[0] if good else None}


def pieces(place: Place) -> Answer:
    """Return the good files of each snapshot here; of one that lies on several nodes, this is a node's part.

    Returns:
        Rows, newest first: path, step, when it was made, the commit record and the manifest that all nodes of it have,
        the files that are here and right, and what is wrong.
    """
    rows = []
    for path in snapshots(place):
        verdict = read.record(path)
        row: Answer = {"path": str(path), "step": verdict.step, "record": None, "manifest": None, "good": []}
        row["made_s"] = retention.made_s(path)
        row |= {"bad": list(verdict.bad)}
        if verdict.manifest is not None:
            present = layout.entries(path)
            own_files = [name for name in verdict.manifest.files if present.get(name) is not None]
            wrong = read.faults(path, verdict.manifest, own_files)
            text = verdict.manifest.text.decode()
            row |= {
                "record": layout.commit_record(verdict.manifest.text, verdict.manifest.hash).decode(),
                "manifest": text,
            }
            row["good"] = [name for name in own_files if name not in wrong]
            row["bad"] = list(wrong.values())
        rows.append(row)
    return {"rows": rows}


def send(place: Place, *, step: int, names: Iterable[str], out: BinaryIO) -> Answer:
    """Write some files of a snapshot one after another, for a receiver that has the others and the sizes of all.

    Args:
        place: folder of snapshots.
        step: of the snapshot.
        names: of files, without folders.
        out: where to.

    Raises:
        SnapshotError: a file is not there.
    """
    folder = next((path for path in snapshots(place) if layout.step_of(path) == step), None)
    if folder is None:
        raise SnapshotError(f"there is no snapshot of step {step} here", where=str(place))
    try:
        for name in names:
            with (folder / Path(name).name).open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    except OSError as exc:
        raise SnapshotError(f"the snapshot cannot be sent: {exc}", where=str(folder)) from exc
    return {"path": str(folder), "step": step}


def newest(place: Place, contents: read.Contents | None = None) -> tuple[read.SnapshotVerdict, Answer]:
    """The newest good snapshot, and an answer that begins with its step and the newer ones that were passed over.

    Raises:
        SnapshotError: there is none.
    """
    rejected: list[str] = []
    for path in snapshots(place):
        verdict = read.verify(path, contents)
        if verdict.manifest is not None:
            return verdict, {"path": str(path), "step": verdict.step, "rejected": rejected}
        rejected.append(f"{path.name} is {verdict.status}: {'; '.join(verdict.bad)}")
        if contents is not None:
            contents.clear()
    raise SnapshotError(
        f"there is no good snapshot here: {'; '.join(rejected)}" if rejected else "there is no snapshot here",
        where=str(place),
    )


def show(place: Place) -> Answer:
    """Return the manifest of the newest good snapshot, and its tensors."""
    verdict, answer = newest(place)
    assert verdict.manifest is not None  # noqa: S101  # for the type checker
    files = {}
    for name, entry in verdict.manifest.files.items():
        with (verdict.path / name).open("rb") as file:
            files[name] = headers.read(file, entry.size_bytes)
    trees = assembly.assembled((verdict.manifest.part_of(name), name, header) for name, header in files.items())
    tensors = {
        f"{part}.{leaf.name}": {"dtype": headers.DTYPES[leaf.dtype], "shape": list(leaf.shape)}
        for part, tree in trees.items()
        for leaf in assembly.leaves(tree)
    }
    listed = {name: entry.document() for name, entry in verdict.manifest.files.items()}
    return answer | {
        "hash": verdict.manifest.hash,
        "facts": dict(verdict.manifest.facts),
        "files": listed,
        "tensors": tensors,
    }


def digest(place: Place) -> Answer:
    """BLAKE3 of the newest good snapshot's model and optimizer, the same that `state.digest` computes in training.

    Raises:
        SnapshotError: there is none, or it has no model.
    """
    contents: dict[str, memoryview] = {}
    verdict, answer = newest(place, contents)
    assert verdict.manifest is not None  # noqa: S101  # for the type checker
    trees, data = read.opened(contents, verdict.manifest)
    entries: dict[str, assembly.TreeEntry] = {}
    for part in ("model", "optimizer"):
        if part not in trees:
            raise SnapshotError(f"the snapshot has no part {part}", where=str(verdict.path))
        tree = trees[part]
        if part == "optimizer":
            if not isinstance(tree, dict) or "state" not in tree:
                raise SnapshotError("the optimizer's part has no state", where=str(verdict.path))
            tree = tree["state"]
        for leaf in assembly.leaves(tree):
            entries[f"{part}.{'.'.join(leaf.path[part == 'optimizer' :])}"] = leaf
    state = layout.hasher("blake3")
    for name in sorted(entries):
        leaf = entries[name]
        title = [name, f"torch.{headers.DTYPES[leaf.dtype]}", list(leaf.shape)]
        state.update(json.dumps(title).encode() + b"\n")
        for stretch in assembly.content(leaf, data):
            state.update(stretch)
    return answer | {"digest": state.hexdigest()}


def prune(
    place: Place,
    *,
    keep: int | None = None,
    every_s: float | None = None,
    keep_best: bool = True,
    dry_run: bool = False,
) -> Answer:
    """Remove snapshots that need not be kept, and bad ones; remove nothing if no good snapshot would be left.

    Args:
        place: folder of snapshots.
        keep: how many good ones stay. None: the setting of the run that made them, else one.
        every_s: of older ones, those that are this many seconds apart stay as well. None: as for `keep`.
        keep_best: whether the best ones stay, where the run has recorded any.
        dry_run: only report what would be removed.
    """
    verdicts = [read.verify(path) for path in snapshots(place)]
    good = [verdict for verdict in verdicts if verdict.manifest is not None]
    stays = {verdict.path for verdict in verdicts}  # while nothing is certain, nothing goes
    if good:
        rule = _rule(good[0], keep=keep, every_s=every_s, keep_best=keep_best)
        steps = rule.stays([(verdict.step, retention.made_s(verdict.path)) for verdict in good])
        stays = {verdict.path for verdict in good if verdict.step in steps}
    gone = [verdict.path for verdict in verdicts if verdict.path not in stays]
    kept_paths = [str(verdict.path) for verdict in verdicts if verdict.path in stays]
    return {"kept": kept_paths, **_removed(gone, dry_run=dry_run), "dry_run": dry_run}


def _removed(gone: Sequence[Place], *, dry_run: bool = False) -> Answer:
    """Return which of these are gone now, and which could not be removed without touching what lies elsewhere."""
    left = [] if dry_run else retention.remove(gone)
    return {"removed": [str(path) for path in gone if path not in left], "left": [str(path) for path in left]}


def _rule(
    found: read.SnapshotVerdict, *, keep: int | None, every_s: float | None, keep_best: bool
) -> retention.RetentionRule:
    """Return the rule that a snapshot's manifest has, but for what is asked for."""
    assert found.manifest is not None  # noqa: S101  # for the type checker
    recorded = retention.RetentionRule.of(found.manifest.facts)
    return retention.RetentionRule(
        keep=recorded.keep if keep is None else keep,
        every_s=recorded.every_s if every_s is None else every_s,
        best=recorded.best if keep_best else (),
    )


def remove(place: Place, steps: Collection[int]) -> Answer:
    """Remove the snapshots of some steps; the caller has checked the copies on other nodes."""
    return _removed([path for path in snapshots(place) if layout.step_of(path) in steps])


def export(place: Place, *, part: str, out: Path | BinaryIO) -> Answer:
    """Write a part of the newest good snapshot, by default the weights, as a safetensors file without our additions.

    Args:
        place: folder of snapshots.
        part: model, or another one.
        out: file, replaced whole or not at all; or an open one.

    Raises:
        SnapshotError: there is no good snapshot, no such part, or it holds more than named tensors.
    """
    contents: dict[str, memoryview] = {}
    verdict, answer = newest(place, contents)
    assert verdict.manifest is not None  # noqa: S101  # for the type checker
    trees, data = read.opened(contents, verdict.manifest)
    if part not in trees:
        part_names = ", ".join(trees)
        raise SnapshotError(
            f"the snapshot has no part {part}", where=str(verdict.path), hint=f"its parts are {part_names}"
        )
    tensors, chosen = _laid_out(assembly.leaves(trees[part]))
    beginning = headers.to_bytes(tensors, {"format": "pt", "step": str(verdict.step)})
    if len(beginning) > headers.MAX_BYTES:
        raise SnapshotError(
            f"the names of the tensors of {part} take {len(beginning) >> 20} MiB, and a safetensors file has room for "
            f"{headers.MAX_BYTES >> 20}",
            where=str(verdict.path),
        )
    size_bytes = len(beginning) + sum(leaf.size_bytes for leaf in chosen)

    def pour(stream: BinaryIO) -> None:
        stream.write(beginning)
        for leaf in chosen:
            for stretch in assembly.content(leaf, data):
                stream.write(stretch)

    if not isinstance(out, Path):
        pour(out)
        return answer | {"out": None, "size_bytes": size_bytes}
    draft = out.with_name(f".{out.name}.{os.getpid()}{layout.DRAFT_SUFFIX}")
    try:
        with draft.open("wb") as stream:
            pour(stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(out)
        sync_folder(out.absolute().parent)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        raise SnapshotError(f"the export cannot be written: {exc}", where=str(out)) from exc
    return answer | {"out": str(out), "size_bytes": size_bytes}


def _laid_out(leaves: Iterable[assembly.TreeEntry]) -> tuple[dict[str, Any], list[assembly.TreeEntry]]:
    """The entries of a header, and the tensors in the order of their data: widest numbers first, for alignment."""
    free = headers.FreeNames()
    names = {free.choose(leaf.name): leaf for leaf in leaves}
    place, entries = 0, {}
    ordered = sorted(names, key=lambda name: -headers.SIZES[names[name].dtype])
    for name in ordered:
        leaf = names[name]
        end = place + leaf.size_bytes
        entries[name] = {"dtype": leaf.dtype, "shape": list(leaf.shape), "data_offsets": [place, end]}
        place = end
    return entries, [names[name] for name in ordered]
