"""The supervisor's side of the fork server: a process per node that has imported what the workers need, and forks them.

See fork_server_main.py, which that process runs. The node script is run as ever; its last line hands the program to
`VIA`, a few lines of shell in the run's folder. These either start the warm process in the program's place, or only
print what would have been started. Later attempts do the latter, since their variables differ. Stdlib only, Python 3.8.
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
    from dtctl.supervisor import fork_server_main  # noqa: F401 - read below; sent because it stands here (bootstrap.py)

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
"""Fork servers in a row that have ended before they were ready: another one would, too."""
OWN_VARIABLES = ("DTCTL_VIA", "DTCTL_WARM_FILE", "DTCTL_WARM_FD", "DTCTL_WARM_PARENT", "DTCTL_WARM_MODULES")
FORK_LIMIT_S = 10.0


def _warm() -> bytes:
    """Return the text of fork_server_main.py, wherever this module comes from."""
    return bytes(__loader__.get_data(os.path.join(os.path.dirname(__file__), WARM_FILE)))  # type: ignore[name-defined]


class ForkServerUnavailable(Exception):
    """The fork server cannot be used, for the reason in the text."""

    def __init__(self, why: str, is_final: bool = False) -> None:
        """Take the reason; with `is_final`, another one would not do better."""
        super().__init__(why)
        self.is_final = is_final


class ForkServer:
    """One fork server, from its start to its end, and the program that its workers are to run."""

    def __init__(self, run_dir: str) -> None:
        """Nothing is started yet; `run_dir` is the run's folder."""
        self.via, self.file = os.path.join(run_dir, VIA_FILE), os.path.join(run_dir, WARM_FILE)
        for path, data in ((self.via, VIA.encode()), (self.file, _warm())):
            with open(path, "wb") as file:
                file.write(data)
        self.pid = 0
        self.standby_pid = 0
        """A copy of it that takes its place when it ends, so that nothing has to be imported again; 0 for none."""
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
        """True if the program is that of another attempt than the one this was started for."""

    def start(self, script: str, cwd: str, env: dict[str, str], modules: list[str], output_fd: int) -> None:
        """Start the fork server by the node script; what it prints goes to `output_fd`."""
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        variables = {
            "DTCTL_VIA": self.via,
            "DTCTL_WARM_FILE": self.file,
            "DTCTL_WARM_FD": str(child_end.fileno()),
            "DTCTL_WARM_PARENT": str(os.getpid()),
            "DTCTL_WARM_MODULES": ",".join(modules),
        }
        os.set_inheritable(child_end.fileno(), True)
        self.pid = processes.spawn(["bash", script], cwd, {**env, **variables}, {1: output_fd, 2: output_fd})
        child_end.close()
        parent_end.setblocking(False)
        self._link = parent_end

    def capture_program(self, script: str, cwd: str, env: dict[str, str], output_fd: int) -> None:
        """Run the node script of another attempt to capture its program and variables."""
        self.argv, self.env, self._captured, self._is_captured = [], {}, b"", True
        read_end, write_end = os.pipe()
        env = {**env, "DTCTL_VIA": self.via}
        self._capture_pid = processes.spawn(["bash", script], cwd, env, {1: output_fd, 2: output_fd, 3: write_end})
        os.close(write_end)
        os.set_blocking(read_end, False)
        self._capture_fd = read_end

    def descriptors(self) -> list[int]:
        """Return what to wait on."""
        link = [self._link.fileno()] if self._link is not None else []
        return link + ([self._capture_fd] if self._capture_fd is not None else [])

    def poll(self) -> bool:
        """Process what has arrived; whether workers can be forked now.

        Raises:
            ForkServerUnavailable: they never will be.
        """
        if self._link is None:
            raise ForkServerUnavailable("the fork server has exited")
        try:
            self._receive(self._link)
        except ForkServerUnavailable:
            if not self._promote_standby():
                raise
        if self._capture_fd is not None:
            self._read_capture(self._capture_fd)
        return self.ready and bool(self.argv)

    def _receive(self, link: socket.socket) -> None:
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
            self.argv, self.env = message["argv"], _cleaned(message["env"])

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
        self.env = _cleaned({name: value for name, _, value in pairs})

    def fork(self, env: dict[str, str], output_fd: int) -> int:
        """Return a new worker: a child of this process with these variables on top, printing to `output_fd`; its id.

        Raises:
            ForkServerUnavailable: the fork server does not do it.
        """
        request = {"argv": _program(self.argv), "env": {**self.env, **env}}
        try:
            return self._ask(request, output_fd)
        except ForkServerUnavailable:
            if not self._promote_standby():
                raise
        return self._ask(request, output_fd)

    def keep_standby(self) -> None:
        """See that a server that is ready has a standby.

        Raises:
            ForkServerUnavailable: the fork server does not make one.
        """
        if not self.ready or self._standby_is_there():
            return
        self._close_standby()
        own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with its_end:
            try:
                self.standby_pid = self._ask({"standby": True}, its_end.fileno())
            except ForkServerUnavailable:
                own_end.close()
                raise
        own_end.setblocking(False)
        self._standby_link = own_end

    def _standby_is_there(self) -> bool:
        if self._standby_link is None:
            return False
        try:
            return bool(self._standby_link.recv(1))  # it sends nothing until it gets a request
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _promote_standby(self) -> bool:
        """Let the standby take the place of the server; False if there is none."""
        if not self._standby_is_there():
            return False
        if self._link is not None:
            self._link.close()
        processes.send([self.pid], signal.SIGKILL)  # it may be there and not answer
        self.pid, self._link, self._received = self.standby_pid, self._standby_link, b""
        self.standby_pid, self._standby_link = 0, None
        return True

    def _close_standby(self) -> None:
        if self._standby_link is not None:
            self._standby_link.close()
            self._standby_link = None
        if self.standby_pid:
            processes.send([self.standby_pid], signal.SIGKILL)
            self.standby_pid = 0

    def _ask(self, request: Mapping[str, object], fd: int) -> int:
        """Return the id of the process that the server forks for this.

        Raises:
            ForkServerUnavailable: it does not.
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
            processes.send([self._capture_pid], signal.SIGKILL)

    def close(self) -> None:
        """End the fork server; the workers that it has forked keep running."""
        self.cancel_capture()
        self._close_standby()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self.pid:
            processes.send([self.pid], signal.SIGKILL)
            self.pid = 0


class ForkServers:
    """The fork servers of a run, one after another, until another one would be of no use."""

    def __init__(self, run_dir: str) -> None:
        """Have none yet; `run_dir` is the run's folder."""
        self.run_dir = run_dir
        self.server: ForkServer | None = None
        self.cold_reason = ""
        """Reason why none is used any more."""
        self._ends = 0
        """Number of ends in a row of servers that have never been ready."""

    def pids(self) -> tuple[int, ...]:
        """Their processes."""
        return (self.server.pid, self.server.standby_pid) if self.server is not None else ()

    def require(self) -> ForkServer:
        """Return the one that there is, or a new one, which is not started."""
        if self.server is None:
            self.server = ForkServer(self.run_dir)
        return self.server

    def check(self) -> None:
        """Notice the end of the one that there is."""
        try:
            if self.server is not None:
                self.server.poll()
        except ForkServerUnavailable as exc:
            self.lose(exc)

    def lose(self, exc: ForkServerUnavailable) -> None:
        """Give up the one that there is, and note whether another one would be of use."""
        server, self.server = self.server, None
        if server is None:
            return
        server.close()
        self._ends = 0 if server.ready else self._ends + 1
        if exc.is_final or self._ends >= TRIES:
            self.cold_reason = str(exc)

    def close(self) -> None:
        """End the one that there is."""
        if self.server is not None:
            self.server.close()


def _cleaned(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in OWN_VARIABLES}


def _program(argv: list[str]) -> list[str]:
    """Return what follows the interpreter and its `-u`."""
    return argv[2:] if argv[1:2] == ["-u"] else argv[1:]
