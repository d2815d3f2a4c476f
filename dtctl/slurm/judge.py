"""Whether a Slurm job hangs, decided on the job's first node, and the record of how far its workers were.

The rules are those of a launch over SSH (dtctl/launch/control/hang.py). What is decided is written into the run's
folder, which whoever follows the job, now or later, reads: progress.jsonl, and the workers' stacks below hangs/.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from dtctl import names
from dtctl.launch.control.hang import HangLimit, HangMonitor
from dtctl.launch.control.progress import ReportedPhase, Standing, standings
from dtctl.schema import InvalidMessage
from dtctl.slurm import placement
from dtctl.slurm.monitor_link import LINE_BYTES, Greeting, Kill, Welcome, proof
from dtctl.supervisor import frames, processes
from dtctl.supervisor.messages import (
    WHILE_RUNNING,
    Message,
    ProgressReport,
    Stacks,
    StacksEnd,
    WorkerStack,
    parse,
)

TICK_S: Final = 0.2
SUSPENDED_S: Final = 5.0
"""Who has not run for so long was suspended, and the workers with it: their silence begins anew."""
GREETING_S: Final = 10.0
GREETING_BYTES: Final = 1 << 12
"""What somebody has, and may say, before it is known that it belongs to the job."""
LATE_S: Final = 10.0
"""A report may be so old when it arrives."""
RECORD_S: Final = 5.0
"""Between two records of the workers' progress, once the attempt is old enough: before, a twentieth of its age."""


def judge_attempt(hang_s: str, hang_start_s: str, workers: str) -> None:
    """Judge one attempt until all nodes have left; the batch file's arguments of monitor.py.

    Args:
        hang_s: `job.hang_s`.
        hang_start_s: `job.hang_start_s`.
        workers: per node, see placement.py.
    """
    run_dir = Path(os.environ[names.RUN_DIR])
    hosts = (run_dir / "nodes").read_text(encoding="utf-8").split()
    record = AttemptRecord(run_dir / names.PROGRESS_FILE, int(os.environ[names.ATTEMPT]))
    hang_monitor = HangMonitor(
        node_of_rank=dict(enumerate(_node_of_worker(hosts, placement.slots(placement.from_text(workers))))),
        limit=_limit(hang_s),
        start_limit=_limit(hang_start_s),
        folder=run_dir / names.HANGS_DIR / f"attempt-{record.attempt}",
        on_progress=None,
    )
    endpoint = (os.environ[names.MASTER_ADDR], int(os.environ[names.MONITOR_PORT]))
    with closing(Judge(hang_monitor, record, endpoint, os.environ[processes.TOKEN])) as judge:
        judge.run()


_WORDS: Final[dict[str, HangLimit]] = {"auto": "auto", "off": "off"}


def _limit(text: str) -> HangLimit:
    return _WORDS.get(text) or float(text)


def _node_of_worker(hosts: Sequence[str], slots: Sequence[int]) -> list[str]:
    """The node of each rank."""
    return [host for host, count in zip(hosts, slots, strict=True) for _ in range(count)]


def _moment(reported: float | None) -> float:
    """When a node has looked, by its clock; where that is off, or says nothing, now."""
    now = time.time()
    return reported if reported is not None and now - LATE_S <= reported <= now else now


class AttemptRecord:
    """Appends to progress.jsonl, at most as often as a ledger needs."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Nothing is written yet.

        Args:
            path: the file, which all attempts of the job share.
            attempt: which one this is.
        """
        self.path = path
        self.attempt = attempt
        self._begun = self._written = time.monotonic()
        self._newest: Standing | None = None

    def append(self, op: str, *, at: float | None = None, **facts: Any) -> None:
        """Append one line; a disk that is full costs the line, and not the job. `at`: when it was so; None: now."""
        moment = round(time.time() if at is None else at, 3)
        line = json.dumps({"op": op, "attempt": self.attempt, "time": moment, **facts}) + "\n"
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            return

    def progress(self, worker: Standing, *, at: float, last: bool = False) -> None:
        """How far the worker that stands for all was at that time; `last`: nothing more is known of it."""
        now, newest = time.monotonic(), self._newest
        changed = newest is None or (worker.phase, worker.first, worker.saved) != (
            newest.phase,
            newest.first,
            newest.saved,
        )
        due = now - self._written >= min(RECORD_S, (now - self._begun) / 20)
        if worker != newest and (changed or due or last):
            self.append("progress", at=at, worker=asdict(worker))
            self._newest, self._written = worker, now


