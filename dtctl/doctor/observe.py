"""Collection of the facts that the checks need from all nodes at once, and of calls between them. Decides nothing.

Each phase has a limit: a node that does not answer within it is reported, and the others are not kept waiting for it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtctl import node_facts
from dtctl.doctor import answers, rounds
from dtctl.doctor.checks import links
from dtctl.doctor.node_report import MEETING, REACHED, SPREAD, LoginShell, NodeReport, good_ways
from dtctl.errors import ConnectError, DtctlError, NodeError
from dtctl.launch.control.link import NodeLink, checked, error_of, open_program
from dtctl.shell import program
from dtctl.supervisor.messages.base import Message, Quit, Refusal
from dtctl.supervisor.messages.probe import (
    AskFacts,
    AskJobPython,
    AskTime,
    CallNodes,
    MeasureWay,
    OpenPorts,
    OpenSpread,
)
from dtctl.supervisor.probe import python
from dtctl.transport.base import Connection, Target, Transport

ANSWER_LIMIT_S = 15.0
HELLO_LIMIT_S = 30.0
"""Seconds for the login shell and the start of Python, which takes long on a network file system or a busy node."""
FACTS_LIMIT_S = 16.0
GPU_FACTS_LIMIT_S = 35.0
"""Seconds for the facts that a node reports: a driver without persistence mode may need 30 s to find eight GPUs."""
SHELL_LIMIT_S = 5.0
SLOW_LOGIN_S = 3.0
"""A login that takes longer is timed once more."""
MEASURE_LIMIT_S = 6.0
"""Seconds of a measurement beyond its own and the allowed silence of a node: each phase ends itself."""
CALL_TIMEOUT_S = 2.5
"""Longer than the first repetition of a lost SYN (1 s), shorter than the third."""
SHELL_BYTES = 1 << 16
EVERYBODY = 16
"""Up to so many nodes each calls all ports of each other; of more, each its part of them."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuery:
    """Questions to one node."""

    target: Target
    python: str | None
    workdir: str
    paths: tuple[str, ...] = ()
    code: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the spec sets for its workers."""
    slots: int = 1
    beside: tuple[tuple[str, str], ...] = ()
    """Modules that the job brings along beside its script: name, path."""


class _Node:
    """The link to one node; used by one thread at a time."""

    def __init__(self, wanted: NodeQuery, transport: Transport) -> None:
        self.wanted = wanted
        self.seen = NodeReport(name=wanted.target.name, target=wanted.target.address, slots=wanted.slots)
        self._transport = transport
        self._connection: Connection | None = None
        self._link: NodeLink | None = None
        self.has_gpus = False

    def greet(self) -> None:
        """Connect, start the probe, ask for the time."""
        self._connection = self._connection or self._transport.connect(self.wanted.target)
        self.seen.address = self._connection.peer_address()
        begun = time.monotonic()
        wanted, first = self.wanted, AskTime()
        self._link = open_program(
            self._connection, first, node=self.seen.name, python=wanted.python, workdir=wanted.workdir
        )
        self._answer(first)  # it includes the start of Python, so it is no measure of the clock
        self.seen.login_s.append(time.monotonic() - begun)
        before = time.time()
        reply = self.ask(AskTime())
        after = time.time()
        self.seen.offset_s = float(reply["time"]) - (before + after) / 2
        self.seen.offset_error_s = (after - before) / 2
        self.has_gpus = bool(reply["gpus"])

    def tell(self, names: list[str], peers: list[str]) -> None:
        """Ask for the facts."""
        wanted = self.wanted
        self.seen.facts = self.ask(
            AskFacts(
                workdir=wanted.workdir, paths=list(wanted.paths), code=wanted.code, env=dict(wanted.env), names=names,
                peers=peers,
            )
        )  # fmt: skip
        # Behind a jump host this machine does not have the address; the node has the one that it was reached at.
        self.seen.address = self.seen.address or str(self.seen.facts["reached_at"])
        self.seen.data_address = self.seen.meeting = self.seen.address

    def start_python(self) -> None:
        """Ask for the facts of the job's Python."""
        wanted = self.wanted
        python, beside = wanted.python or "python3", list(wanted.beside)
        self.seen.facts |= self.ask(AskJobPython(python=python, code=wanted.code, beside=beside, env=dict(wanted.env)))

    def try_shell(self) -> None:
        """Let the login shell run a plain command, and see what comes of it."""
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
        if word in text and self.seen.error is None:  # the shell is quick, and the start of Python took long
            begun = time.monotonic()
            again = self._connection.open(f"{program(self.wanted.python or 'python3')} -c pass")
            while again.read(SHELL_BYTES):
                pass
            self.seen.python_s = [self.seen.login_s[0], time.monotonic() - begun]

    @property
    def is_in(self) -> bool:
        """Return whether a login was accepted."""
        return self._connection is not None

    def ask(self, message: Message) -> dict[str, Any]:
        """Send one question, wait for its answer.

        Raises:
            DtctlError: the node cannot answer, or the link is gone.
        """
        if self._link is None:
            raise ConnectError("there is no link", node=self.seen.name)
        with contextlib.suppress(ConnectError):
            self._link.send(message)
        return self._answer(message)

    def _answer(self, message: Message) -> dict[str, Any]:
        if self._link is None:
            raise ConnectError("there is no link", node=self.seen.name)
        reply = self._link.receive_json()
        if reply is None:
            raise self._link.closed_error()
        if reply.get("op") == Refusal.op:
            raise error_of(checked(Refusal.parse, reply, subject="its refusal", node=self.seen.name), self.seen.name)
        return answers.answer(message, reply, node=self.seen.name)

    def close(self) -> None:
        """Drop the link; the probe ends with it."""
        if self._link is not None:
            with contextlib.suppress(DtctlError):
                self._link.send(Quit())
        if self._connection is not None:
            self._connection.close()


