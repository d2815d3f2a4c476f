"""Asks all nodes at once what the checks need to know, and lets them call each other. Decides nothing.

Each phase has a limit: a node that does not answer within it is reported, and the others are not kept waiting for it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtctl.doctor import answers, rounds
from dtctl.doctor.checks import links
from dtctl.doctor.node_report import NodeReport, good_ways
from dtctl.errors import ConnectError, DtctlError, NodeError
from dtctl.launch.control.link import NodeLink, error_of, open_program
from dtctl.launch.control.messages import before_start
from dtctl.supervisor import bootstrap
from dtctl.transport.base import Connection, Target, Transport

PROBE = (
    "dtctl.node_facts",
    "dtctl.supervisor.frames",
    "dtctl.supervisor.facts",
    "dtctl.doctor.probe.devices",
    "dtctl.doctor.probe.facts",
    "dtctl.doctor.probe.child",
    "dtctl.doctor.probe.shared",
    "dtctl.doctor.probe.quality",
    "dtctl.doctor.probe.pairs",
    "dtctl.doctor.probe.main",
)
ANSWER_LIMIT_S = 15.0
FACTS_LIMIT_S = 35.0
"""For what a node says of itself: a driver that is not kept awake may take half a minute to find eight GPUs."""
MEASURE_LIMIT_S = 6.0
"""What measuring a way may take beyond its seconds and what a node may be silent for: each phase ends itself."""
CALL_TIMEOUT_S = 2.5
"""Longer than the first repetition of a lost SYN (1 s), shorter than the third."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuery:
    """What to ask about one node."""

    target: Target
    python: str | None
    workdir: str
    paths: tuple[str, ...] = ()
    code: str = ""


