"""Writing a snapshot so that it is there whole or not at all, whatever dies and whenever."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Final

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import state_sum
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.storage import retention
from dtctl.runtime.snapshot.storage.durable import ByteSink, begin_writing, exchanged, make_folder, sync_folder, written
from dtctl.runtime.snapshot.storage.place import Place, Remote
from dtctl.runtime.snapshot.storage.staging import Staged, StagedFile, Staging

STRETCH_BYTES: Final = 8 << 20
"""Bytes of a file that the disk begins to take at once, while the next ones are summed."""


def save(
    folder: Place,
    step: int,
    parts: Mapping[str, Any],
    *,
    facts: Mapping[str, Any],
    keep: int = 1,
) -> Place:
    """Write the snapshot of a step, commit it, and remove those that are no longer kept.

    Args:
        folder: of all snapshots of the run; made if needed.
        step: optimizer steps done.
        parts: name -> tensors and JSON's values in dicts and lists; one file each.
        facts: JSON for the loop, returned by a resume.
        keep: how many snapshots to keep, this one included.

    Returns:
        The snapshot's folder.

    Raises:
        SnapshotError: the disk is full or cannot be written; older snapshots are untouched.
    """
    return write(folder, step, Staging().take(parts), facts=facts, rule=retention.RetentionRule(keep=keep))


def write(
    folder: Place,
    step: int,
    staged: Staged,
    *,
    facts: Mapping[str, Any],
    rule: retention.RetentionRule,
    in_memory: bool = False,
    before_commit: Callable[[], None] = lambda: None,
    add_notes: Callable[[Place], None] = lambda _: None,
) -> Place:
    """Write as `save` does a state that was copied before; may run in another thread.

    `in_memory` chooses the digest (`layout.default_hash`). `before_commit` raises if there should be no snapshot after
    all; `add_notes` is given the folder before it gets its name.
    """
    target, draft = target_and_draft(folder, step, token=str(os.getpid()))
    try:
        make_folder(folder)
        draft.mkdir()
        staged.wait()
        name = layout.default_hash(in_memory=in_memory)
        with state_sum.summing(staged) as total:
            entries = {file_name(file): write_part(draft, file, name) for file in staged.files}
        facts = {**facts, state_sum.FACT: state_sum.to_fact(total.result())}
        before_commit()
        write_record(draft, layout.Manifest(step=step, hash=name, facts=facts, files=entries))
        add_notes(draft)
        publish(draft, target)
    except OSError as exc:
        abandon(draft)
        raise failure(step, folder, str(exc)) from exc
    except SnapshotError as exc:
        abandon(draft)
        if isinstance(folder, Remote):
            raise failure(step, folder, exc.message) from exc
        raise
    retention.prune(folder, newest=target, rule=rule)
    return target


def target_and_draft(folder: Place, step: int, *, token: str, name: str | None = None) -> tuple[Place, Place]:
    """Return where the snapshot of a step will lie, and where it is written.

    Args:
        folder: of all snapshots.
        step: optimizer steps done.
        token: of the writer.
        name: by `layout.attempt_name`, where several write to a URL.
    """
    if isinstance(folder, Remote):  # until it has a commit record, it is no snapshot
        target: Place = folder / (name or layout.attempt_name(step))
        return target, target
    target = layout.folder_of(folder, step)
    return target, folder / f".{target.name}.{token}{layout.DRAFT_SUFFIX}"


def abandon(draft: Place) -> None:
    """Remove what was written; what cannot be removed now goes with the next snapshot that is committed."""
    if isinstance(draft, Remote):
        with contextlib.suppress(SnapshotError):  # the way to it may be what has failed
            retention.remove([draft])
    else:
        shutil.rmtree(draft, ignore_errors=True)


def failure(step: int, folder: Place, reason: str) -> SnapshotError:
    """Return the error of a save that did not succeed."""
    remedy = "see whether the store can be reached" if isinstance(folder, Remote) else "free space"
    return SnapshotError(
        f"the snapshot of step {step} cannot be written: {reason}",
        where=str(folder),
        hint=f"{remedy}, or set `train.snapshot.dir`; older snapshots are untouched",
    )


def file_name(file: StagedFile) -> str:
    """Return what a part is called on disk."""
    return f"{file.name}{layout.PART_SUFFIX}"


def write_part(draft: Place, file: StagedFile, name: str) -> layout.SnapshotFile:
    """Write and hash in one pass: the reader detects a byte that the disk got wrong."""
    header = file.outline.header()
    data = file.data.numpy().data
    state = layout.hasher(name)
    with written(draft / file_name(file)) as out:
        chunks = (data[begin : begin + layout.CHUNK_BYTES] for begin in range(0, len(data), layout.CHUNK_BYTES))
        begun = done = 0
        for chunk in (memoryview(header), *chunks):
            state.update(chunk)
            write_all(out, chunk)
            done += len(chunk)
            if done - begun >= STRETCH_BYTES:
                begin_writing(out, begun, done)
                begun = done
    return layout.SnapshotFile(size_bytes=len(header) + len(data), digest=state.hexdigest())


def write_all(out: ByteSink, chunk: memoryview) -> None:
    """Write to an unbuffered file, which may take less than it is given."""
    while chunk:
        chunk = chunk[out.write(chunk) :]


def write_record(draft: Place, manifest: layout.Manifest) -> None:
    """Write and sync the manifest, and then the commit record."""
    text = manifest.to_bytes()
    for path, content in (
        (draft / layout.MANIFEST, text),
        (draft / layout.COMMIT, layout.commit_record(text, manifest.hash)),
    ):
        with written(path) as out:
            write_all(out, memoryview(content))


def publish(draft: Place, target: Place) -> None:
    """Make the draft durable and give it its name. A folder of that name was found bad at resume, or is made again."""
    if isinstance(draft, Remote) or isinstance(target, Remote):
        return  # it is all there since its commit record is
    sync_folder(draft)
    if target.exists():
        aside = exchanged(draft, target)
        sync_folder(target.parent)
        shutil.rmtree(aside)
    else:
        draft.rename(target)
    sync_folder(target.parent)
