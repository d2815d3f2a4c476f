"""Choice of the newest snapshot that all workers together can read and verify, from the files on each node.

Nodes may share a folder, or each node has one with a whole snapshot, a part of it, or nothing. Every file is read once,
by a worker on a node that has it. If it is damaged there, a worker on another node reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import read
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.json_collectives import gather_json, spread_json
from dtctl.runtime.snapshot.storage.place import Place, RemotePath


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSnapshot:
    """Snapshot that was chosen from the folders; the same on all workers except for the contents."""

    path: str | None
    """Path of the newest good snapshot; None if there is none."""
    manifest: layout.Manifest | None
    rejected: tuple[str, ...]
    """Newer snapshots that were passed over, each with the reason."""
    readers: Mapping[str, int] = field(default_factory=dict)
    """File -> rank of the worker that has read it."""
    contents: read.Contents = field(default_factory=dict)
    """Bytes of the files that this worker has read."""


@dataclass(slots=True)
class _SnapshotCandidate:
    """A snapshot as its manifest describes it, and the nodes that have its files."""

    path: Place
    holders: dict[int, list[int] | None]
    """First rank of a node -> numbers of the files that lie there; None for all."""


def choose_newest_snapshot(folder: Place, worker: Worker) -> ChosenSnapshot:
    """Find and read the newest good snapshot; collective over all workers.

    Raises:
        SnapshotError: a folder cannot be read, or has a snapshot of a later format; raised on every worker.
    """
    # All workers see the same files at a URL, as if they were on one node.
    looks = worker.is_first if isinstance(folder, RemotePath) else worker.local_rank == 0
    offers = gather_json(_list_node_snapshots(folder) if looks else None, worker)
    nodes: dict[int, list[int]] = {}
    for rank, offer in enumerate(offers):
        nodes.setdefault(rank if offer is not None else max(nodes), []).append(rank)
        if offer is not None and offer["error"]:
            raise SnapshotError(offer["error"], where=offer["where"], hint=offer["hint"])
    rows = [(node, row) for node in nodes for row in offers[node]["rows"]]
    rejected: list[str] = []
    for step in sorted({row["step"] for _, row in rows}, reverse=True):
        step_rows = [(node, row) for node, row in rows if row["step"] == step]
        wrong = {(row["status"], phrase): None for _, row in step_rows for phrase in row["bad"]}
        for candidate in _group_snapshot_candidates(folder, step_rows):
            reading = _CollectiveRead(candidate, nodes, worker).run(wrong)
            if reading is not None:
                return ChosenSnapshot(
                    path=str(candidate.path),
                    manifest=reading.manifest,
                    rejected=tuple(rejected),
                    readers=reading.readers,
                    contents=reading.contents,
                )
        status = "corrupt" if any(status == "corrupt" for status, _ in wrong) else "incomplete"
        rejected.append(
            f"{step_rows[0][1]['name']} is {status}: {'; '.join(dict.fromkeys(phrase for _, phrase in wrong))}"
        )
    return ChosenSnapshot(path=None, manifest=None, rejected=tuple(rejected))


def _run_reporting_errors(action: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of an action as JSON. An error is returned too, so that the other workers need not wait."""
    try:
        return {"error": None, "found": action()}
    except DtctlError as exc:
        return {"error": exc.message, "where": exc.where, "hint": exc.hint}
    except OSError as exc:
        return {"error": f"the snapshots cannot be read: {exc}", "where": exc.filename, "hint": None}


