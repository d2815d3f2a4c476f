"""Distributed snapshots, whose parts are on the nodes of a run: their state as a whole, and their transfer.

A node's answer decides about its own files, and about files of other nodes only if these depend on that node: see
`list_removable_snapshots`. A malicious node can damage only snapshots that could not be read without it.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from dtctl import folders
from dtctl.errors import NodeError, SnapshotError
from dtctl.launch.snapshot_answers import SendAnswer, SnapshotParts, parse_node_manifest
from dtctl.launch.snapshots import RunSnapshots
from dtctl.schema import InvalidMessage, check_number

RECORDS = ("manifest.json", "COMMIT")


@dataclass(slots=True, kw_only=True)
class DistributedSnapshot:
    """A snapshot over all nodes that have a part of it."""

    step: int
    path: str
    """Path on the first node that has a part of the snapshot."""
    record: str | None = None
    """Text of the commit record."""
    manifest: str | None = None
    """Text of the manifest, whose digest is in the record."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each file, from the manifest."""
    retention: Mapping[str, Any] = field(default_factory=dict)
    """Retention rule of the writer, from the manifest."""
    paths: dict[str, str] = field(default_factory=dict)
    """Path of the snapshot on each node."""
    good_files: dict[str, frozenset[str]] = field(default_factory=dict)
    """Files on each node whose contents are right."""
    made_s: dict[str, float] = field(default_factory=dict)
    """Time when each node had the snapshot, in seconds since the epoch by the node's own clock."""
    problems: list[str] = field(default_factory=list)

    @property
    def nodes(self) -> list[str]:
        """Return the nodes that have a part of the snapshot."""
        return list(self.paths)

    @property
    def files(self) -> list[str]:
        """Return the files of the manifest."""
        return list(self.sizes)

    @property
    def holders(self) -> dict[str, str]:
        """Return for each file the first node on which its contents are right."""
        node_of: dict[str, str] = {}
        for node, names in self.good_files.items():
            node_of = {**dict.fromkeys(names, node), **node_of}
        return {name: node_of[name] for name in self.sizes if name in node_of}

    @property
    def complete(self) -> list[str]:
        """Return the nodes that have the whole snapshot."""
        return [node for node in self.paths if self.is_readable_on({node})]

    @property
    def is_readable(self) -> bool:
        """Return whether every file is right on some node."""
        return self.is_readable_on(self.paths.keys())

    def is_readable_on(self, nodes: AbstractSet[str]) -> bool:
        """Return whether every file is right on one of these nodes."""
        readable_files: set[str] = set().union(*(self.good_files.get(node, frozenset()) for node in nodes))
        return bool(self.sizes) and readable_files >= self.sizes.keys()

    def to_row(self) -> dict[str, Any]:
        """Return the row of `dtctl snapshot verify`: ok if the snapshot can be read, even if one copy is bad."""
        holders = self.holders
        missing = [f"{name} is missing" for name in self.sizes if name not in holders]
        unreported = [name for name in missing if not any(name.split(" ")[0] in phrase for phrase in self.problems)]
        status = "ok"
        if not self.is_readable:
            status = "corrupt" if self.problems and self.sizes else "incomplete"
        bad = [*self.problems, *unreported]
        return {"path": self.path, "step": self.step, "status": status, "bad": bad, "node": ", ".join(self.nodes)}


def merge_node_snapshots(answers: Mapping[str, SnapshotParts]) -> list[DistributedSnapshot]:
    """Combine the `pieces` that each node reports into snapshots, newest first.

    Snapshots of one step belong together if they have one commit record and one manifest.
    """
    snapshots: dict[tuple[Any, ...], DistributedSnapshot] = {}
    for node, answer in answers.items():
        for row in answer.rows:
            step, record, manifest = row.step, row.record, row.manifest
            key = (step, record, manifest) if record and manifest else (step, node)
            snapshot = snapshots.get(key)
            if snapshot is None:
                snapshot = snapshots[key] = DistributedSnapshot(step=step, path=row.path)
                if record and manifest:
                    try:
                        _apply_snapshot_manifest(snapshot, record, manifest, node)
                    except NodeError as exc:  # The snapshot then has no files on this node.
                        snapshot.problems.append(f"{node}: {exc.message}")
            snapshot.paths[node], snapshot.made_s[node] = row.path, row.made_s
            snapshot.good_files[node] = frozenset(row.good)
            snapshot.problems += [f"{node}: {phrase}" for phrase in row.bad]
    return sorted(snapshots.values(), key=lambda snapshot: -snapshot.step)


def _apply_snapshot_manifest(snapshot: DistributedSnapshot, record: str, manifest: str, node: str) -> None:
    document = parse_node_manifest(manifest, node=node)
    if document.step != snapshot.step or not _is_record_for_manifest(record, manifest):
        raise NodeError(f"manifest and commit record of step {snapshot.step} do not agree", node=node)
    rule = document.facts.get("retention")
    snapshot.record, snapshot.manifest = record, manifest
    snapshot.sizes = {name: entry.size_bytes for name, entry in document.files.items()}
    snapshot.retention = rule if isinstance(rule, dict) else {}


