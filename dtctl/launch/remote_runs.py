"""Runs that another control machine has launched, found on the nodes of a spec.

Anyone who may log in to the nodes as the same user may see and stop these runs; nothing else is required. A node's
report of a run is used with that node alone: the token in the report marks processes on that node.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from dtctl.errors import DtctlError, LaunchError, suggest_name
from dtctl.launch.cluster import ResolvedCluster
from dtctl.launch.control.link import NodeLink, open_node
from dtctl.launch.job_builder import format_this_user
from dtctl.launch.orphaned_runs import OrphanedRunNode, sweep_nodes
from dtctl.launch.records.events import decide_end_status
from dtctl.spec.nodes import NodeSpec
from dtctl.supervisor import frames
from dtctl.supervisor.messages.attempt import LogGap
from dtctl.supervisor.messages.base import Message
from dtctl.supervisor.messages.runs import ListRuns, LogsRead, ReadLogs, RunOnNode, RunsOnNode
from dtctl.transport.base import Target, Transport
from dtctl.transport.fanout import fan_out

SILENCE_S = 60.0
GRACE_S = 10.0


@dataclass(slots=True, kw_only=True)
class RemoteRun:
    """A run according to the records of its nodes."""

    run: str
    nodes: dict[str, RunOnNode] = field(default_factory=dict)
    """Report of each node."""

    @property
    def status(self) -> str:
        """Status of the run: running, succeeded, failed, stopped, or unknown if no node has a record of the end."""
        if any(node.is_running for node in self.nodes.values()):
            return "running"
        attempt = max(node.attempt for node in self.nodes.values())
        newest = [node for node in self.nodes.values() if node.attempt == attempt]
        is_stopped = any(node.is_stopped for node in newest)
        has_failed = any(node.exit_code for node in newest)
        if not (is_stopped or has_failed) and any(node.exit_code is None for node in newest):
            return "unknown"
        return decide_end_status(is_stopped=is_stopped, has_failed=has_failed)

    @property
    def first(self) -> RunOnNode:
        """Return the first node's report."""
        return next(iter(self.nodes.values()))

    @property
    def exit_code(self) -> int:
        """Return the exit code with which a launch would end."""
        codes = {"succeeded": 0, "failed": 8, "stopped": 128 + signal.SIGTERM}
        return codes.get(self.status, LaunchError.exit_code)


