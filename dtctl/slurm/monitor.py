"""Runs on every node of a Slurm job, beside its workers: what they note of their progress, told to the job's judge.

Workers with dtctl.runtime note their progress in files of their node (dtctl/supervisor/progress.py). A monitor per node
reads them once a second and sends them to the first node, where judge.py decides whether the job hangs; it collects the
workers' stacks and ends the workers when the judge asks for that. Nobody has to follow the job.

Started by the batch file with the workers' own Python, which has dtctl where the workers have dtctl.runtime.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dtctl import names
from dtctl.slurm.monitor_link import FROM_JUDGE, Greeting, Kill, Welcome, proof
from dtctl.supervisor import frames, processes, progress
from dtctl.supervisor.messages import Message, ProgressReport, Stacks, StacksEnd, parse
from dtctl.supervisor.stacks import StackDump

REPORT_S: Final = 1.0
"""Between two reports of a node."""
WAIT_S: Final = 0.2
FOLDER: Final = "dtctl-progress-"
"""Name of the folders with the workers' files, up to a random end; each has a lock while its monitor lives."""


def main() -> None:
    """Watch this node's workers until they have ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for the workers, which may save a snapshot; this ends after them
    task = os.getppid()
    os.umask(0o077)
    folder = Path(os.environ[names.PROGRESS])
    lock = os.open(folder / "lock.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "lock.new").rename(folder / "lock")  # nobody finds it before it is held
    _remove_abandoned(folder.parent)
    judge_pid = 0
    if os.environ["SLURM_PROCID"] == "0":
        judge_pid = os.fork()
        if not judge_pid:
            from dtctl.slurm.judge import judge_attempt

            judge_attempt(*sys.argv[1:4])
            return
    try:
        NodeMonitor(folder, task=task, helpers=frozenset({judge_pid} - {0})).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove folders of this user's monitors that Slurm ended together with their workers."""
    for folder in parent.glob(f"{FOLDER}*"):
        try:
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its monitor lives
        finally:
            os.close(lock)


class NodeMonitor:
    """One node's part: reports to the judge, stacks when it asks for them, the end of the workers."""

    def __init__(self, folder: Path, *, task: int, helpers: frozenset[int]) -> None:
        """Nothing is sent yet.

        Args:
            folder: where the workers note their progress.
            task: process of the task that started this one.
            helpers: processes that carry the run's token and are none of its workers.
        """
        self.folder = folder
        self.task = task
        self.helpers = helpers
        self.token = os.environ[processes.TOKEN]
        self.judge = (os.environ[names.MASTER_ADDR], int(os.environ[names.MONITOR_PORT]))
        self.link: socket.socket | None = None
        self.stack_dump: StackDump | None = None
        self._received = b""
        self._nonce = ""
        """Of a link whose other end has not shown yet that it is the job's judge."""

    def run(self) -> None:
        """Report until the workers have ended, or were ended."""
        next_report = 0.0
        while True:
            over = self._over()
            if over or time.monotonic() >= next_report:
                self._send(ProgressReport(workers=progress.read(str(self.folder)), time=time.time()))
                next_report = time.monotonic() + REPORT_S
            if over:
                return
            for message in self._messages():
                if isinstance(message, Stacks):
                    self.stack_dump = StackDump(str(self.folder), self.token)
                elif isinstance(message, Kill):
                    processes.kill(self.token, self.helpers)
            if self.stack_dump is not None and self.stack_dump.ready():
                for answer in self.stack_dump.answers():
                    self._send(answer)
                self._send(StacksEnd())
                self.stack_dump = None

    def _over(self) -> bool:
        """Whether no worker of this node lives; the first one's task says so most cheaply that one does."""
        return os.getppid() != self.task and not processes.find(self.token, self.helpers)

    def _send(self, message: Message) -> None:
        """Send, if there is a judge; the next report calls again where there is none."""
        try:
            if self.link is None:
                self.link = socket.create_connection(self.judge, timeout=5.0)
                self._nonce = secrets.token_hex(16)
                own_proof = proof(self.token, "monitor", self._nonce)
                greeting = Greeting(node=os.environ[names.NODE], nonce=self._nonce, proof=own_proof)
                self.link.sendall(frames.encode(greeting) + b"\n")
            self.link.sendall(frames.encode(message) + b"\n")
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link, self._received = None, b""

    def _messages(self) -> Iterator[Message]:
        """What the judge has sent; waits for a moment."""
        if self.link is None:
            time.sleep(WAIT_S)
            return
        self.link.settimeout(WAIT_S)
        try:
            data = self.link.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            data = b""
        finally:
            if self.link is not None:
                self.link.settimeout(5.0)
        if not data:
            self._hang_up()
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            try:
                message = parse(json.loads(line), FROM_JUDGE)
            except ValueError:
                message = None
            if not self._nonce and message is not None:
                yield message
            elif isinstance(message, Welcome) and hmac.compare_digest(
                message.proof.encode(), proof(self.token, "judge", self._nonce).encode()
            ):
                self._nonce = ""
            else:
                self._hang_up()  # another program has the port
                return
