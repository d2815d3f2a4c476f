"""Collection of facts from all nodes at the same time, and calls between them, for the checks. Decides nothing.

Each phase has a time limit: a node that does not answer in time is reported, and the others continue.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl import node_facts
from dtctl.doctor import answers, rounds
from dtctl.doctor.checks import links
from dtctl.doctor.node_report import MEETING, REACHED, SPREAD, LoginShell, NodeReport, find_good_ways
from dtctl.errors import ConnectError, DtctlError, NodeError
from dtctl.launch.control.link import NodeLink, build_refusal_error, open_program, validate_node_value
from dtctl.shell import quote_program
from dtctl.supervisor.messages.base import Message, Quit, Refusal
from dtctl.supervisor.messages.probe import (
    CallNodes,
    MeasureLink,
    OpenPorts,
    OpenSampledPorts,
    QueryFacts,
    QueryJobPython,
    QueryTime,
)
from dtctl.supervisor.probe import python
from dtctl.transport.base import Connection, Target, Transport

ANSWER_LIMIT_S = 15.0
HELLO_LIMIT_S = 30.0
"""Longest time for login shell and start of Python in seconds; they are slow on network file systems and busy nodes."""
FACTS_LIMIT_S = 16.0
GPU_FACTS_LIMIT_S = 35.0
"""Longest time for a node's facts in seconds: a driver without persistence mode may need 30 s for eight GPUs."""
SHELL_LIMIT_S = 5.0
SLOW_LOGIN_S = 3.0
"""Duration of a login in seconds above which it is timed again."""
MEASURE_LIMIT_S = 6.0
"""Seconds for a measurement beyond its own duration and a node's allowed silence; each phase has limits of its own."""
CALL_TIMEOUT_S = 2.5
"""Longest time of a call in seconds: more than the first retransmission of a lost SYN (1 s), less than the third."""
SHELL_BYTES = 1 << 16
EVERYBODY = 16
"""Number of nodes up to which each calls all ports of each other; with more, each calls a part of the ports."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuery:
    """Requests for facts about one node."""

    target: Target
    python: str | None
    workdir: str
    paths: tuple[str, ...] = ()
    code: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the spec sets for the node's workers."""
    slots: int = 1
    beside: tuple[tuple[str, str], ...] = ()
    """Modules next to the job's script: name, path."""