class _Node:
    """The link to one node; used by one thread at a time."""

    def __init__(self, wanted: NodeQuery, transport: Transport) -> None:
        self.wanted = wanted
        self.seen = NodeReport(name=wanted.target.name)
        self._transport = transport
        self._connection: Connection | None = None
        self._link: NodeLink | None = None

    def begin(self, message: Mapping[str, Any]) -> None:
        """Connect, start the probe, ask for the time and the facts."""
        self._connection = self._transport.connect(self.wanted.target)
        self.seen.address = self._connection.peer_address()
        program = bootstrap.in_memory(PROBE)
        self._link = open_program(self._connection, program, node=self.seen.name, python=self.wanted.python)
        self.ask({"op": "time"})  # the first answer comes after the start of Python and says nothing about the clock
        before = time.time()
        there = float(self.ask({"op": "time"})["time"])
        after = time.time()
        self.seen.offset_s = there - (before + after) / 2
        self.seen.offset_error_s = (after - before) / 2
        asked = {"workdir": self.wanted.workdir, "paths": self.wanted.paths, "code": self.wanted.code}
        python = self.wanted.python or "python3"
        self.seen.facts = self.ask({"op": "facts", "python": python, **asked, **message})
        # Behind a jump host this machine does not know the address; the node knows the one that it was reached at.
        self.seen.address = self.seen.address or str(self.seen.facts["reached_at"])

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one question, wait for its answer.

        Raises:
            DtctlError: the node cannot answer, or the link is gone.
        """
        if self._link is None:
            raise ConnectError("there is no link", node=self.seen.name)
        with contextlib.suppress(ConnectError):
            self._link.send_json(message)
        said = self._link.receive_json()
        if said is None:
            raise self._link.closed_error()
        if said.get("op") == "error":
            raise error_of(before_start(said, node=self.seen.name), self.seen.name)
        return answers.answer(message, said, node=self.seen.name)

    def close(self) -> None:
        """Drop the link; the probe ends with it."""
        if self._link is not None:
            with contextlib.suppress(DtctlError):
                self._link.send_json({"op": "quit"})
        if self._connection is not None:
            self._connection.close()


def _all(nodes: Sequence[_Node], act: Callable[[_Node], None], *, limit_s: float, doing: str) -> None:
    """Do something on all nodes that are well; whoever does not finish in time has an error from now on."""

    def work(node: _Node) -> None:
        try:
            act(node)
        except DtctlError as exc:
            node.seen.error = node.seen.error or exc

    well = [node for node in nodes if node.seen.error is None]
    threads = [threading.Thread(target=work, args=(node,), daemon=True) for node in well]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for node, thread in zip(well, threads, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive() and node.seen.error is None:
            node.seen.error = ConnectError(
                f"no answer within {limit_s:g} s while {doing}",
                node=node.seen.name,
                hint="does it hang? look at its load",
            )


class Probes:
    """A probe on each node, there until they are closed."""

    def __init__(self, wanted: Sequence[NodeQuery], transport: Transport, *, progress: Progress) -> None:
        """`wanted`: the nodes, the first is the head node; `progress` is told what is going on."""
        self._nodes = [_Node(one, transport) for one in wanted]
        self._progress = progress

    def look(self, *, rendezvous: Sequence[int], data_ports: int, measure_s: float) -> list[NodeReport]:
        """Everything that the checks need, of all nodes, in their order; the arguments are those of `observe`."""
        token = secrets.token_hex(8)
        _examine(self._nodes, rendezvous=rendezvous, data_ports=data_ports, token=token, progress=self._progress)
        if measure_s:
            _measure(self._nodes, measure_s, token=token, progress=self._progress)
        return [node.seen for node in self._nodes]

    def ask(self, messages: Mapping[str, dict[str, Any]], *, limit_s: float, doing: str) -> dict[str, dict[str, Any]]:
        """Send some nodes a question each, at once; the answers of those that gave one.

        Args:
            messages: node -> question.
            limit_s: whoever takes longer counts as lost from now on.
            doing: what for, for people.
        """
        found: dict[str, dict[str, Any]] = {}

        def ask(node: _Node) -> None:
            found[node.seen.name] = node.ask(messages[node.seen.name])

        _all([node for node in self._nodes if node.seen.name in messages], ask, limit_s=limit_s, doing=doing)
        return dict(found)

    def close(self) -> None:
        """Drop all links; the probes end with them."""
        for node in self._nodes:
            node.close()


def observe(
    wanted: Sequence[NodeQuery], transport: Transport, *, rendezvous: Sequence[int], data_ports: int, progress: Progress
) -> list[NodeReport]:
    """Everything that the checks need, of all nodes, in their order; nothing is measured.

    Args:
        wanted: the nodes; the first is the head node.
        transport: the way to them.
        rendezvous: candidates for the rendezvous port on the head node.
        data_ports: how many random ports each node listens on.
        progress: told what is going on.
    """
    with contextlib.closing(Probes(wanted, transport, progress=progress)) as probes:
        return probes.look(rendezvous=rendezvous, data_ports=data_ports, measure_s=0.0)


def _examine(
    nodes: Sequence[_Node], *, rendezvous: Sequence[int], data_ports: int, token: str, progress: Progress
) -> None:
    addresses = [node.wanted.target.address for node in nodes]
    message = {"names": addresses, "peers": addresses}
    connect_s = max(node.wanted.target.connect_timeout_s for node in nodes)
    progress(f"asking {len(nodes)} nodes")
    _all(nodes, lambda node: node.begin(message), limit_s=connect_s + FACTS_LIMIT_S, doing="asking for facts")
    if sum(node.seen.error is None for node in nodes) < 2 or not (rendezvous or data_ports):
        return

    def listen(node: _Node) -> None:
        first = rendezvous if node is nodes[0] else ()
        asked = [*first, *([0] * data_ports)]
        said = node.ask({"op": "listen", "name": node.seen.name, "token": token, "ports": asked})["ports"]
        if first:
            node.seen.ports["rendezvous"] = next((port for port in said[: len(first)] if port > 0), said[0])
        node.seen.ports.update({f"data-{i}": port for i, port in enumerate(said[len(first) :])})

    progress("opening ports")
    _all(nodes, listen, limit_s=ANSWER_LIMIT_S, doing="opening ports")

    def call(node: _Node) -> None:
        at = nodes.index(node)
        targets = [
            [other.seen.name, other.seen.address, port, kind]
            for other in (*nodes[at + 1 :], *nodes[:at])
            if other.seen.error is None
            for kind, port in other.seen.ports.items()
            if port > 0
        ]
        said = node.ask({"op": "call", "token": token, "targets": targets, "timeout_s": CALL_TIMEOUT_S})
        asked = [(target[0], target[2], target[3]) for target in targets]
        if [(one["node"], one["port"], one["kind"]) for one in said["answers"]] != asked:
            raise NodeError("the node told of calls that it was not asked for", node=node.seen.name)
        node.seen.answers = said["answers"]

    # Every call may run into its limit twice, and each node makes some at a time.
    longest = 2 * CALL_TIMEOUT_S * (1 + len(nodes) * (data_ports + 1) // 24) + ANSWER_LIMIT_S
    progress("testing every pair of nodes")
    _all(nodes, call, limit_s=longest, doing="calling the other nodes")


def _measure(nodes: Sequence[_Node], seconds: float, *, token: str, progress: Progress) -> None:
    """Measure every way on which calls went well, in rounds of disjoint pairs; those that look bad once more."""
    of = {node.seen.name: node for node in nodes}

    def measured(node: _Node, called: NodeReport) -> dict[str, Any]:
        port = called.ports["data-0"]
        return node.ask({"op": "measure", "address": called.address, "port": port, "token": token, "seconds": seconds})

    def at_once(names: Iterable[str], ask: Callable[[_Node], None]) -> None:
        # A node that has answered until now and falls silent has gone down; the others are not to wait long for it.
        there = [of[name] for name in names if of[name].seen.error is None]
        silent_s = max((node.wanted.target.connect_timeout_s for node in there), default=0.0)
        _all(there, ask, limit_s=seconds + MEASURE_LIMIT_S + silent_s, doing="measuring the bandwidth")

    def one_round(ways: Sequence[tuple[str, str]]) -> None:
        there = {caller: of[called].seen for caller, called in ways if of[called].seen.error is None}

        def ask(node: _Node) -> None:
            called = there[node.seen.name]
            node.seen.measured.setdefault(called.name, []).append(measured(node, called))

        at_once(there, ask)

    def to_itself(node: _Node) -> None:
        node.seen.own.append(measured(node, node.seen))

    good = good_ways([node.seen for node in nodes])
    every = rounds.all_pairs([node.seen.name for node in nodes if node.seen.error is None])
    for number, pairs in enumerate(every, 1):
        progress(f"measuring bandwidth and loss, round {number} of {len(every)}")
        for ways in (pairs, [(called, caller) for caller, called in pairs]):
            one_round([way for way in ways if way in good])
    for repetition in range(1, links.TRIES):
        doubtful = links.doubtful([node.seen for node in nodes if node.seen.error is None])
        if not doubtful:
            return
        progress(f"measuring again, to be sure: {', '.join(f'{caller} to {called}' for caller, called in doubtful)}")
        # The first time in few rounds; then each way alone, since nodes may share a switch, or be of one machine.
        for ways in rounds.disjoint(doubtful) if repetition == 1 else [[way] for way in doubtful]:
            at_once(dict.fromkeys(name for way in ways for name in way), to_itself)
            one_round(ways)
