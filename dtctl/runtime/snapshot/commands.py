"""Commands on snapshots outside of a run, with answers in JSON. Imports no torch, so that it runs anywhere."""

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
from dtctl.runtime.snapshot.storage.durable import sync_folder_names
from dtctl.runtime.snapshot.storage.place import Place

Answer = dict[str, Any]


def find_snapshot_paths(place: Place) -> list[Any]:
    """Return the snapshots at a path, newest first: the path itself, those in it, or those in `snapshots` below it.

    Raises:
        SnapshotError: the folder does not exist.
    """
    if layout.parse_snapshot_step(place) is not None and place.is_dir():
        return [place]
    listed = layout.list_step_folders(place) or layout.list_step_folders(place / "snapshots")
    if not listed and not place.is_dir():
        raise SnapshotError("there is no folder of snapshots here", where=str(place))
    return [path for _, path in listed]


def list_snapshots(place: Place) -> Answer:
    """Return step, size, age and commit status of each snapshot, without verification."""
    rows = []
    for path in find_snapshot_paths(place):
        files = layout.list_folder_entries(path)
        rows.append(
            {
                "path": str(path),
                "step": layout.parse_snapshot_step(path),
                "committed": files.get(layout.COMMIT) is not None,
                "size_bytes": sum(size or 0 for size in files.values()),
                "time": round(retention.find_creation_time(path), 3),
            }
        )
    return {"snapshots": rows}


def verify_snapshots(place: Place) -> Answer:
    """Return the result of reading and comparing every byte of every snapshot."""
    verdicts = [read.verify_snapshot(path) for path in find_snapshot_paths(place)]
    rows = [
        {"path": str(verdict.path), "step": verdict.step, "status": verdict.status, "bad": list(verdict.bad)}
        for verdict in verdicts
    ]
    good = [str(verdict.path) for verdict in verdicts if verdict.status == "ok"]
    return {"snapshots": rows, "newest_good": good[0] if good else None}


def list_good_files(place: Place) -> Answer:
    """Return the good files of each snapshot on this node; other nodes may have other files of the same snapshot.

    Returns:
        Rows, newest first: path, step, time of the snapshot, the commit record and the manifest that all nodes have in
        common, the good files on this node, and the damage.
    """
    rows = []
    for path in find_snapshot_paths(place):
        verdict = read.verify_commit_record(path)
        row: Answer = {"path": str(path), "step": verdict.step, "record": None, "manifest": None, "good": []}
        row["made_s"] = retention.find_creation_time(path)
        row |= {"bad": list(verdict.bad)}
        if verdict.manifest is not None:
            present = layout.list_folder_entries(path)
            own_files = [name for name in verdict.manifest.files if present.get(name) is not None]
            wrong = read.find_file_faults(path, verdict.manifest, own_files)
            text = verdict.manifest.text.decode()
            row |= {
                "record": layout.commit_record(verdict.manifest.text, verdict.manifest.hash).decode(),
                "manifest": text,
            }
            row["good"] = [name for name in own_files if name not in wrong]
            row["bad"] = list(wrong.values())
        rows.append(row)
    return {"rows": rows}


def send_snapshot_files(place: Place, *, step: int, names: Iterable[str], out: BinaryIO) -> Answer:
    """Write some files of a snapshot one after another, for a receiver that has the other files and all sizes.

    Args:
        place: folder of snapshots.
        step: step of the snapshot.
        names: names of the files, without folders.
        out: stream to write to.

    Raises:
        SnapshotError: a file does not exist.
    """
    folder = next((path for path in find_snapshot_paths(place) if layout.parse_snapshot_step(path) == step), None)
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
    """Return the newest good snapshot, and an answer that begins with its step and the newer snapshots passed over.

    Raises:
        SnapshotError: there is no good snapshot.
    """
    rejected: list[str] = []
    for path in find_snapshot_paths(place):
        verdict = read.verify_snapshot(path, contents)
        if verdict.manifest is not None:
            return verdict, {"path": str(path), "step": verdict.step, "rejected": rejected}
        rejected.append(f"{path.name} is {verdict.status}: {'; '.join(verdict.bad)}")
        if contents is not None:
            contents.clear()
    raise SnapshotError(
        f"there is no good snapshot here: {'; '.join(rejected)}" if rejected else "there is no snapshot here",
        where=str(place),
    )


def describe_newest_snapshot(place: Place) -> Answer:
    """Return the manifest and the tensors of the newest good snapshot."""
    verdict, answer = newest(place)
    assert verdict.manifest is not None  # noqa: S101  # for the type checker
    files = {}
    for name, entry in verdict.manifest.files.items():
        with (verdict.path / name).open("rb") as file:
            files[name] = headers.read_header(file, entry.size_bytes)
    trees = assembly.assemble_part_trees(
        (verdict.manifest.part_of(name), name, header) for name, header in files.items()
    )
    tensors = {
        f"{part}.{leaf.name}": {"dtype": headers.DTYPES[leaf.dtype], "shape": list(leaf.shape)}
        for part, tree in trees.items()
        for leaf in assembly.iter_tree_entries(tree)
    }
    listed = {name: entry.document() for name, entry in verdict.manifest.files.items()}
    return answer | {
        "hash": verdict.manifest.hash,
        "facts": dict(verdict.manifest.facts),
        "files": listed,
        "tensors": tensors,
    }