class _ProbedNode:
    """Connection to one node; only one thread uses it at a time."""

    def __init__(self, wanted: NodeQuery, transport: Transport) -> None:
        self.wanted = wanted
        self.seen = NodeReport(name=wanted.target.name, target=wanted.target.address, slots=wanted.slots)
        self._transport = transport
        self._connection: Connection | None = None
        self._link: NodeLink | None = None
        self.has_gpus = False

    def connect_probe(self) -> None:
        """Connect, start the probe, and request the time."""
        self._connection = self._connection or self._transport.connect(self.wanted.target)
        self.seen.address = self._connection.peer_address()
        begun = time.monotonic()
        wanted, first = self.wanted, QueryTime()
        self._link = open_program(
            self._connection, first, node=self.seen.name, python=wanted.python, workdir=wanted.workdir
        )
        self._receive_answer(first)  # the time includes the start of Python, so it does not measure the clock
        self.seen.login_s.append(time.monotonic() - begun)
        before = time.time()
        reply = self.send_request(QueryTime())
        after = time.time()
        self.seen.offset_s = float(reply["time"]) - (before + after) / 2
        self.seen.offset_error_s = (after - before) / 2
        self.has_gpus = bool(reply["gpus"])

    def request_facts(self, names: list[str], peers: list[str]) -> None:
        """Request the facts about the node."""
        wanted = self.wanted
        self.seen.facts = self.send_request(
            QueryFacts(
                workdir=wanted.workdir, paths=list(wanted.paths), code=wanted.code, env=dict(wanted.env), names=names,
                peers=peers,
            )
        )  # fmt: skip
        # Behind a jump host, only the node has the address at which it was reached.
        self.seen.address = self.seen.address or str(self.seen.facts["reached_at"])
        self.seen.data_address = self.seen.meeting = self.seen.address

    def request_python_facts(self) -> None:
        """Request the facts about the job's Python."""
        wanted = self.wanted
        python, beside = wanted.python or "python3", list(wanted.beside)
        self.seen.facts |= self.send_request(
            QueryJobPython(python=python, code=wanted.code, beside=beside, env=dict(wanted.env))
        )

    def check_login_shell(self) -> None:
        """Run a plain command in the login shell, and store the result."""
        if self._connection is None:
            return
        self.seen.shell = LoginShell(answered=False)
        word = f"dtctl-{secrets.token_hex(6)}"
        begun = time.monotonic()
        try:
            stream = self._connection.open(f"echo {word}")
            said = b""
            while len(said) < SHELL_BYTES and (data := stream.read(SHELL_BYTES)):
                said += data
        except ConnectError:
            self.seen.shell = LoginShell(answered=False, refused=True)
            return
        took_s = time.monotonic() - begun
        text = said.decode(errors="replace")
        status = stream.exit_status(1.0)
        complaint = stream.read_stderr().decode(errors="replace")
        self.seen.shell = LoginShell(
            answered=True,
            has_run=word in text,
            other=" ".join(text.replace(word, "").split())[:200],
            complaint=" ".join(complaint.split())[:200],
            status=status,
        )
        self.seen.login_s.append(took_s)
        if word in text and self.seen.error is None:  # the shell is fast, so the start of Python is slow
            begun = time.monotonic()
            again = self._connection.open(f"{quote_program(self.wanted.python or 'python3')} -c pass")
            while again.read(SHELL_BYTES):
                pass
            self.seen.python_s = [self.seen.login_s[0], time.monotonic() - begun]

    @property
    def is_logged_in(self) -> bool:
        """Return whether a login succeeded."""
        return self._connection is not None

    def send_request(self, message: Message) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            DtctlError: the node cannot answer, or the connection is lost.
        """
        if self._link is None:
            raise ConnectError("there is no link", node=self.seen.name)
        with contextlib.suppress(ConnectError):
            self._link.send(message)
        return self._receive_answer(message)

    def _receive_answer(self, message: Message) -> dict[str, Any]:
        if self._link is None:
            raise ConnectError("there is no link", node=self.seen.name)
        reply = self._link.receive_json()
        if reply is None:
            raise self._link.closed_error()
        if reply.get("op") == Refusal.op:
            raise build_refusal_error(
                validate_node_value(Refusal.parse, reply, subject="its refusal", node=self.seen.name), self.seen.name
            )
        return answers.check_probe_answer(message, reply, node=self.seen.name)

    def close(self) -> None:
        """Close the connection, which ends the probe."""
        if self._link is not None:
            with contextlib.suppress(DtctlError):
                self._link.send(Quit())
        if self._connection is not None:
            self._connection.close()


def _run_on_nodes(
    nodes: Sequence[_ProbedNode],
    act: Callable[[_ProbedNode], None],
    *,
    limit_s: float,
    doing: str,
    also_bad: bool = False,
) -> None:
    """Run an action on all nodes without an error; a node that does not finish in time gets an error."""

    def work(node: _ProbedNode) -> None:
        try:
            act(node)
        except DtctlError as exc:
            node.seen.error = node.seen.error or exc

    asked = [node for node in nodes if also_bad or node.seen.error is None]
    threads = [threading.Thread(target=work, args=(node,), daemon=True) for node in asked]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for node, thread in zip(asked, threads, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive() and node.seen.error is None:
            node.seen.error = ConnectError(
                f"no answer within {limit_s:g} s while {doing}",
                node=node.seen.name,
                hint="the node may hang; check its load",
            )


class NodeProbes:
    """Probes on all nodes, which run until they are closed."""

    def __init__(self, wanted: Sequence[NodeQuery], transport: Transport, *, progress: Progress) -> None:
        """Prepare the connections, the head node first; `progress` is called with the current activity."""
        self._nodes = [_ProbedNode(query, transport) for query in wanted]
        self._progress = progress

    def collect_reports(
        self,
        *,
        rendezvous: Sequence[int],
        data_ports: int,
        measure_s: float,
        names: Sequence[str] = (),
        locate: Locate = lambda _: None,
        spread: int = 0,
    ) -> list[NodeReport]:
        """Return the reports of all nodes in their order, for the checks; for the arguments see `observe_nodes`.

        `spread` is the number of parts into which each range of ports is divided; one port of each part is called.
        """
        token = secrets.token_hex(8)
        _start_probes(self._nodes, progress=self._progress)
        _ask_facts(self._nodes, names)
        locate([node.seen for node in self._nodes if node.seen.error is None])
        if sum(node.seen.error is None for node in self._nodes) > 1 and (rendezvous or data_ports):
            _call_between_nodes(
                self._nodes, rendezvous=rendezvous, data_ports=data_ports, token=token, progress=self._progress
            )
            if spread:
                _call_spread_ports(
                    self._nodes, spread, token=token, fixed=len(rendezvous) == 1, progress=self._progress
                )
        if measure_s:
            _measure_node_links(self._nodes, measure_s, token=token, progress=self._progress)
        return [node.seen for node in self._nodes]

    def send_requests(
        self, messages: Mapping[str, Message], *, limit_s: float, doing: str
    ) -> dict[str, dict[str, Any]]:
        """Send a request to each of some nodes at the same time; return the answers that arrived.

        Args:
            messages: node -> its request.
            limit_s: time limit in seconds; a node that takes longer counts as lost afterwards.
            doing: purpose of the request, for messages.
        """
        answers: dict[str, dict[str, Any]] = {}

        def ask(node: _ProbedNode) -> None:
            answers[node.seen.name] = node.send_request(messages[node.seen.name])

        _run_on_nodes([node for node in self._nodes if node.seen.name in messages], ask, limit_s=limit_s, doing=doing)
        return dict(answers)

    def close(self) -> None:
        """Close all connections, which ends the probes."""
        for node in self._nodes:
            node.close()


Locate = Callable[[Sequence[NodeReport]], None]
"""Function that sets the addresses of the nodes' workers and of the rendezvous in the reports."""


