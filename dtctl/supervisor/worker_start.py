"""The start of one attempt's workers on a node: at once, or forked as soon as the fork server is ready.

The fork server is an optimization, never a requirement: if it fails, each worker is started on its own, and reports
itself what is wrong with the program. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import os

from dtctl.supervisor.fork_server import ForkServer, ForkServerUnavailable
from dtctl.supervisor.group import Group
from dtctl.supervisor.messages.attempt import WorkerSpec


class WorkerStart:
    """The workers of one attempt and how far they are."""

    def __init__(self, group: Group, script: str, cwd: str, env: dict[str, str], workers: list[WorkerSpec]) -> None:
        """Prepare to start.

        Args:
            group: where the workers are counted.
            script: path of the node script.
            cwd: folder to start it in.
            env: variables that all workers have.
            workers: rank and further variables of each.
        """
        self.group = group
        self.script = script
        self.cwd = cwd
        self.env = env
        self.workers = list(workers)
        self.missing = list(workers)
        self.waiting = False
        self.modules: list[str] = []
        """What a fork server imports."""

    def start_fresh(self) -> None:
        """Start each worker by a node script of its own.

        Raises:
            OSError: a process could not be made.
        """
        self.waiting = False
        while self.missing:
            worker = self.missing.pop(0)
            self.group.start(["bash", self.script], self.cwd, {**self.env, **worker.env}, worker.rank)

    def start_warm(self, fork_server: ForkServer, modules: list[str]) -> None:
        """Begin a warm start; `step` goes on with it.

        Raises:
            OSError: a process could not be made.
        """
        self.modules = modules
        self.warm_up(fork_server)
        self.waiting = True

    def warm_up(self, fork_server: ForkServer) -> None:
        """Let a fork server import what the workers need, or only take over their program if it does so already.

        Raises:
            OSError: a process could not be made.
        """
        fd = os.open(os.path.join(self.group.folder, "warm.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if fork_server.pid:
                fork_server.capture_program(self.script, self.cwd, self.env, fd)
            else:
                fork_server.start(self.script, self.cwd, self.env, self.modules, fd)
        finally:
            os.close(fd)

    def step(self, fork_server: ForkServer) -> None:
        """Fork the workers if the fork server is ready.

        Raises:
            OSError: a process could not be made.
            ForkServerUnavailable: the workers were started afresh instead.
        """
        try:
            if fork_server.poll():
                while self.missing:
                    worker = self.missing[0]
                    self.group.add(worker.rank, lambda fd, env=worker.env: fork_server.fork(env, fd))
                    self.missing.pop(0)
                self.waiting = False
        except ForkServerUnavailable:
            self.start_fresh()
            raise

    def start_again(self, rank: int, env: dict[str, str], fork_server: ForkServer | None) -> None:
        """Start a worker in the place of one that has ended, by a fork server that is ready if there is one.

        Raises:
            OSError: the process could not be made.
            ForkServerUnavailable: nothing was started.
        """
        worker = next(worker for worker in self.workers if worker.rank == rank)
        env = {**worker.env, **env}
        if fork_server is not None:
            self.group.add(rank, lambda fd: fork_server.fork(env, fd))
        else:
            self.group.start(["bash", self.script], self.cwd, {**self.env, **env}, rank)

    def cancel(self, fork_server: ForkServer | None) -> None:
        """The attempt is over; no more workers are started."""
        self.missing.clear()
        if self.waiting and fork_server is not None:
            fork_server.cancel_capture()
        self.waiting = False
