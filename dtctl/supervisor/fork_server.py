"""The supervisor's side of the fork server: one process per node imports the workers' modules and forks the workers.

See fork_server_main.py, which that process runs. The node script is run as usual; its last line passes the program to
`VIA`, a few lines of shell in the run's folder. These either start the fork server in the program's place, or only
print the program and its variables. Later attempts do the latter, since their variables differ. Stdlib, Python 3.8.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Mapping

from dtctl.supervisor import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtctl.supervisor import fork_server_main  # noqa: F401 - read below; bootstrap.py sends what is imported

VIA_FILE = "via.sh"
WARM_FILE = "fork_server_main.py"
VIA = """\
# Called by the node script with the program that it would have started. See dtctl's supervisor/fork_server.py.
if [ -n "$DTCTL_WARM_FILE" ]; then
  python=$1
  [ "$2" = -u ] && shift
  shift
  exec "$python" -u "$DTCTL_WARM_FILE" "$@"
fi
exec 1>&3
printf '%s\\0' "$#" "$@"
exec env -0
"""
TRIES = 3
"""Number of fork servers in a row that end before they are ready, after which no other one is started."""
OWN_VARIABLES = ("DTCTL_VIA", "DTCTL_WARM_FILE", "DTCTL_WARM_FD", "DTCTL_WARM_PARENT", "DTCTL_WARM_MODULES")
FORK_LIMIT_S = 10.0


def _read_server_source() -> bytes:
    """Return the text of fork_server_main.py by the loader of this module, since it may not be on a disk."""
    return bytes(__loader__.get_data(os.path.join(os.path.dirname(__file__), WARM_FILE)))  # type: ignore[name-defined]


class ForkServerUnavailable(Exception):
    """The fork server cannot be used, for the reason in the text."""

    def __init__(self, why: str, is_final: bool = False) -> None:
        """Store the reason; `is_final`: another fork server would fail, too."""
        super().__init__(why)
        self.is_final = is_final


class ForkServer:
    """A fork server, from its start to its end, and the program of its workers."""

    def __init__(self, run_dir: str) -> None:
        """Write the files of the server into the run's folder, without starting a process."""
        self.via, self.file = os.path.join(run_dir, VIA_FILE), os.path.join(run_dir, WARM_FILE)
        for path, data in ((self.via, VIA.encode()), (self.file, _read_server_source())):
            with open(path, "wb") as file:
                file.write(data)
        self.pid = 0
        self.standby_pid = 0
        """Process id of a copy that takes the server's place at its end, so that nothing is imported again; 0: none."""
        self.ready = False
        self.argv: list[str] = []
        self.env: dict[str, str] = {}
        self._link: socket.socket | None = None
        self._standby_link: socket.socket | None = None
        self._received = b""
        self._captured = b""
        self._capture_fd: int | None = None
        self._capture_pid = 0
        self._is_captured = False
        """True if the program is that of a later attempt than the one for which the server was started."""

    def start(self, script: str, cwd: str, env: dict[str, str], modules: list[str], output_fd: int) -> None:
        """Start the fork server by the node script; its output goes to `output_fd`."""
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        variables = {
            "DTCTL_VIA": self.via,
            "DTCTL_WARM_FILE": self.file,
            "DTCTL_WARM_FD": str(child_end.fileno()),
            "DTCTL_WARM_PARENT": str(os.getpid()),
            "DTCTL_WARM_MODULES": ",".join(modules),
        }
        os.set_inheritable(child_end.fileno(), True)
        self.pid = processes.spawn_program(["bash", script], cwd, {**env, **variables}, {1: output_fd, 2: output_fd})
        child_end.close()
        parent_end.setblocking(False)
        self._link = parent_end

    def capture_program(self, script: str, cwd: str, env: dict[str, str], output_fd: int) -> None:
        """Run the node script of another attempt to capture its program and variables."""
        self.argv, self.env, self._captured, self._is_captured = [], {}, b"", True
        read_end, write_end = os.pipe()
        env = {**env, "DTCTL_VIA": self.via}
        self._capture_pid = processes.spawn_program(
            ["bash", script], cwd, env, {1: output_fd, 2: output_fd, 3: write_end}
        )
        os.close(write_end)
        os.set_blocking(read_end, False)
        self._capture_fd = read_end

    def descriptors(self) -> list[int]:
        """Return the descriptors on which the supervisor waits for the server."""
        link = [self._link.fileno()] if self._link is not None else []
        return link + ([self._capture_fd] if self._capture_fd is not None else [])

    def poll(self) -> bool:
        """Process received data; return whether workers can be forked now.

        Raises:
            ForkServerUnavailable: this server cannot fork workers.
        """
        if self._link is None:
            raise ForkServerUnavailable("the fork server has exited")
        try:
            self._receive_ready_message(self._link)
        except ForkServerUnavailable:
            if not self._promote_standby():
                raise
        if self._capture_fd is not None:
            self._read_capture(self._capture_fd)
        return self.ready and bool(self.argv)

    def _receive_ready_message(self, link: socket.socket) -> None:
        try:
            data = link.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise ForkServerUnavailable("the fork server has exited")
        self._received += data
        if not self._received.endswith(b"\n"):
            return
        message = json.loads(self._received.decode())
        self._received = b""
        if not message["ready"]:
            raise ForkServerUnavailable(str(message["why"]), True)
        self.ready = True
        if not self._is_captured:
            self.argv, self.env = message["argv"], _remove_own_variables(message["env"])

    def _read_capture(self, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                break
            self._captured += data
        os.close(fd)
        self._capture_fd = None
        fields = self._captured.decode("utf-8", "surrogateescape").split("\0")[:-1]
        if not fields:
            raise ForkServerUnavailable("the node script ended before it came to the program", True)
        count = int(fields[0])
        self.argv = fields[1 : 1 + count]
        pairs = (field.partition("=") for field in fields[1 + count :])
        self.env = _remove_own_variables({name: value for name, _, value in pairs})

    def fork(self, env: dict[str, str], output_fd: int) -> int:
        """Fork a worker, a child of this process with further variables and output to `output_fd`; return its id.

        Raises:
            ForkServerUnavailable: the fork server does not fork the worker.
        """
        request = {"argv": _strip_interpreter(self.argv), "env": {**self.env, **env}}
        try:
            return self._request_fork(request, output_fd)
        except ForkServerUnavailable:
            if not self._promote_standby():
                raise
        return self._request_fork(request, output_fd)

    def keep_standby(self) -> None:
        """Make a standby for a server that is ready, unless it has one.

        Raises:
            ForkServerUnavailable: the fork server does not make one.
        """
        if not self.ready or self._standby_is_there():
            return
        self._close_standby()
        own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with its_end:
            try:
                self.standby_pid = self._request_fork({"standby": True}, its_end.fileno())
            except ForkServerUnavailable:
                own_end.close()
                raise
        own_end.setblocking(False)
        self._standby_link = own_end

    def _standby_is_there(self) -> bool:
        if self._standby_link is None:
            return False
        try:
            return bool(self._standby_link.recv(1))  # The standby sends nothing before a request.
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _promote_standby(self) -> bool:
        """Let the standby take the place of the server; return False if there is none."""
        if not self._standby_is_there():
            return False
        if self._link is not None:
            self._link.close()
        processes.send_process_signal([self.pid], signal.SIGKILL)  # The old server may run without answering.
        self.pid, self._link, self._received = self.standby_pid, self._standby_link, b""
        self.standby_pid, self._standby_link = 0, None
        return True

    def _close_standby(self) -> None:
        if self._standby_link is not None:
            self._standby_link.close()
            self._standby_link = None
        if self.standby_pid:
            processes.send_process_signal([self.standby_pid], signal.SIGKILL)
            self.standby_pid = 0

    def _request_fork(self, request: Mapping[str, object], fd: int) -> int:
        """Return the id of the process that the server forks for a request.

        Raises:
            ForkServerUnavailable: the server does not fork a process.
        """
        link = self._link
        if link is None:
            raise ForkServerUnavailable("the fork server has exited")
        body = json.dumps(request).encode()
        try:
            link.settimeout(FORK_LIMIT_S)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))
            header = b"%8d" % len(body)
            link.sendmsg([header], [rights])
            link.sendall(body)
            reply = b""
            while not reply.endswith(b"\n"):
                data = link.recv(4096)
                if not data:
                    raise ForkServerUnavailable("the fork server has exited")
                reply += data
            link.setblocking(False)
        except OSError as exc:
            why = f"the fork server does not answer: {exc}"
            raise ForkServerUnavailable(why, isinstance(exc, socket.timeout)) from exc
        return int(json.loads(reply.decode())["pid"])

    def cancel_capture(self) -> None:
        """Stop capturing a program, and end the node script if it still runs."""
        if self._capture_fd is not None:
            os.close(self._capture_fd)
            self._capture_fd = None
            processes.send_process_signal([self._capture_pid], signal.SIGKILL)

    def close(self) -> None:
        """End the fork server; the workers that it has forked keep running."""
        self.cancel_capture()
        self._close_standby()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self.pid:
            processes.send_process_signal([self.pid], signal.SIGKILL)
            self.pid = 0