def observe_nodes(
    wanted: Sequence[NodeQuery],
    transport: Transport,
    *,
    rendezvous: Sequence[int],
    data_ports: int,
    names: Sequence[str],
    locate: Locate,
    progress: Progress,
) -> list[NodeReport]:
    """Return the reports of all nodes in their order, for the checks; no link is measured.

    Args:
        wanted: requests for each node, the head node first.
        transport: transport to the nodes.
        rendezvous: candidates for the rendezvous port on the head node.
        data_ports: number of random ports on which each node listens.
        names: host names that each node looks up, in addition to its own.
        locate: called with the reports before the nodes call each other.
        progress: called with the current activity.
    """
    with contextlib.closing(NodeProbes(wanted, transport, progress=progress)) as probes:
        return probes.collect_reports(
            rendezvous=rendezvous, data_ports=data_ports, measure_s=0.0, names=names, locate=locate
        )


def _start_probes(nodes: Sequence[_ProbedNode], *, progress: Progress) -> None:
    """Log in to all nodes and start the probes; on nodes that do not answer, test the login shell."""
    connect_s = max(node.wanted.target.connect_timeout_s for node in nodes)
    progress(f"asking {len(nodes)} node{'s' * (len(nodes) != 1)}")
    _run_on_nodes(nodes, _ProbedNode.connect_probe, limit_s=connect_s + HELLO_LIMIT_S, doing="starting a program")
    quickest = min((node.seen.login_s[0] for node in nodes if node.seen.login_s), default=0.0)
    limit_s = max(SLOW_LOGIN_S, 3 * quickest)
    odd = []
    for node in nodes:
        has_failed = node.seen.error is not None and node.is_logged_in
        is_slow = bool(node.seen.login_s) and node.seen.login_s[0] > limit_s
        if has_failed or is_slow:
            odd.append(node)
    if not odd:
        return
    progress(f"examining the login of {', '.join(node.seen.name for node in odd)}")
    slowest_s = SLOW_LOGIN_S
    if any(node.seen.error is None for node in odd):
        slowest_s = max(quickest, *itertools.chain.from_iterable(node.seen.login_s for node in odd))
    _run_on_nodes(
        odd, _ProbedNode.check_login_shell, limit_s=SHELL_LIMIT_S + slowest_s, doing="running `echo`", also_bad=True
    )