class RemoteRuns:
    """Runs on the nodes of a spec."""

    def __init__(self, cluster: ResolvedCluster) -> None:
        self._nodes: dict[str, NodeSpec] = {node.name: node for node in (*cluster.nodes, *cluster.spares)}
        self._cluster = cluster
        self._transport: Transport | None = None

    @property
    def transport(self) -> Transport:
        """Transport to the nodes, which is made at the first use."""
        self._transport = self._transport or self._cluster.make_transport()
        return self._transport

    def nodes_of(self, run: RemoteRun) -> dict[str, tuple[NodeSpec, Target]]:
        """Return the nodes that have a run, with their targets."""
        return {name: (self._nodes[name], self._cluster.targets[name]) for name in run.nodes}

    def runs(self) -> tuple[dict[str, RemoteRun], dict[str, DtctlError]]:
        """Return the runs by name, the newest last, and the nodes that could not be queried."""
        answers = fan_out(self._nodes, self._list_runs_on_node)
        errors = {name: answer for name, answer in answers.items() if isinstance(answer, DtctlError)}
        runs_by_name: dict[str, RemoteRun] = {}
        rows = [
            (name, row) for name, answer in answers.items() if isinstance(answer, RunsOnNode) for row in answer.runs
        ]
        for name, row in sorted(rows, key=lambda each: each[1].started):
            runs_by_name.setdefault(row.run, RemoteRun(run=row.run)).nodes[name] = row
        return runs_by_name, errors

    def _list_runs_on_node(self, node: NodeSpec) -> RunsOnNode:
        with self._open_node_link(node, ListRuns()) as link:
            return link.expect(RunsOnNode)

    def _open_node_link(self, node: NodeSpec, first: Message) -> AbstractContextManager[NodeLink]:
        transport = self.transport  # A sandbox that is down has no addresses; this call reports it.
        target = self._cluster.targets[node.name]
        return open_node(transport, target, first, python=node.python, workdir=node.workdir, silence_s=SILENCE_S)

    def follow_run_output(
        self, run: RemoteRun, show: Callable[[str, int, bytes], None], pause: Callable[[], bool]
    ) -> dict[str, LogsRead | DtctlError]:
        """Show the output of a run's newest attempt; return for each node its state at the end, or the error.

        Args:
            run: the run.
            show: called with node, rank and some bytes of its output.
            pause: called before each further request for output; waits, and returns False to end.
        """

        def follow_one(node: NodeSpec) -> LogsRead:
            attempt, offsets = -1, dict[str, int]()
            with self._open_node_link(node, ReadLogs(run=run.run, attempt=attempt)) as link:
                while True:
                    before = dict(offsets)
                    end = _receive_run_output(link, offsets, show)
                    if end.attempt != attempt:  # The output of the earlier attempt is complete.
                        attempt, offsets = end.attempt, {r: n - before.get(r, 0) for r, n in offsets.items()}
                    if not end.is_running or not pause():
                        return end
                    link.send(ReadLogs(run=run.run, attempt=attempt, offsets=offsets))

        return fan_out({name: self._nodes[name] for name in run.nodes}, follow_one)

    def stop(self, run: RemoteRun) -> Mapping[str, int | DtctlError]:
        """End a run on its nodes and name the requester to its launcher; return node -> processes left there."""

        def stop_one(name: str) -> int:
            node = self._nodes[name]
            target = OrphanedRunNode(target=self._cluster.targets[name], python=node.python, workdir=node.workdir)
            token = run.nodes[name].token
            answers = sweep_nodes(
                [target], self.transport, run=run.run, token=token, grace_s=GRACE_S, by=format_this_user()
            )
            answer = answers[name]
            if isinstance(answer, DtctlError):
                raise answer
            return answer

        return fan_out({name: name for name in run.nodes}, stop_one)


def _receive_run_output(link: NodeLink, offsets: dict[str, int], show: Callable[[str, int, bytes], None]) -> LogsRead:
    """Show output until the node has sent all that it has, and advance the offsets."""
    while True:
        frame = link.receive()
        if frame is None:
            raise link.closed_error()
        kind, rank, payload = frame
        if kind == frames.LOG:
            offsets[str(rank)] = offsets.get(str(rank), 0) + len(payload)
            show(link.node, rank, payload)
            continue
        answer = link.parse(payload, LogGap, LogsRead)
        if isinstance(answer, LogGap):
            offsets[str(answer.rank)] = offsets.get(str(answer.rank), 0) + answer.bytes
        elif isinstance(answer, LogsRead):
            return answer


def find_run_on_nodes(cluster: ResolvedCluster, run: str, *, here: Iterable[str]) -> tuple[RemoteRuns, RemoteRun]:
    """Find a run on the nodes by its name.

    Args:
        cluster: the nodes.
        run: name of the run.
        here: names of the runs in this folder, for the hint.

    Raises:
        LaunchError: no node has the run.
        DtctlError: no node could be reached.
    """
    elsewhere = RemoteRuns(cluster)
    runs, errors = elsewhere.runs()
    if run in runs:
        return elsewhere, runs[run]
    if errors and not runs:
        raise next(iter(errors.values()))
    raise LaunchError(
        f"there is no run {run}, neither of this folder nor on the nodes of the spec",
        hint=suggest_name(
            run,
            [*here, *runs],
            "`dtctl runs` lists those of this folder, `dtctl runs --nodes` those on the nodes",
        ),
    )