def compute_snapshot_digest(place: Place) -> Answer:
    """Return the BLAKE3 digest of model and optimizer in the newest good snapshot.

    During training `state.compute_snapshot_digest` computes the same digest.

    Raises:
        SnapshotError: there is no good snapshot, or it has no model.
    """
    contents: dict[str, memoryview] = {}
    verdict, answer = newest(place, contents)
    assert verdict.manifest is not None  # noqa: S101  # for the type checker
    trees, data = read.parse_snapshot_contents(contents, verdict.manifest)
    entries: dict[str, assembly.TensorEntry] = {}
    for part in ("model", "optimizer"):
        if part not in trees:
            raise SnapshotError(f"the snapshot has no part {part}", where=str(verdict.path))
        tree = trees[part]
        if part == "optimizer":
            if not isinstance(tree, dict) or "state" not in tree:
                raise SnapshotError("the optimizer's part has no state", where=str(verdict.path))
            tree = tree["state"]
        for leaf in assembly.iter_tree_entries(tree):
            entries[f"{part}.{'.'.join(leaf.path[part == 'optimizer' :])}"] = leaf
    state = layout.build_hasher("blake3")
    for name in sorted(entries):
        leaf = entries[name]
        title = [name, f"torch.{headers.DTYPES[leaf.dtype]}", list(leaf.shape)]
        state.update(json.dumps(title).encode() + b"\n")
        for stretch in assembly.iter_tensor_bytes(leaf, data):
            state.update(stretch)
    return answer | {"digest": state.hexdigest()}


def prune_snapshot_folder(
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
        keep: number of good snapshots that stay. None: the setting of the run that made the snapshots; without a
        setting, 1.
        every_s: interval in seconds at which older snapshots stay as well. None: as for `keep`.
        keep_best: True if the best snapshots stay, where the run has recorded any.
        dry_run: only report which snapshots would be removed.
    """
    verdicts = [read.verify_snapshot(path) for path in find_snapshot_paths(place)]
    good = [verdict for verdict in verdicts if verdict.manifest is not None]
    stays = {verdict.path for verdict in verdicts}  # without a good snapshot nothing is removed
    if good:
        rule = _resolve_retention_rule(good[0], keep=keep, every_s=every_s, keep_best=keep_best)
        steps = rule.choose_retained_steps(
            [(verdict.step, retention.find_creation_time(verdict.path)) for verdict in good]
        )
        stays = {verdict.path for verdict in good if verdict.step in steps}
    gone = [verdict.path for verdict in verdicts if verdict.path not in stays]
    kept_paths = [str(verdict.path) for verdict in verdicts if verdict.path in stays]
    return {"kept": kept_paths, **_remove_and_report(gone, dry_run=dry_run), "dry_run": dry_run}


def _remove_and_report(gone: Sequence[Place], *, dry_run: bool = False) -> Answer:
    """Remove snapshots; return which were removed, and which were left because links or mounts lead elsewhere."""
    left = [] if dry_run else retention.remove_snapshot_folders(gone)
    return {"removed": [str(path) for path in gone if path not in left], "left": [str(path) for path in left]}


def _resolve_retention_rule(
    found: read.SnapshotVerdict, *, keep: int | None, every_s: float | None, keep_best: bool
) -> retention.RetentionRule:
    """Return the rule in a snapshot's manifest, with the values that the caller has given instead."""
    assert found.manifest is not None  # noqa: S101  # for the type checker
    recorded = retention.RetentionRule.from_manifest_facts(found.manifest.facts)
    return retention.RetentionRule(
        keep=recorded.keep if keep is None else keep,
        every_s=recorded.every_s if every_s is None else every_s,
        best=recorded.best if keep_best else (),
    )


def remove_snapshot_steps(place: Place, steps: Collection[int]) -> Answer:
    """Remove the snapshots of some steps; the caller has checked the copies on other nodes."""
    return _remove_and_report(
        [path for path in find_snapshot_paths(place) if layout.parse_snapshot_step(path) in steps]
    )


def export_snapshot_part(place: Place, *, part: str, out: Path | BinaryIO) -> Answer:
    """Write a part of the newest good snapshot, by default the weights, as a safetensors file without our additions.

    Args:
        place: folder of snapshots.
        part: name of the part.
        out: path of a file, which is replaced completely or not at all; or an open file.

    Raises:
        SnapshotError: there is no good snapshot, it has no such part, or the part holds more than named tensors.
    """
    contents: dict[str, memoryview] = {}
    verdict, answer = newest(place, contents)
    assert verdict.manifest is not None  # noqa: S101  # for the type checker
    trees, data = read.parse_snapshot_contents(contents, verdict.manifest)
    if part not in trees:
        part_names = ", ".join(trees)
        raise SnapshotError(
            f"the snapshot has no part {part}", where=str(verdict.path), hint=f"its parts are {part_names}"
        )
    tensors, chosen = _laid_out(assembly.iter_tree_entries(trees[part]))
    beginning = headers.encode_header(tensors, {"format": "pt", "step": str(verdict.step)})
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
            for stretch in assembly.iter_tensor_bytes(leaf, data):
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
        sync_folder_names(out.absolute().parent)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        raise SnapshotError(f"the export cannot be written: {exc}", where=str(out)) from exc
    return answer | {"out": str(out), "size_bytes": size_bytes}


def _laid_out(leaves: Iterable[assembly.TensorEntry]) -> tuple[dict[str, Any], list[assembly.TensorEntry]]:
    """Return the entries of a header, and the tensors in the order of their data.

    The widest numbers come first, for alignment.
    """
    free = headers.UniqueNames()
    names = {free.make_unique(leaf.name): leaf for leaf in leaves}
    place, entries = 0, {}
    ordered = sorted(names, key=lambda name: -headers.SIZES[names[name].dtype])
    for name in ordered:
        leaf = names[name]
        end = place + leaf.size_bytes
        entries[name] = {"dtype": leaf.dtype, "shape": list(leaf.shape), "data_offsets": [place, end]}
        place = end
    return entries, [names[name] for name in ordered]