def _ask_facts(nodes: Sequence[_ProbedNode], names: Sequence[str]) -> None:
    addresses = [node.wanted.target.address for node in nodes]
    looked_up = [*dict.fromkeys((*addresses, *names))]
    limit_s = GPU_FACTS_LIMIT_S if any(node.has_gpus for node in nodes) else FACTS_LIMIT_S
    _run_on_nodes(
        nodes, lambda node: node.request_facts(looked_up, addresses), limit_s=limit_s, doing="asking for facts"
    )
    limit_s = python.LIMIT_S + ANSWER_LIMIT_S
    _run_on_nodes(nodes, _ProbedNode.request_python_facts, limit_s=limit_s, doing="starting the job's Python")


def _call_between_nodes(
    nodes: Sequence[_ProbedNode], *, rendezvous: Sequence[int], data_ports: int, token: str, progress: Progress
) -> None:
    def listen(node: _ProbedNode) -> None:
        first = rendezvous if node is nodes[0] else ()
        asked = [*first, *([0] * data_ports)]
        reply = node.send_request(OpenPorts(name=node.seen.name, token=token, ports=asked))["ports"]
        if first:
            node.seen.ports["rendezvous"] = next((port for port in reply[: len(first)] if port > 0), reply[0])
        node.seen.ports.update({f"data-{i}": port for i, port in enumerate(reply[len(first) :])})

    progress("opening ports")
    _run_on_nodes(nodes, listen, limit_s=ANSWER_LIMIT_S, doing="opening ports")

    def call(node: _ProbedNode) -> None:
        at = nodes.index(node)
        # Rank 0 connects to the store on its own node, and several workers of a node connect to each other.
        itself = [node] if node.wanted.slots > 1 or node is nodes[0] else []
        targets = [
            [other.seen.name, address, port, kind]
            for other in (*nodes[at + 1 :], *nodes[:at], *itself)
            if other.seen.error is None
            for address, port, kind in _list_call_targets(node.seen, other.seen)
        ]
        reply = node.send_request(CallNodes(token=token, targets=targets, timeout_s=CALL_TIMEOUT_S))
        asked = [(target[0], target[2], target[3]) for target in targets]
        if [(answer["node"], answer["port"], answer["kind"]) for answer in reply["answers"]] != asked:
            raise NodeError("the node reported calls that it was not asked to make", node=node.seen.name)
        node.seen.answers = reply["answers"]

    # Each call may need its time limit twice, and each node makes several at the same time.
    longest = 2 * CALL_TIMEOUT_S * (1 + len(nodes) * (data_ports + 1) // 24) + ANSWER_LIMIT_S
    progress("testing every pair of nodes")
    _run_on_nodes(nodes, call, limit_s=longest, doing="calling the other nodes")


def _call_spread_ports(
    nodes: Sequence[_ProbedNode], count: int, *, token: str, fixed: bool, progress: Progress
) -> None:
    """Call ports from the whole ranges that a launch may use, between nodes whose first calls succeeded.

    Each node is called at possible rendezvous ports, not only the head node: if the head node is lost, another node
    hosts the rendezvous of the next attempt.
    """
    there = [node for node in nodes if node.seen.error is None]
    ports: dict[str, dict[str, list[int]]] = {}

    def listen(node: _ProbedNode) -> None:
        reply = node.send_request(OpenSampledPorts(count=count, meeting=(node_facts.FIRST_PORT, node_facts.LAST_PORT)))
        # A port that the spec requires was already called on the head node, and no other port will be used.
        ports[node.seen.name] = {SPREAD: reply["spread"], MEETING: [] if fixed else reply["meeting"]}

    progress("opening more ports")
    _run_on_nodes(there, listen, limit_s=ANSWER_LIMIT_S, doing="opening ports")
    good = find_good_ways([node.seen for node in nodes])

    def call(node: _ProbedNode) -> None:
        targets: list[list[Any]] = []
        others = [other for other in there if other is not node]
        for place, called in enumerate(others, nodes.index(node)):
            name = called.seen.name
            if called.seen.error is not None or (node.seen.name, name) not in good:
                continue
            for kind, known in ports.get(name, {}).items():
                address = _choose_call_address(node.seen, called.seen, kind, nodes[0].seen)
                called_ports = _choose_caller_ports(known, place, len(there))
                targets += [[name, address, port, kind] for port in called_ports]
        if not targets:
            return
        reply = node.send_request(CallNodes(token=token, targets=targets, timeout_s=CALL_TIMEOUT_S))
        if [(one["node"], one["port"], one["kind"]) for one in reply["answers"]] != [
            (target[0], target[2], target[3]) for target in targets
        ]:
            raise NodeError("the node reported calls that it was not asked to make", node=node.seen.name)
        node.seen.answers += reply["answers"]

    progress("testing ports across their whole ranges")
    # The calls of one node, several at the same time; each may need its time limit twice, and then twice again.
    most = 2 * len(_choose_caller_ports(range(count), 0, len(there))) * len(there)
    limit_s = 4 * CALL_TIMEOUT_S * (1 + most // 24) + ANSWER_LIMIT_S
    _run_on_nodes(there, call, limit_s=limit_s, doing="calling the other nodes")


def _choose_call_address(caller: NodeReport, called: NodeReport, kind: str, head: NodeReport) -> str:
    return caller.meeting if kind == MEETING and called is head and caller.meeting else called.data_address


def _choose_caller_ports(ports: Sequence[int], place: int, nodes: int) -> Sequence[int]:
    """Return the ports that one of many callers tries, so that all callers together try each port."""
    if nodes <= EVERYBODY or not ports:
        return ports
    each = -(-len(ports) // (nodes - 1))
    return [ports[(place * each + offset) % len(ports)] for offset in range(each)]


def _list_call_targets(caller: NodeReport, called: NodeReport) -> Iterator[tuple[str, int, str]]:
    """Yield address, port and kind of the calls to a node."""
    for kind, port in called.ports.items():
        address = caller.meeting if kind == "rendezvous" else called.data_address
        if port > 0 and address:
            yield address, port, kind
    if called.data_address != called.address and called.ports.get("data-0", 0) > 0:
        yield called.address, called.ports["data-0"], REACHED


def _measure_node_links(nodes: Sequence[_ProbedNode], seconds: float, *, token: str, progress: Progress) -> None:
    """Measure every pair with successful calls in rounds of disjoint pairs, and repeat those that look bad."""
    of = {node.seen.name: node for node in nodes}

    def measured(node: _ProbedNode, called: NodeReport) -> dict[str, Any]:
        port = called.ports["data-0"]
        return node.send_request(MeasureLink(address=called.data_address, port=port, token=token, seconds=seconds))

    def at_once(names: Iterable[str], ask: Callable[[_ProbedNode], None]) -> None:
        # A node that answered before and stops answering is down; the others must not wait long for it.
        there = [of[name] for name in names if of[name].seen.error is None]
        silent_s = max((node.wanted.target.connect_timeout_s for node in there), default=0.0)
        _run_on_nodes(there, ask, limit_s=seconds + MEASURE_LIMIT_S + silent_s, doing="measuring the bandwidth")

    def one_round(ways: Sequence[tuple[str, str]]) -> None:
        there = {caller: of[called].seen for caller, called in ways if of[called].seen.error is None}

        def ask(node: _ProbedNode) -> None:
            called = there[node.seen.name]
            answer = measured(node, called)
            node.seen.measured.setdefault(called.name, []).append(answer)

        at_once(there, ask)

    def to_itself(node: _ProbedNode) -> None:
        node.seen.own.append(measured(node, node.seen))

    good = find_good_ways([node.seen for node in nodes])
    every = rounds.arrange_all_pairs([node.seen.name for node in nodes if node.seen.error is None])
    for number, pairs in enumerate(every, 1):
        progress(f"measuring bandwidth and loss, round {number} of {len(every)}")
        for ways in (pairs, [(called, caller) for caller, called in pairs]):
            one_round([way for way in ways if way in good])
    for repetition in range(1, links.TRIES):
        doubtful = links.choose_doubtful_links([node.seen for node in nodes if node.seen.error is None])
        if not doubtful:
            return
        progress(f"measuring again to confirm: {', '.join(f'{caller} to {called}' for caller, called in doubtful)}")
        # The first repetition takes few rounds; then each pair is measured alone, since nodes may share a switch or a
        # machine.
        for ways in rounds.build_disjoint_rounds(doubtful) if repetition == 1 else [[way] for way in doubtful]:
            at_once(dict.fromkeys(name for way in ways for name in way), to_itself)
            one_round(ways)
