"""Snapshots that all workers write together: each worker writes its pieces, and one manifest covers all of them.

No worker gathers the state. In a thread next to training every worker writes and syncs its files and sends their
digests to the others; when all are durable, one worker of each folder writes the manifest and the commit record, and
renames the draft. Older snapshots are removed when every folder has the new one. Nodes with folders of their own may
keep copies for each other (copies.py).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime.bits import MODULUS
from dtctl.runtime.console import write_error_to_stderr
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import state_sum, write
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.format.pieces import Key, PieceAssignment, extract_local_pieces
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.storage import copies, retention
from dtctl.runtime.snapshot.storage.durable import make_durable_folder
from dtctl.runtime.snapshot.storage.place import Place, RemotePath
from dtctl.runtime.snapshot.storage.staging import StagedState
from dtctl.runtime.snapshot.storage.stores import SnapshotStores, find_shared_stores

PATIENCE: Final = dt.timedelta(hours=1)
"""Time for which a worker waits for another one with a slower disk."""


class DistributedSaver(Saver):
    """A `Saver` on every worker; all methods are collective, except `wait` and `busy`."""

    collective = True

    def __init__(
        self,
        folder: str | Place,
        worker: Worker,
        *,
        keep: int = 2,
        keep_every_s: float | None = None,
        in_pieces: bool = True,
        replicas: int = 0,
        firsts: Callable[[Key], bool] = lambda _: False,
        when_busy: Literal["wait", "skip"] = "wait",
        max_failed: int = 3,
        in_memory: bool = False,
        complain: Callable[[DtctlError], None] = write_error_to_stderr,
        committed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Make a process group for the writing threads, and write nothing yet. Collective.

        Args:
            folder: folder for all snapshots of the run, on each node, or its URL; made if needed.
            worker: this worker, which is one of several.
            keep: number of snapshots to keep.
            keep_every_s: interval in seconds at which older snapshots are kept as well.
            in_pieces: True if each worker writes its pieces; else each writes everything that it is given, which is
                nothing on most workers.
            replicas: number of other nodes that keep a copy of a node's files, if each node has its own folder.
            firsts: returns True for keys of shared state that are taken from the first worker, since the values may
                differ.
            when_busy: action of a save while another one is under way.
            max_failed: number of consecutive failed saves after which `save` raises.
            in_memory: as in `Saver`.
            complain: called with each failure on the first worker, from the writing thread.
            committed: as in `Saver`, on every worker.
        """
        first = worker.is_first
        super().__init__(
            folder,
            keep=keep,
            keep_every_s=keep_every_s,
            when_busy=when_busy,
            max_failed=max_failed,
            in_memory=in_memory,
            complain=complain if first else lambda _: None,
            committed=committed,
        )
        self.in_pieces = in_pieces
        self._worker, self._replicas = worker, replicas
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._division = PieceAssignment(worker, firsts)
        self._stores: SnapshotStores | None = None

    def rejoin(self) -> None:
        """Continue with another process group after workers were lost and replaced; collective.

        A snapshot that was being written is lost; this does not count as a failure.
        """
        self.wait()
        self._error, self.failed = None, 0
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._stores = None

    def open(self) -> None:
        """Open every folder as `Saver.open` does, by one of the workers that see it. Collective.

        Raises:
            SnapshotError: another run writes to one of the folders, or it cannot be written; raised on every worker.
        """
        if self._stores is not None:
            return
        folders = find_shared_stores(self._folder, self._worker, in_memory=self._in_memory)
        error = None
        if self._worker.rank == folders.committing_worker:
            try:
                super().open()
            except DtctlError as exc:
                error = {"message": exc.message, "where": exc.where, "hint": exc.hint}
        for text in gather_json(error, self._worker):
            if text is not None:
                self.close()
                raise SnapshotError(text["message"], where=text["where"], hint=text["hint"])
        self._stores = folders

    def close(self) -> None:
        """Close as `Saver.close` does."""
        super().close()
        self._stores = None

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        *,
        facts: Mapping[str, Any],
        best: Collection[int] = (),
        needed: bool = False,
    ) -> bool:
        """Save as `Saver.save` does, on every worker its own part; facts and `best` are taken from the first worker."""
        self.open()
        if self._when_busy == "skip" and not needed:
            # The first worker decides, so that all workers do the same.
            busy = torch.tensor([int(self.busy)])
            dist.broadcast(busy, src=0, group=self._worker.group)
            if int(busy):
                return False
        return super().save(step, self.share(parts), facts=facts, best=best, needed=True)

    def share(self, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of the state that this worker writes."""
        if not self.in_pieces:
            return parts
        divided = self._division.select_own_pieces(extract_local_pieces(parts))
        return {layout.build_piece_name(part, self._worker.rank): tree for part, tree in divided.items()}

    def _write_staged(
        self, step: int, staged: StagedState, facts: Mapping[str, Any], rule: retention.RetentionRule
    ) -> Place | None:
        """Write as `Saver._write_staged` does; a failure on any worker fails all of them together."""
        folders, worker = self._stores, self._worker
        assert folders is not None  # noqa: S101  # for the type checker
        name = None
        if isinstance(self._folder, RemotePath):
            name = gather_json(layout.build_attempt_name(step) if worker.is_first else None, worker, self._group)[0]
        target, draft = write.build_target_and_draft(self._folder, step, token=folders.token, name=name)
        leads = worker.rank == folders.committing_worker

        def written() -> Any:
            make_durable_folder(self._folder)
            draft.mkdir(exist_ok=True)
            staged.wait()
            with state_sum.start_state_sum(staged) as total:
                own = {
                    write.build_part_file_name(file): write.write_part(draft, file, folders.hash).document()
                    for file in staged.files
                }
            return {"files": own, "facts": facts if worker.is_first else None, "sum": total.result()}

        try:
            reports = self._run_on_all_workers(step, written)
            files = [{name: layout.SnapshotFile(**entry) for name, entry in row["files"].items()} for row in reports]
            sent = copies.plan_replica_copies(folders, [list(row) for row in files], self._replicas)
            every = {name: _add_piece_part(name, entry) for row in files for name, entry in row.items()}
            if isinstance(draft, Path):  # the other case is a store, which needs no copies
                send = partial(copies.exchange_copies, sent, draft, staged, every, folders.hash, worker, self._group)
                self._run_on_all_workers(step, send)
            facts = {
                **reports[0]["facts"],
                state_sum.FACT: state_sum.format_sum(sum(row["sum"] for row in reports) % MODULUS),
            }
            manifest = layout.Manifest(step=step, hash=folders.hash, facts=facts, files=every)
            own_ranks = folders.ranks[folders.own]
            has_some = any(files[rank] for rank in own_ranks) or any(copy.taker in own_ranks for copy in sent)
            self._run_on_all_workers(
                step, lambda: self._commit_draft(draft, target, manifest) if leads and has_some else None
            )
        except DtctlError:
            if leads or not isinstance(draft, RemotePath):
                write.remove_draft(draft)
            raise

        def pruned() -> None:
            if leads:
                retention.remove_expired_snapshots(self._folder, newest=target, rule=rule)

        # All workers wait here, so that none begins the next draft while old drafts are removed.
        self._run_on_all_workers(step, pruned)
        return target if leads and has_some else None

    def _commit_draft(self, draft: Place, target: Place, manifest: layout.Manifest) -> None:
        assert self._lease is not None  # noqa: S101  # for the type checker
        self._lease.require()
        write.write_commit_record(draft, manifest)
        self._notes.add(manifest.step, draft)
        write.publish_draft(draft, target)

    def _run_on_all_workers(self, step: int, action: Callable[[], Any]) -> list[Any]:
        """Run an action on every worker, and return the results of all.

        Raises:
            SnapshotError: the action failed on some worker; raised on all.
        """
        error, result = None, None
        try:
            result = action()
        except Exception as exc:  # noqa: BLE001  # any error, since the other workers wait for the result
            error = exc.message if isinstance(exc, DtctlError) else str(exc) or repr(exc)
        reports = gather_json([error, result], self._worker, self._group)
        for rank, (reason, _) in enumerate(reports):
            if reason is not None:
                raise write.build_save_error(step, self._folder, f"{reason} (rank {rank})")
        return [answer for _, answer in reports]


def _add_piece_part(name: str, entry: layout.SnapshotFile) -> layout.SnapshotFile:
    part = layout.parse_piece_name(name)
    return entry if part is None else dataclasses.replace(entry, part=part)