class ForkServers:
    """The fork servers of a run, of which one runs at a time; none is started after repeated or final failures."""

    def __init__(self, run_dir: str) -> None:
        """Begin without a server; `run_dir` is the run's folder."""
        self.run_dir = run_dir
        self.server: ForkServer | None = None
        self.cold_reason = ""
        """Reason why no fork server is used any more; empty while one may be used."""
        self._ends = 0
        """Number of servers in a row that ended without ever having been ready."""

    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the fork server and of its standby; empty without a server."""
        return (self.server.pid, self.server.standby_pid) if self.server is not None else ()

    def get_or_create(self) -> ForkServer:
        """Return the current server, or a new one that is not started."""
        if self.server is None:
            self.server = ForkServer(self.run_dir)
        return self.server

    def check(self) -> None:
        """Check whether the current server has ended."""
        try:
            if self.server is not None:
                self.server.poll()
        except ForkServerUnavailable as exc:
            self.give_up_server(exc)

    def give_up_server(self, exc: ForkServerUnavailable) -> None:
        """Give up the current server, and record whether another one may be started."""
        server, self.server = self.server, None
        if server is None:
            return
        server.close()
        self._ends = 0 if server.ready else self._ends + 1
        if exc.is_final or self._ends >= TRIES:
            self.cold_reason = str(exc)

    def close(self) -> None:
        """End the current server."""
        if self.server is not None:
            self.server.close()


def _remove_own_variables(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in OWN_VARIABLES}


def _strip_interpreter(argv: list[str]) -> list[str]:
    """Return the arguments after the interpreter and its `-u`."""
    return argv[2:] if argv[1:2] == ["-u"] else argv[1:]