class _Peer:
    """The link to one node."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.node = ""
        """Empty until it has shown that it belongs to the job."""
        self.since = time.monotonic()
        self.received = b""

    def send(self, message: Message) -> bool:
        """Whether the message has left."""
        try:
            self.link.sendall(frames.encode(message) + b"\n")
        except OSError:
            return False
        return True


class Judge:
    """The links to the nodes' monitors, and what follows from what they report."""

    def __init__(self, hang_monitor: HangMonitor, record: AttemptRecord, endpoint: tuple[str, int], token: str) -> None:
        """Listen.

        Args:
            hang_monitor: decides.
            record: where it is written down.
            endpoint: address and port to listen at.
            token: what a monitor has to say first.

        Raises:
            OSError: the port is taken.
        """
        self.hang_monitor = hang_monitor
        self.record = record
        self.token = token
        self.peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
        self._listener = socket.create_server(endpoint, family=family, backlog=4096)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._parent = os.getppid()
        self._looked = self._resumed = time.monotonic()
        self._reported_at: dict[str, float] = {}
        """Node -> when its workers were as `hang_monitor` has them."""
        self._leavers: list[int] = []
        self._decided = False

    def close(self) -> None:
        """Drop all links."""
        for link in [*self.peers, self._listener]:
            link.close()
        self._selector.close()

    def run(self) -> None:
        """Judge until the monitor that started this process has ended, and all others have left."""
        while self._nodes() or os.getppid() == self._parent:
            now = time.monotonic()
            for peer in [*self.peers.values()]:
                if not peer.node and now - peer.since > GREETING_S:
                    self._drop(peer)
            if now - self._looked > SUSPENDED_S:
                self._resumed = now
            self._looked = now
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    self._receive(self.peers[key.fileobj])  # type: ignore[index]
            if not self._decided:
                self._judge(now)
        self._note_progress(last=True)

    def _nodes(self) -> list[_Peer]:
        """The links that have shown that they belong to the job."""
        return [peer for peer in self.peers.values() if peer.node]

    def _welcome(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:
            return
        link.settimeout(5.0)
        self.peers[link] = _Peer(link)
        self._selector.register(link, selectors.EVENT_READ)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.link)
        del self.peers[peer.link]
        peer.link.close()

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.link.recv(1 << 18)
        except OSError:
            data = b""
        *lines, peer.received = (peer.received + data).split(b"\n")
        try:
            for line in lines:
                self._on_message(peer, json.loads(line))
        except (ValueError, RecursionError):
            data = b""
        if not data or len(peer.received) > (LINE_BYTES if peer.node else GREETING_BYTES):
            self._drop(peer)

    def _on_message(self, peer: _Peer, document: Any) -> None:
        """Act on one message.

        Raises:
            ValueError: it is none, or from somebody who does not belong to the job.
        """
        if not isinstance(document, dict):
            raise InvalidMessage("not a message")
        if not peer.node:
            self._on_greeting(peer, Greeting.parse(document))
            return
        message = parse(document, WHILE_RUNNING)
        if isinstance(message, ProgressReport):
            if self.hang_monitor.silent_s is None:  # then it takes no further reports
                self._reported_at[peer.node] = _moment(message.time)
            silent_s = time.monotonic() - self._resumed
            reports = standings(peer.node, message.workers)
            self.hang_monitor.update(
                [replace(worker, stale_s=min(worker.stale_s, silent_s)) for worker in reports], node=peer.node
            )
            self._note_progress()
        elif isinstance(message, WorkerStack):
            if message.rank in self.hang_monitor.workers:
                self.hang_monitor.add_stack(message)
        elif isinstance(message, StacksEnd):
            self.hang_monitor.node_finished(peer.node)

    def _on_greeting(self, peer: _Peer, greeting: Greeting) -> None:
        if not hmac.compare_digest(greeting.proof.encode(), proof(self.token, "monitor", greeting.nonce).encode()):
            raise InvalidMessage("not of this job")
        peer.node = greeting.node
        peer.send(Welcome(proof=proof(self.token, "judge", greeting.nonce)))

    def _note_progress(self, *, last: bool = False) -> None:
        workers = self.hang_monitor.workers
        if workers and workers[min(workers)].phase != ReportedPhase.STARTING:
            worker = workers[min(workers)]
            self.record.progress(worker, at=self._reported_at[worker.node], last=last)
        leavers = self.hang_monitor.left_early()
        if [worker.rank for worker in leavers] != self._leavers:
            self._leavers = [worker.rank for worker in leavers]
            self.record.append("left-early", workers=[asdict(worker) for worker in leavers])

    def _judge(self, now: float) -> None:
        if self.hang_monitor.hangs(now):
            self.record.append("hang", silent_s=round(self.hang_monitor.silent_s or 0.0, 1))
            self.hang_monitor.begin_collecting({peer.node for peer in self._nodes() if peer.send(Stacks())})
        failure = self.hang_monitor.verdict(now)
        if failure is not None:
            self._note_progress(last=True)
            self.record.append("verdict", failure=asdict(failure), silent_s=self.hang_monitor.silent_s)
            for peer in self._nodes():
                peer.send(Kill())
            self._decided = True
