"""Writing of a snapshot that exists completely or not at all, even if a process or a node fails meanwhile."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Final

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import state_sum
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.storage import retention
from dtctl.runtime.snapshot.storage.durable import (
    ByteSink,
    begin_writing,
    exchange_folders,
    make_durable_folder,
    open_durable_file,
    sync_folder_names,
)
from dtctl.runtime.snapshot.storage.memory_files import MemoryFile
from dtctl.runtime.snapshot.storage.place import Place, RemotePath
from dtctl.runtime.snapshot.storage.staging import StagedFile, StagedState, StagingBuffer

STRETCH_BYTES: Final = 8 << 20
"""Bytes of a file after which the disk begins to write them, while the next ones are hashed."""


def save_snapshot_parts(
    folder: Place,
    step: int,
    parts: Mapping[str, Any],
    *,
    facts: Mapping[str, Any],
    keep: int = 1,
) -> Place:
    """Write the snapshot of a step, commit it, and remove those that are no longer kept.

    Args:
        folder: folder for all snapshots of the run; made if needed.
        step: number of optimizer steps done.
        parts: name -> tensors and JSON's values in dicts and lists; one file each.
        facts: JSON for the loop, which a resume returns.
        keep: number of snapshots to keep, this one included.

    Returns:
        The snapshot's folder.

    Raises:
        SnapshotError: the disk is full or cannot be written; older snapshots are untouched.
    """
    return write_staged_snapshot(
        folder, step, StagingBuffer().stage_tensors(parts), facts=facts, rule=retention.RetentionRule(keep=keep)
    )


def write_staged_snapshot(
    folder: Place,
    step: int,
    staged: StagedState,
    *,
    facts: Mapping[str, Any],
    rule: retention.RetentionRule,
    in_memory: bool = False,
    before_commit: Callable[[], None] = lambda: None,
    add_notes: Callable[[Place], None] = lambda _: None,
) -> Place:
    """Write as `save_snapshot_parts` does, but a state that was copied before; may run in another thread.

    `in_memory` selects the digest (`layout.choose_hash`). `before_commit` raises an error if the snapshot must not be
    committed. `add_notes` is called with the draft before it is renamed.
    """
    target, draft = build_target_and_draft(folder, step, token=str(os.getpid()))
    try:
        make_durable_folder(folder)
        draft.mkdir()
        staged.wait()
        name = layout.choose_hash(in_memory=in_memory)
        with state_sum.start_state_sum(staged) as total:
            entries = {build_part_file_name(file): write_part(draft, file, name) for file in staged.files}
        facts = {**facts, state_sum.FACT: state_sum.format_sum(total.result())}
        before_commit()
        write_commit_record(draft, layout.Manifest(step=step, hash=name, facts=facts, files=entries))
        add_notes(draft)
        publish_draft(draft, target)
    except OSError as exc:
        remove_draft(draft)
        raise build_save_error(step, folder, str(exc)) from exc
    except SnapshotError as exc:
        remove_draft(draft)
        if isinstance(folder, RemotePath):
            raise build_save_error(step, folder, exc.message) from exc
        raise
    retention.remove_expired_snapshots(folder, newest=target, rule=rule)
    return target


def build_target_and_draft(folder: Place, step: int, *, token: str, name: str | None = None) -> tuple[Place, Place]:
    """Return the final path of the snapshot of a step, and the path where it is written.

    Args:
        folder: folder of all snapshots.
        step: number of optimizer steps done.
        token: token of the writer.
        name: name by `layout.build_attempt_name`, if several workers write to a URL.
    """
    if isinstance(folder, RemotePath):  # without a commit record the folder does not count as a snapshot
        target: Place = folder / (name or layout.build_attempt_name(step))
        return target, target
    target = layout.build_snapshot_path(folder, step)
    return target, folder / f".{target.name}.{token}{layout.DRAFT_SUFFIX}"


def remove_draft(draft: Place) -> None:
    """Remove a draft; files that cannot be removed now are removed with the next committed snapshot."""
    if isinstance(draft, RemotePath):
        with contextlib.suppress(SnapshotError):  # the connection may be the cause of the failure
            retention.remove_snapshot_folders([draft])
    else:
        shutil.rmtree(draft, ignore_errors=True)


def build_save_error(step: int, folder: Place, reason: str) -> SnapshotError:
    """Return the error for a failed save."""
    remedy = "check whether the store can be reached" if isinstance(folder, RemotePath) else "free space"
    return SnapshotError(
        f"the snapshot of step {step} cannot be written: {reason}",
        where=str(folder),
        hint=f"{remedy}, or set `train.snapshot.dir`; older snapshots are untouched",
    )


def build_part_file_name(file: StagedFile) -> str:
    """Return the file name of a part."""
    return f"{file.name}{layout.PART_SUFFIX}"


def write_part(draft: Place, file: StagedFile, name: str) -> layout.SnapshotFile:
    """Write and hash a file in one pass, so that a reader detects bytes that the disk has changed."""
    header = file.outline.header()
    data = file.data.numpy().data
    state = layout.build_hasher(name)
    with open_durable_file(draft / build_part_file_name(file)) as out:
        if name == layout.HASH_IN_MEMORY and isinstance(out, io.FileIO):
            out = MemoryFile(out, len(header) + len(data))
        chunks = (data[begin : begin + layout.CHUNK_BYTES] for begin in range(0, len(data), layout.CHUNK_BYTES))
        begun = done = 0
        for chunk in (memoryview(header), *chunks):
            state.update(chunk)
            write_whole_chunk(out, chunk)
            done += len(chunk)
            if done - begun >= STRETCH_BYTES:
                begin_writing(out, begun, done)
                begun = done
    return layout.SnapshotFile(size_bytes=len(header) + len(data), digest=state.hexdigest())


def write_whole_chunk(out: ByteSink, chunk: memoryview) -> None:
    """Write all bytes to an unbuffered file, which may accept fewer at a time."""
    while chunk:
        chunk = chunk[out.write(chunk) :]


def write_commit_record(draft: Place, manifest: layout.Manifest) -> None:
    """Write and sync the manifest, and then the commit record."""
    text = manifest.to_bytes()
    for path, content in (
        (draft / layout.MANIFEST, text),
        (draft / layout.COMMIT, layout.commit_record(text, manifest.hash)),
    ):
        with open_durable_file(path) as out:
            write_whole_chunk(out, memoryview(content))


def publish_draft(draft: Place, target: Place) -> None:
    """Make the draft durable and rename it.

    A folder of that name is replaced, since it was damaged or is made once more.
    """
    if isinstance(draft, RemotePath) or isinstance(target, RemotePath):
        return  # the commit record already makes it complete
    sync_folder_names(draft)
    if target.exists():
        aside = exchange_folders(draft, target)
        sync_folder_names(target.parent)
        shutil.rmtree(aside)
    else:
        draft.rename(target)
    sync_folder_names(target.parent)
