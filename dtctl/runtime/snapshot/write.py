"""Writing a snapshot so that it is there whole or not at all, whatever dies and whenever."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import layout, retention
from dtctl.runtime.snapshot.durable import sync_folder
from dtctl.runtime.snapshot.staging import Staged, StagedFile, Staging


def save(
    folder: Path,
    step: int,
    parts: Mapping[str, Any],
    *,
    facts: Mapping[str, Any],
    keep: int = 1,
) -> Path:
    """Write the snapshot of a step, commit it, and remove those that are no longer kept.

    Args:
        folder: of all snapshots of the run; made if needed.
        step: optimizer steps done.
        parts: name -> tensors and JSON's values in dicts and lists; one file each.
        facts: JSON that the loop wants back.
        keep: how many snapshots to keep, this one included.

    Returns:
        The snapshot's folder.

    Raises:
        SnapshotError: the disk is full or cannot be written; older snapshots are untouched.
    """
    return write(folder, step, Staging().take(parts), facts=facts, rule=retention.Rule(keep=keep))


def write(folder: Path, step: int, staged: Staged, *, facts: Mapping[str, Any], rule: retention.Rule) -> Path:
    """As `save`, of a state that was copied before; may run in another thread."""
    target = layout.folder_of(folder, step)
    draft = folder / f".{target.name}.{os.getpid()}{layout.DRAFT_SUFFIX}"
    try:
        draft.mkdir(parents=True)
        staged.wait()
        name = layout.default_hash()
        entries = {file_name(file): write_part(draft, file, name) for file in staged.files}
        write_record(draft, layout.Manifest(step=step, hash=name, facts=facts, files=entries))
        publish(draft, target)
    except OSError as exc:
        shutil.rmtree(draft, ignore_errors=True)
        raise failure(step, folder, str(exc)) from exc
    except SnapshotError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    retention.prune(folder, newest=step, rule=rule)
    return target


def failure(step: int, folder: Path, reason: str) -> SnapshotError:
    """The error of a save that did not succeed."""
    return SnapshotError(
        f"the snapshot of step {step} cannot be written: {reason}",
        where=str(folder),
        hint="free space, or set `train.snapshot.dir`; older snapshots are untouched",
    )


def file_name(file: StagedFile) -> str:
    """What a part is called on disk."""
    return f"{file.name}{layout.PART_SUFFIX}"


def write_part(draft: Path, file: StagedFile, name: str) -> layout.FileEntry:
    """Write and hash in one pass: a byte that the disk gets wrong is noticed by whoever reads it."""
    header = file.outline.header()
    data = file.data.numpy().data
    state = layout.hasher(name)
    with (draft / file_name(file)).open("wb", buffering=0) as out:
        chunks = (data[begin : begin + layout.CHUNK_BYTES] for begin in range(0, len(data), layout.CHUNK_BYTES))
        for chunk in (memoryview(header), *chunks):
            state.update(chunk)
            write_all(out, chunk)
        os.fsync(out.fileno())
    return layout.FileEntry(size_bytes=len(header) + len(data), digest=state.hexdigest())


def write_all(out: Any, chunk: memoryview) -> None:
    """Write to an unbuffered file, which may take less than it is given."""
    while chunk:
        chunk = chunk[out.write(chunk) :]


def write_record(draft: Path, manifest: layout.Manifest) -> None:
    """Write and sync the manifest, and then the commit record."""
    text = manifest.to_bytes()
    for path, content in (
        (draft / layout.MANIFEST, text),
        (draft / layout.COMMIT, layout.commit_record(text, manifest.hash)),
    ):
        with path.open("wb", buffering=0) as out:
            write_all(out, memoryview(content))
            os.fsync(out.fileno())


def publish(draft: Path, target: Path) -> None:
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
