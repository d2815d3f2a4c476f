"""Runs that another control machine has launched, found again on the nodes of a spec.

Anyone who may log in to the nodes as the same user may see and stop them; nothing else is required. A node's report of
a run is used with that node alone: the token in it marks processes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from dtctl.errors import DtctlError, LaunchError
from dtctl.launch.assemble import this_user
from dtctl.launch.cluster import ResolvedCluster
from dtctl.launch.control.link import NodeLink, open_node
from dtctl.launch.sweep import SweepTarget, sweep
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
class FoundRun:
    """A run from the records of its nodes."""

    run: str
    nodes: dict[str, RunOnNode] = field(default_factory=dict)
    """Node -> its report."""

    @property
    def status(self) -> str:
        """running, succeeded, failed, or unknown: no node has a record of its end."""
        if any(node.is_running for node in self.nodes.values()):
            return "running"
        attempt = max(node.attempt for node in self.nodes.values())
        codes = [node.exit_code for node in self.nodes.values() if node.attempt == attempt]
        if any(codes):
            return "failed"
        return "unknown" if None in codes else "succeeded"

    @property
    def first(self) -> RunOnNode:
        """Return the first node's report."""
        return next(iter(self.nodes.values()))

    @property
    def exit_code(self) -> int:
        """Return the exit code with which a launch would end."""
        return {"succeeded": 0, "failed": 8}.get(self.status, LaunchError.exit_code)


class RunElsewhere:
    """The nodes of a spec, asked for runs."""

    def __init__(self, cluster: ResolvedCluster) -> None:
        self._nodes: dict[str, NodeSpec] = {node.name: node for node in (*cluster.nodes, *cluster.spares)}
        self._cluster = cluster
        self._transport: Transport | None = None

    @property
    def transport(self) -> Transport:
        """The way to the nodes; made when it is needed."""
        self._transport = self._transport or self._cluster.make_transport()
        return self._transport

    def nodes_of(self, run: FoundRun) -> dict[str, tuple[NodeSpec, Target]]:
        """Return the nodes that have a run, and how they are reached."""
        return {name: (self._nodes[name], self._cluster.targets[name]) for name in run.nodes}

    def runs(self) -> tuple[dict[str, FoundRun], dict[str, DtctlError]]:
        """Runs by name, the newest last, and the nodes that could not be asked."""
        answers = fan_out(self._nodes, self._list)
        errors = {name: answer for name, answer in answers.items() if isinstance(answer, DtctlError)}
        runs_by_name: dict[str, FoundRun] = {}
        rows = [
            (name, row) for name, answer in answers.items() if isinstance(answer, RunsOnNode) for row in answer.runs
        ]
        for name, row in sorted(rows, key=lambda each: each[1].started):
            runs_by_name.setdefault(row.run, FoundRun(run=row.run)).nodes[name] = row
        return runs_by_name, errors

    def _list(self, node: NodeSpec) -> RunsOnNode:
        with self._open(node, ListRuns()) as link:
            return link.expect(RunsOnNode)

    def _open(self, node: NodeSpec, first: Message) -> AbstractContextManager[NodeLink]:
        transport = self.transport  # first: of a sandbox that is down there is none, and no address of a node
        target = self._cluster.targets[node.name]
        return open_node(transport, target, first, python=node.python, workdir=node.workdir, silence_s=SILENCE_S)

    def follow(
        self, run: FoundRun, show: Callable[[str, int, bytes], None], pause: Callable[[], bool]
    ) -> dict[str, LogsRead | DtctlError]:
        """Show the output of a run's newest attempt; return node -> its state at the end, or why that is not known.

        Args:
            run: the run.
            show: called with node, rank and some bytes of its output.
            pause: waits before the next request for output; returns False to end.
        """

        def follow_one(node: NodeSpec) -> LogsRead:
            attempt, offsets = -1, dict[str, int]()
            with self._open(node, ReadLogs(run=run.run, attempt=attempt)) as link:
                while True:
                    before = dict(offsets)
                    end = _read(link, offsets, show)
                    if end.attempt != attempt:  # of another one everything was sent
                        attempt, offsets = end.attempt, {r: n - before.get(r, 0) for r, n in offsets.items()}
                    if not end.is_running or not pause():
                        return end
                    link.send(ReadLogs(run=run.run, attempt=attempt, offsets=offsets))

        return fan_out({name: self._nodes[name] for name in run.nodes}, follow_one)

    def stop(self, run: FoundRun) -> Mapping[str, int | DtctlError]:
        """End a run on its nodes and name the requester to its launcher; return node -> processes left there."""

        def stop_one(name: str) -> int:
            node = self._nodes[name]
            target = SweepTarget(target=self._cluster.targets[name], python=node.python, workdir=node.workdir)
            token = run.nodes[name].token
            answers = sweep([target], self.transport, run=run.run, token=token, grace_s=GRACE_S, by=this_user())
            answer = answers[name]
            if isinstance(answer, DtctlError):
                raise answer
            return answer

        return fan_out({name: name for name in run.nodes}, stop_one)


def _read(link: NodeLink, offsets: dict[str, int], show: Callable[[str, int, bytes], None]) -> LogsRead:
    """Show output until the node has sent all that there is, and advance the offsets."""
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


def find(cluster: ResolvedCluster, run: str) -> tuple[RunElsewhere, FoundRun]:
    """Return a run of this name on the nodes.

    Raises:
        LaunchError: no node has it.
        DtctlError: no node could be reached.
    """
    elsewhere = RunElsewhere(cluster)
    runs, errors = elsewhere.runs()
    if run in runs:
        return elsewhere, runs[run]
    if errors and not runs:
        raise next(iter(errors.values()))
    raise LaunchError(
        f"there is no run {run}, neither of this folder nor on the nodes of the spec",
        hint="`dtctl runs` lists those of this folder, `dtctl runs --nodes` those on the nodes",
    )