def _require_report_results(reports: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the results in the reports of all workers.

    Raises:
        SnapshotError: first error that was reported.
    """
    for report in reports:
        if report["error"]:
            raise SnapshotError(report["error"], where=report["where"], hint=report["hint"])
    return [report["found"] for report in reports]


def _list_node_snapshots(folder: Place) -> dict[str, Any]:
    """Return the snapshots on this node.

    Errors are returned, not raised, since the other workers wait for the result.
    """
    answer: dict[str, Any] = {"error": None, "where": str(folder), "hint": None, "rows": []}
    try:
        for step, path in layout.list_step_folders(folder):
            verdict = read.verify_commit_record(path)
            row: dict[str, Any] = {
                "step": step,
                "name": path.name,
                "status": verdict.status,
                "bad": list(verdict.bad),
                "digest": None,
                "has": None,
            }
            if verdict.manifest is not None:
                row["digest"] = (path / layout.COMMIT).read_text()
                present = layout.list_folder_entries(path)
                present_files = [
                    number for number, name in enumerate(verdict.manifest.files) if present.get(name) is not None
                ]
                row["has"] = None if len(present_files) == len(verdict.manifest.files) else present_files
            answer["rows"].append(row)
    except DtctlError as exc:
        answer |= {"error": exc.message, "where": exc.where, "hint": exc.hint}
    except OSError as exc:
        answer["error"] = f"the snapshots cannot be read: {exc}"
    return answer


def _group_snapshot_candidates(
    folder: Place, rows: Sequence[tuple[int, Mapping[str, Any]]]
) -> Iterator[_SnapshotCandidate]:
    """Yield the snapshots of one step, grouped by their commit records; the one that most nodes have comes first."""
    groups: dict[tuple[str, str], dict[int, list[int] | None]] = {}
    for node, row in rows:
        if row["digest"] is not None:
            groups.setdefault((row["name"], row["digest"]), {})[node] = row["has"]
    for (name, _), holders in sorted(groups.items(), key=lambda group: len(group[1]), reverse=True):
        yield _SnapshotCandidate(folder / name, holders)


class _CollectiveRead:
    """Attempt of all workers to read a snapshot together."""

    manifest: layout.Manifest

    def __init__(self, candidate: _SnapshotCandidate, nodes: Mapping[int, Sequence[int]], worker: Worker) -> None:
        self._path, self._holders = candidate.path, candidate.holders
        self._nodes, self._worker = nodes, worker
        self.readers: dict[str, int] = {}
        self.contents: read.Contents = {}

    def run(self, wrong: dict[tuple[str, str], None]) -> _CollectiveRead | None:
        """Read all files and compare digests; return None if no node has a good copy of some file.

        Damage is added to `wrong`.
        """
        source, text = next(iter(self._holders)), None
        if self._worker.rank == source:
            text = _run_reporting_errors((self._path / layout.MANIFEST).read_text)
        self.manifest = layout.Manifest.from_bytes(
            _require_report_results([spread_json(text, self._worker, source)])[0].encode(), where=str(self._path)
        )
        unread = list(self.manifest.files)
        having: dict[str, list[int]] = {}
        for number, name in enumerate(unread):
            having[name] = [node for node, has in self._holders.items() if has is None or number in has]
        while unread:
            lost = [name for name in unread if not having[name]]
            if lost:
                named_files = {phrase.split(" ")[0] for _, phrase in wrong}
                wrong.update({("incomplete", f"{name} is missing"): None for name in lost if name not in named_files})
                return None
            readers = self._shared_out(unread, having)
            faults = self._read_own_share(unread, readers)
            wrong.update({("corrupt", phrase): None for phrase in faults.values()})
            self.readers |= {name: rank for name, rank in readers.items() if name not in faults}
            unread = list(faults)
            for name in unread:  # another node may have a good copy
                having[name] = [node for node in having[name] if readers[name] not in self._nodes[node]]
        return self

    def _read_own_share(self, names: Sequence[str], readers: Mapping[str, int]) -> dict[str, str]:
        """Read this worker's files; return the faults that all workers have found, by file. Collective."""
        own = [name for name in names if readers[name] == self._worker.rank]
        found = _run_reporting_errors(partial(read.find_file_faults, self._path, self.manifest, own, self.contents))
        faults: dict[str, str] = {}
        for reported in _require_report_results(gather_json(found, self._worker)):
            faults |= reported
        return faults

    def _shared_out(self, names: Sequence[str], having: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the reader of each file: the worker that wrote it if possible, else the one with the least to read."""
        loads = dict.fromkeys(range(self._worker.world_size), 0)
        shares = {}
        for name in sorted(names, key=lambda name: -self.manifest.files[name].size_bytes):
            able = [rank for node in having[name] for rank in self._nodes[node]]
            writer = layout.parse_piece_rank(name)
            reader = writer if writer in able else min(able, key=lambda rank: (loads[rank], rank))
            shares[name] = reader
            loads[reader] += self.manifest.files[name].size_bytes
        return shares