def _all(
    nodes: Sequence[_Node], act: Callable[[_Node], None], *, limit_s: float, doing: str, also_bad: bool = False
) -> None:
    """Run an action on all nodes that are well; a node that does not finish in time has an error from now on."""

    def work(node: _Node) -> None:
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
                hint="does it hang? look at its load",
            )


class Probes:
    """A probe on each node, there until they are closed."""

    def __init__(self, wanted: Sequence[NodeQuery], transport: Transport, *, progress: Progress) -> None:
        """Prepare the links to the nodes, the head node first; `progress` is called with the current activity."""
        self._nodes = [_Node(query, transport) for query in wanted]
        self._progress = progress

    def look(
        self,
        *,
        rendezvous: Sequence[int],
        data_ports: int,
        measure_s: float,
        names: Sequence[str] = (),
        locate: Locate = lambda _: None,
        spread: int = 0,
    ) -> list[NodeReport]:
        """Return the reports of all nodes for the checks, in the nodes' order; the arguments are those of `observe`.

        `spread` is the number of parts that the ranges of ports are divided into; one port of each part is called.
        """
        token = secrets.token_hex(8)
        _greet(self._nodes, progress=self._progress)
        _ask_facts(self._nodes, names)
        locate([node.seen for node in self._nodes if node.seen.error is None])
        if sum(node.seen.error is None for node in self._nodes) > 1 and (rendezvous or data_ports):
            _call(self._nodes, rendezvous=rendezvous, data_ports=data_ports, token=token, progress=self._progress)
            if spread:
                _knock(self._nodes, spread, token=token, fixed=len(rendezvous) == 1, progress=self._progress)
        if measure_s:
            _measure(self._nodes, measure_s, token=token, progress=self._progress)
        return [node.seen for node in self._nodes]

    def ask(self, messages: Mapping[str, Message], *, limit_s: float, doing: str) -> dict[str, dict[str, Any]]:
        """Send a request to some nodes each, at once; return the answers that came.

        Args:
            messages: node -> request.
            limit_s: a node that takes longer counts as lost from now on.
            doing: the purpose, for messages.
        """
        answers: dict[str, dict[str, Any]] = {}

        def ask(node: _Node) -> None:
            answers[node.seen.name] = node.ask(messages[node.seen.name])

        _all([node for node in self._nodes if node.seen.name in messages], ask, limit_s=limit_s, doing=doing)
        return dict(answers)

    def close(self) -> None:
        """Drop all links; the probes end with them."""
        for node in self._nodes:
            node.close()


Locate = Callable[[Sequence[NodeReport]], None]
"""Fills in where the workers of these nodes will be called, and where they meet."""


