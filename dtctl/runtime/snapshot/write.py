"""Writing a snapshot so that it is there whole or not at all, whatever dies and whenever."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import layout, retention


def save(
    folder: Path,
    step: int,
    parts: Mapping[str, Any],
    *,
    facts: Mapping[str, Any],
    keep: int,
    best: int | None = None,
) -> Path:
    """Write the snapshot of a step, commit it, and remove those that are no longer kept.

    Args:
        folder: of all snapshots of the run; made if needed.
        step: optimizer steps done.
        parts: name -> tensors in plain dicts and lists; one file each.
        facts: JSON that the loop wants back.
        keep: how many snapshots to keep, this one included.
        best: step whose snapshot is kept on top of them.

    Returns:
        The snapshot's folder.

    Raises:
        SnapshotError: the disk is full or cannot be written; older snapshots are untouched.
    """
    target = layout.folder_of(folder, step)
    draft = folder / f".{target.name}.{os.getpid()}{layout.DRAFT_SUFFIX}"
    try:
        draft.mkdir(parents=True)
        _fill(draft, step, parts, facts)
        _publish(draft, target)
    except (OSError, RuntimeError) as exc:  # torch's writer reports a full disk as RuntimeError
        shutil.rmtree(draft, ignore_errors=True)
        raise SnapshotError(
            f"the snapshot of step {step} cannot be written: {exc}",
            where=str(folder),
            hint="free space, or set `train.snapshot.dir`; older snapshots are untouched",
        ) from exc
    retention.prune(folder, newest=step, keep=keep, best=best)
    return target


def _fill(draft: Path, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    name = layout.default_hash()
    entries = {}
    for part, tree in parts.items():
        path = draft / f"{part}{layout.PART_SUFFIX}"
        with path.open("wb") as file:
            torch.save(tree, file)
            _sync(file.fileno(), file.flush)
        # Read back rather than hashed on the way: what is vouched for is what the file holds.
        digest = layout.file_digest(path, name)
        entries[path.name] = layout.FileEntry(size_bytes=path.stat().st_size, digest=digest)
    manifest = layout.Manifest(step=step, hash=name, facts=facts, files=entries).to_bytes()
    for path, text in (
        (draft / layout.MANIFEST, manifest),
        (draft / layout.COMMIT, layout.commit_record(manifest, name)),
    ):
        with path.open("wb") as file:
            file.write(text)
            _sync(file.fileno(), file.flush)


def _sync(descriptor: int, flush: Any) -> None:
    flush()
    os.fsync(descriptor)


def _publish(draft: Path, target: Path) -> None:
    """Make the draft durable and give it its name. A folder of that name was found bad at resume, or is made again."""
    sync_folder(draft)
    if target.exists():
        aside = draft.with_suffix(".replaced" + layout.DRAFT_SUFFIX)
        target.rename(aside)
        draft.rename(target)
        shutil.rmtree(aside)
    else:
        draft.rename(target)
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
