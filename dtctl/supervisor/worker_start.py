"""The start of one attempt's workers on a node: at once, or forked as soon as the fork server is ready.

The fork server is an optimization, never a requirement: if it fails, each worker is started on its own, and reports
itself what is wrong with the program. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import os

from dtctl.supervisor.fork_server import ForkServers, ForkServerUnavailable
from dtctl.supervisor.group import Group
from dtctl.supervisor.messages.attempt import WorkerSpec


class WorkerStart:
    """The workers of one attempt and how far they are."""

    def __init__(
        self, servers: ForkServers, modules: list[str], script: str, cwd: str, env: dict[str, str],
        workers: list[WorkerSpec],
    ) -> None:  # fmt: skip
        """Prepare to start.

        Args:
            servers: fork servers of the run.
            modules: what a fork server imports; nothing: each worker starts afresh.
            script: path of the node script.
            cwd: folder to start it in.
            env: variables that all workers have.
            workers: rank and further variables of each.
        """
        self.servers = servers
        self.modules = modules
        self.script = script
        self.cwd = cwd
        self.env = env
        self.workers = list(workers)
        self.waiting = False
        """True if a fork server is to start them as soon as it is ready."""
        self._missing = list(workers)

    def start(self, group: Group) -> None:
        """Start the workers, or let a fork server prepare for that; `step` continues it.

        Raises:
            OSError: a process could not be made.
        """
        self.servers.check()  # it may have ended since the attempt before
        if self.servers.cold_reason:
            self.modules = []
        if self.modules:
            self.warm_up()
            self.waiting = True
        else:
            self._start_fresh(group)

    def _start_fresh(self, group: Group) -> None:
        """Start each worker by a node script of its own.

        Raises:
            OSError: a process could not be made.
        """
        self.waiting = False
        while self._missing:
            worker = self._missing.pop(0)
            group.start(["bash", self.script], self.cwd, {**self.env, **worker.env}, worker.rank)

    def warm_up(self) -> None:
        """Let a fork server import what the workers need, or only take over their program if it does so already.

        Raises:
            OSError: a process could not be made.
        """
        server = self.servers.require()
        output = os.path.join(os.path.dirname(self.script), "warm.txt")
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if server.pid:
                server.capture_program(self.script, self.cwd, self.env, fd)
            else:
                server.start(self.script, self.cwd, self.env, self.modules, fd)
        finally:
            os.close(fd)

    def step(self, group: Group) -> str:
        """Fork the workers if the fork server is ready; why they were started afresh instead, if they were.

        Raises:
            OSError: a process could not be made.
        """
        server = self.servers.server
        if server is None or not self.waiting:
            return ""
        try:
            if server.poll():
                while self._missing:
                    worker = self._missing[0]
                    group.add(worker.rank, lambda fd, env=worker.env: server.fork(env, fd))
                    self._missing.pop(0)
                self.waiting = False
        except ForkServerUnavailable as exc:
            self.servers.lose(exc)
            self._start_fresh(group)
            return str(exc)
        return ""

    def keep_warm(self) -> None:
        """Have a fork server for the next lost worker, which would have to import everything itself without one.

        Raises:
            OSError: a process could not be made.
        """
        servers = self.servers
        if self.waiting or not self.modules or servers.cold_reason:
            return
        servers.check()
        try:
            if servers.server is not None:
                servers.server.keep_standby()
        except ForkServerUnavailable as exc:
            servers.lose(exc)
        if servers.server is None and not servers.cold_reason:
            self.warm_up()

    def is_importing(self) -> bool:
        """Return whether a fork server is not ready yet; a fresh worker would take as long for that."""
        return self.servers.server is not None and not self.servers.server.ready

    def start_again(self, rank: int, env: dict[str, str], group: Group) -> bool:
        """Start a worker in the place of one that has ended, by the fork server if there is one; False: it failed.

        Raises:
            OSError: the process could not be made.
        """
        worker = next(worker for worker in self.workers if worker.rank == rank)
        env, server = {**worker.env, **env}, self.servers.server
        if server is None:
            group.start(["bash", self.script], self.cwd, {**self.env, **env}, rank)
            return True
        try:
            group.add(rank, lambda fd: server.fork(env, fd))
        except ForkServerUnavailable as exc:
            self.servers.lose(exc)
            return False
        return True

    def descriptors(self) -> list[int]:
        """Return where a fork server that workers wait for reports."""
        server = self.servers.server
        return server.descriptors() if server is not None and (self.waiting or not server.ready) else []

    def cancel(self) -> None:
        """The attempt is over; no more workers are started."""
        self._missing.clear()
        if self.waiting and self.servers.server is not None:
            self.servers.server.cancel_capture()
        self.waiting = False