def observe(
    wanted: Sequence[NodeQuery],
    transport: Transport,
    *,
    rendezvous: Sequence[int],
    data_ports: int,
    names: Sequence[str],
    locate: Locate,
    progress: Progress,
) -> list[NodeReport]:
    """Return the reports of all nodes for the checks, in the nodes' order; no link is measured.

    Args:
        wanted: the nodes; the first is the head node.
        transport: the way to them.
        rendezvous: candidates for the rendezvous port on the head node.
        data_ports: how many random ports each node listens on.
        names: host names that each node looks up, besides its own.
        locate: called with the nodes before they call each other.
        progress: called with the current activity.
    """
    with contextlib.closing(Probes(wanted, transport, progress=progress)) as probes:
        return probes.look(rendezvous=rendezvous, data_ports=data_ports, measure_s=0.0, names=names, locate=locate)


def _greet(nodes: Sequence[_Node], *, progress: Progress) -> None:
    """Log in everywhere and start the probes; where none answers, see what the login shell does."""
    connect_s = max(node.wanted.target.connect_timeout_s for node in nodes)
    progress(f"asking {len(nodes)} node{'s' * (len(nodes) != 1)}")
    _all(nodes, _Node.greet, limit_s=connect_s + HELLO_LIMIT_S, doing="starting a program")
    quickest = min((node.seen.login_s[0] for node in nodes if node.seen.login_s), default=0.0)
    odd = [
        node
        for node in nodes
        if (node.seen.error is not None and node.is_in)
        or (node.seen.login_s and node.seen.login_s[0] > max(SLOW_LOGIN_S, 3 * quickest))
    ]
    if odd:
        progress(f"looking at the login of {', '.join(node.seen.name for node in odd)}")
        slow = (
            SLOW_LOGIN_S
            if all(node.seen.error is not None for node in odd)
            else max(quickest, *(login_s for node in odd for login_s in node.seen.login_s))
        )
        _all(odd, _Node.try_shell, limit_s=SHELL_LIMIT_S + slow, doing="running `echo`", also_bad=True)


def _ask_facts(nodes: Sequence[_Node], names: Sequence[str]) -> None:
    addresses = [node.wanted.target.address for node in nodes]
    looked_up = [*dict.fromkeys((*addresses, *names))]
    limit_s = GPU_FACTS_LIMIT_S if any(node.has_gpus for node in nodes) else FACTS_LIMIT_S
    _all(nodes, lambda node: node.tell(looked_up, addresses), limit_s=limit_s, doing="asking for facts")
    limit_s = python.LIMIT_S + ANSWER_LIMIT_S
    _all(nodes, _Node.start_python, limit_s=limit_s, doing="starting the job's Python")


