"""The start of one attempt's workers on a node, at once or by a fork as soon as the fork server is ready.

The fork server is an optimization, never a requirement: if it fails, each worker is started on its own, and reports
errors of the program itself. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import os

from dtctl.supervisor.fork_server import ForkServers, ForkServerUnavailable
from dtctl.supervisor.messages.attempt import WorkerSpec
from dtctl.supervisor.node_processes import NodeProcesses


class WorkerStart:
    """The workers of one attempt, and the state of their start."""

    def __init__(
        self, servers: ForkServers, modules: list[str], script: str, cwd: str, env: dict[str, str],
        workers: list[WorkerSpec],
    ) -> None:  # fmt: skip
        """Prepare to start.

        Args:
            servers: fork servers of the run.
            modules: modules that a fork server imports; empty: each worker starts its own Python.
            script: path of the node script.
            cwd: folder in which the script is started.
            env: variables of all workers.
            workers: rank and further variables of each worker.
        """
        self.servers = servers
        self.modules = modules
        self.script = script
        self.cwd = cwd
        self.env = env
        self.workers = list(workers)
        self.waiting = False
        """True if a fork server will start the workers as soon as it is ready."""
        self._missing = list(workers)

    def start(self, group: NodeProcesses) -> None:
        """Start the workers, or let a fork server prepare for that; `step` continues it.

        Raises:
            OSError: a process could not be made.
        """
        self.servers.check()  # The fork server may have ended since the previous attempt.
        if self.servers.cold_reason:
            self.modules = []
        if self.modules:
            self.warm_up()
            self.waiting = True
        else:
            self._start_fresh(group)

    def _start_fresh(self, group: NodeProcesses) -> None:
        """Start each worker by its own node script.

        Raises:
            OSError: a process could not be made.
        """
        self.waiting = False
        while self._missing:
            worker = self._missing.pop(0)
            group.start(["bash", self.script], self.cwd, {**self.env, **worker.env}, worker.rank)

    def warm_up(self) -> None:
        """Let a fork server import the workers' modules, or only capture the program if it has imported them already.

        Raises:
            OSError: a process could not be made.
        """
        server = self.servers.get_or_create()
        output = os.path.join(os.path.dirname(self.script), "warm.txt")
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if server.pid:
                server.capture_program(self.script, self.cwd, self.env, fd)
            else:
                server.start(self.script, self.cwd, self.env, self.modules, fd)
        finally:
            os.close(fd)

    def step(self, group: NodeProcesses) -> str:
        """Fork the workers if the fork server is ready; return the reason if they were started without it.

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
            self.servers.give_up_server(exc)
            self._start_fresh(group)
            return str(exc)
        return ""

    def prepare_fork_server(self) -> None:
        """Keep a fork server for the next lost worker, whose replacement would otherwise import all modules itself.

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
            servers.give_up_server(exc)
        if servers.server is None and not servers.cold_reason:
            self.warm_up()

    def is_importing(self) -> bool:
        """Return whether a fork server is still importing; a new Python would take as long."""
        return self.servers.server is not None and not self.servers.server.ready

    def restart_worker(self, rank: int, env: dict[str, str], group: NodeProcesses) -> bool:
        """Start a worker that replaces an ended one, by the fork server if there is one; return False if it fails.

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
            self.servers.give_up_server(exc)
            return False
        return True

    def descriptors(self) -> list[int]:
        """Return the descriptors of a fork server that is not ready or that workers wait for."""
        server = self.servers.server
        return server.descriptors() if server is not None and (self.waiting or not server.ready) else []

    def cancel(self) -> None:
        """Start no more workers, since the attempt is being ended."""
        self._missing.clear()
        if self.waiting and self.servers.server is not None:
            self.servers.server.cancel_capture()
        self.waiting = False