def _is_record_for_manifest(record: str, manifest: str) -> bool:
    """Return whether a commit record belongs to a manifest.

    Without the package blake3, a record with a BLAKE3 digest is accepted: the nodes sent the same texts of both.
    """
    name, _, digest_line = record.partition(" ")
    if name == "blake3":
        try:
            from blake3 import blake3
        except ImportError:
            return True
        digest = blake3(manifest.encode()).hexdigest()
    elif name == "sha256":
        digest = hashlib.sha256(manifest.encode()).hexdigest()
    else:
        return False
    return digest_line == f"{digest} {RECORDS[0]}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRule:
    """Rule for the snapshots to keep; a field that is None takes the value of the run that made them."""

    keep: int | None = None
    """Number of the newest snapshots that are kept; at least one."""
    every_s: float | None = None
    """Least seconds between older snapshots that are kept."""
    keep_best: bool = True
    """True if the snapshots with the best results are kept."""

    def choose_kept_steps(self, readable: Sequence[tuple[DistributedSnapshot, float]]) -> set[int]:
        """Return the steps to keep of readable snapshots and their times; the newest is always kept."""
        oldest_first = sorted(readable, key=lambda row: row[0].step)
        recorded_rule = oldest_first[-1][0].retention if oldest_first else {}
        keep, every_s = self.keep, self.every_s
        if keep is None:
            keep = _parse_number_or_default(recorded_rule.get("keep"), 1)
        if every_s is None:
            every_s = _parse_number_or_default(recorded_rule.get("every_s"), 0.0) or None
        kept_steps = {snapshot.step for snapshot, _ in oldest_first[-int(max(1, keep)) :]}
        if every_s is not None:
            last_s = -math.inf
            for snapshot, made_s in oldest_first:
                if made_s - last_s >= every_s:
                    kept_steps.add(snapshot.step)
                    last_s = made_s
        best = recorded_rule.get("best")
        if self.keep_best and isinstance(best, list):
            kept_steps |= {snapshot.step for snapshot, _ in oldest_first if snapshot.step in best}
        return kept_steps


def _parse_number_or_default(value: Any, otherwise: float) -> Any:
    try:
        return check_number(value)
    except InvalidMessage:
        return otherwise


def list_removable_snapshots(
    snapshots: Sequence[DistributedSnapshot], rule: PruneRule, node: str, *, all_answered: bool
) -> list[DistributedSnapshot]:
    """Return the snapshots that `dtctl snapshot prune` removes on one node.

    The rule is applied to the whole snapshots that the node has a share in, so that reports of other nodes about their
    own snapshots do not remove anything. A snapshot is removed only if a kept one can be read from those nodes alone
    that the removed one needed.

    Args:
        snapshots: newest first.
        rule: rule for the snapshots to keep.
        node: name of the node.
        all_answered: whether every node of the run has answered; a file that seems to be missing may be on a node that
            has not.
    """
    on_node = [snapshot for snapshot in snapshots if node in snapshot.paths]
    readable = [snapshot for snapshot in on_node if snapshot.is_readable and snapshot.good_files.get(node)]
    if not readable:
        return []
    steps = rule.choose_kept_steps([(snapshot, snapshot.made_s[node]) for snapshot in readable])
    kept_snapshots = [snapshot for snapshot in readable if snapshot.step in steps]
    newest = max(snapshot.step for snapshot in readable)

    def is_removable(snapshot: DistributedSnapshot) -> bool:
        # The node removes snapshots by step, so another snapshot of a kept step stays too.
        if snapshot.step in steps:
            return False
        if snapshot.is_readable:
            needed = {node} if snapshot.is_readable_on({node}) else set(snapshot.paths)
            return any(other.is_readable_on(needed) for other in kept_snapshots)
        # An incomplete snapshot newer than all readable ones may still be being written: nodes commit one by one.
        under_way = snapshot.step > newest and snapshot.to_row()["status"] == "incomplete"
        return all_answered and not under_way

    return [snapshot for snapshot in on_node if is_removable(snapshot)]


@contextmanager
def fetch_whole_snapshot(run: RunSnapshots, snapshot: DistributedSnapshot) -> Iterator[Path]:
    """Provide a folder on this machine with all files of a snapshot, as long as the context lasts.

    Only the files of its manifest are fetched, up to the size given there, into a new folder that only this user can
    read. The reader compares digests first.

    Raises:
        SnapshotError: a file did not arrive.
        TransportError: a node, or the connection to it, fails.
    """
    shares: dict[str, list[str]] = {}
    for name, node in snapshot.holders.items():
        shares.setdefault(node, []).append(name)
    with tempfile.TemporaryDirectory(prefix="dtctl-snapshot-") as temporary:
        target = Path(temporary, f"step-{snapshot.step:08d}")
        target.mkdir(mode=0o700)
        folder = folders.open_folder(str(target))
        try:
            for name, text in zip(RECORDS, (snapshot.manifest, snapshot.record), strict=True):
                with os.fdopen(folders.create_in(folder, name), "w", encoding="utf-8", newline="") as out:
                    out.write(text or "")
            for node, names in shares.items():
                _receive_snapshot_files(run, node, snapshot, names, folder)
        finally:
            os.close(folder)
        yield Path(temporary)


def _receive_snapshot_files(
    run: RunSnapshots, node: str, snapshot: DistributedSnapshot, names: Sequence[str], folder: int
) -> None:
    options = ["--step", str(snapshot.step), *(argument for name in names for argument in ("--name", name))]
    total_bytes = sum(snapshot.sizes[name] for name in names)
    with tempfile.TemporaryFile() as received:
        run.fetch(node, SendAnswer, options, cast(BinaryIO, received), limit_bytes=total_bytes)
        if received.tell() != total_bytes:
            raise SnapshotError("the files did not arrive completely", where=f"node {node}", hint="try again")
        received.seek(0)
        for name in names:
            remaining = snapshot.sizes[name]
            with os.fdopen(folders.create_in(folder, name), "wb") as out:
                while chunk := received.read(min(remaining, 1 << 20)):
                    remaining -= out.write(chunk)