def _call(
    nodes: Sequence[_Node], *, rendezvous: Sequence[int], data_ports: int, token: str, progress: Progress
) -> None:
    def listen(node: _Node) -> None:
        first = rendezvous if node is nodes[0] else ()
        asked = [*first, *([0] * data_ports)]
        reply = node.ask(OpenPorts(name=node.seen.name, token=token, ports=asked))["ports"]
        if first:
            node.seen.ports["rendezvous"] = next((port for port in reply[: len(first)] if port > 0), reply[0])
        node.seen.ports.update({f"data-{i}": port for i, port in enumerate(reply[len(first) :])})

    progress("opening ports")
    _all(nodes, listen, limit_s=ANSWER_LIMIT_S, doing="opening ports")

    def call(node: _Node) -> None:
        at = nodes.index(node)
        # rank 0 calls the store on its own node, and several workers of a node call each other.
        itself = [node] if node.wanted.slots > 1 or node is nodes[0] else []
        targets = [
            [other.seen.name, address, port, kind]
            for other in (*nodes[at + 1 :], *nodes[:at], *itself)
            if other.seen.error is None
            for address, port, kind in _ears(node.seen, other.seen)
        ]
        reply = node.ask(CallNodes(token=token, targets=targets, timeout_s=CALL_TIMEOUT_S))
        asked = [(target[0], target[2], target[3]) for target in targets]
        if [(answer["node"], answer["port"], answer["kind"]) for answer in reply["answers"]] != asked:
            raise NodeError("the node reported calls that it was not asked to make", node=node.seen.name)
        node.seen.answers = reply["answers"]

    # Every call may run into its limit twice, and each node makes some at a time.
    longest = 2 * CALL_TIMEOUT_S * (1 + len(nodes) * (data_ports + 1) // 24) + ANSWER_LIMIT_S
    progress("testing every pair of nodes")
    _all(nodes, call, limit_s=longest, doing="calling the other nodes")


def _knock(nodes: Sequence[_Node], count: int, *, token: str, fixed: bool, progress: Progress) -> None:
    """Call ports from all over the ranges that a launch may use, on the ways on which the first calls went well.

    The head node is called at ports at which workers may meet, and each other node as well: if the head node is lost,
    the next attempt's workers meet at another one.
    """
    there = [node for node in nodes if node.seen.error is None]
    ports: dict[str, dict[str, list[int]]] = {}

    def listen(node: _Node) -> None:
        reply = node.ask(OpenSpread(count=count, meeting=(node_facts.FIRST_PORT, node_facts.LAST_PORT)))
        # A port that the spec demands has been called at the head node, and no other will be used.
        ports[node.seen.name] = {SPREAD: reply["spread"], MEETING: [] if fixed else reply["meeting"]}

    progress("opening more ports")
    _all(there, listen, limit_s=ANSWER_LIMIT_S, doing="opening ports")
    good = good_ways([node.seen for node in nodes])

    def call(node: _Node) -> None:
        targets = [
            [called.seen.name, _at(node.seen, called.seen, kind, nodes[0].seen), port, kind]
            for place, called in enumerate(one for one in there if one is not node)
            if called.seen.error is None and (node.seen.name, called.seen.name) in good
            for kind, known in ports.get(called.seen.name, {}).items()
            for port in _part(known, nodes.index(node) + place, len(there))
        ]
        if not targets:
            return
        reply = node.ask(CallNodes(token=token, targets=targets, timeout_s=CALL_TIMEOUT_S))
        if [(one["node"], one["port"], one["kind"]) for one in reply["answers"]] != [
            (target[0], target[2], target[3]) for target in targets
        ]:
            raise NodeError("the node reported calls that it was not asked to make", node=node.seen.name)
        node.seen.answers += reply["answers"]

    progress("testing ports from all over their ranges")
    # Each node's share of calls, some at a time; each call may run into its limit twice, and twice again.
    most = 2 * len(_part(range(count), 0, len(there))) * len(there)
    limit_s = 4 * CALL_TIMEOUT_S * (1 + most // 24) + ANSWER_LIMIT_S
    _all(there, call, limit_s=limit_s, doing="calling the other nodes")


def _at(caller: NodeReport, called: NodeReport, kind: str, head: NodeReport) -> str:
    return caller.meeting if kind == MEETING and called is head and caller.meeting else called.data_address


def _part(ports: Sequence[int], place: int, nodes: int) -> Sequence[int]:
    """Return those that one of many callers tries, so that all of them together try every one."""
    if nodes <= EVERYBODY or not ports:
        return ports
    each = -(-len(ports) // (nodes - 1))
    return [ports[(place * each + offset) % len(ports)] for offset in range(each)]


def _ears(caller: NodeReport, called: NodeReport) -> Iterator[tuple[str, int, str]]:
    """Yield where a node is to be called: address, port, kind."""
    for kind, port in called.ports.items():
        address = caller.meeting if kind == "rendezvous" else called.data_address
        if port > 0 and address:
            yield address, port, kind
    if called.data_address != called.address and called.ports.get("data-0", 0) > 0:
        yield called.address, called.ports["data-0"], REACHED


def _measure(nodes: Sequence[_Node], seconds: float, *, token: str, progress: Progress) -> None:
    """Measure every way on which calls went well, in rounds of disjoint pairs; those that look bad once more."""
    of = {node.seen.name: node for node in nodes}

    def measured(node: _Node, called: NodeReport) -> dict[str, Any]:
        port = called.ports["data-0"]
        return node.ask(MeasureWay(address=called.data_address, port=port, token=token, seconds=seconds))

    def at_once(names: Iterable[str], ask: Callable[[_Node], None]) -> None:
        # A node that has answered until now and falls silent has gone down; the others are not to wait long for it.
        there = [of[name] for name in names if of[name].seen.error is None]
        silent_s = max((node.wanted.target.connect_timeout_s for node in there), default=0.0)
        _all(there, ask, limit_s=seconds + MEASURE_LIMIT_S + silent_s, doing="measuring the bandwidth")

    def one_round(ways: Sequence[tuple[str, str]]) -> None:
        there = {caller: of[called].seen for caller, called in ways if of[called].seen.error is None}

        def ask(node: _Node) -> None:
            called = there[node.seen.name]
            answer = measured(node, called)
            node.seen.measured.setdefault(called.name, []).append(answer)

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
