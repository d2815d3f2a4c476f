"""This machine as a node: commands are child processes, in the home folder as after a login."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from pathlib import Path
from typing import Final

from dtctl.errors import ConnectError
from dtctl.transport.base import ByteStream, Target

PROCESSES_HINT: Final = (
    "you may not start more processes and threads here: raise `ulimit -u`, or the limit of the container (`pids.max`)"
)


class LocalStream:
    """Stream of a child process."""

    def __init__(self, process: subprocess.Popen[bytes], *, node: str, noise: bytes = b"") -> None:
        """Wrap a process; `noise` on its standard error is dropped."""
        self._process = process
        self._node = node
        self._noise = noise
        self._reading = threading.Lock()
        self._closed = False
        if process.stderr is not None:
            os.set_blocking(process.stderr.fileno(), False)

    def read(self, size: int) -> bytes:
        """See `dtctl.transport.base.ByteStream`."""
        stdout = self._process.stdout
        if stdout is None:
            return b""
        with self._reading:
            try:
                data = os.read(stdout.fileno(), size)
            except (OSError, ValueError):
                return b""
            if not data or self._closed:
                stdout.close()
            return data

    @property
    def has_ended_output(self) -> bool:
        """Return whether the end of the output was read."""
        return self._process.stdout is None or self._process.stdout.closed

    def read_stderr(self) -> bytes:
        """See `dtctl.transport.base.ByteStream`."""
        try:
            said = os.read(self._process.stderr.fileno(), 1 << 16) if self._process.stderr else b""
            return said.replace(self._noise, b"") if self._noise else said
        except (OSError, ValueError):
            return b""

    def write(self, data: bytes) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        try:
            if self._process.stdin is None:
                raise ValueError("closed")
            view = memoryview(data)
            while view:  # a signal may interrupt a write halfway
                view = view[self._process.stdin.write(view) :]
        except (OSError, ValueError) as exc:
            raise ConnectError("the command no longer reads", node=self._node) from exc

    def close_stdin(self) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
        except OSError:
            pass  # the process has ended, so buffered data cannot be delivered

    def exit_status(self, timeout_s: float) -> int | None:
        """See `dtctl.transport.base.ByteStream`."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return 128 - status if status < 0 else status

    def close(self) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        self._closed = True
        self.close_stdin()
        if self._process.stderr is not None:
            self._process.stderr.close()
        # This must not happen while a thread reads: the number of the descriptor may soon be that of another file.
        if self._process.stdout is not None and self._reading.acquire(blocking=False):
            self._process.stdout.close()
            self._reading.release()
        # The process ends once it detects the closed pipes; the caller does not wait for that.
        if self._process.poll() is None:
            threading.Thread(target=self._process.wait, daemon=True).start()


def start_process(argv: list[str], *, node: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a program of this machine, with pipes for all that it reads and prints.

    Raises:
        ConnectError: it cannot be started.
    """
    pipe = subprocess.PIPE
    try:
        # The process gets its own session, as under sshd: Ctrl-C in the terminal is meant for the launcher, which
        # passes it on.
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, cwd=cwd, start_new_session=True)
    except OSError as exc:
        hint = PROCESSES_HINT if exc.errno == errno.EAGAIN else None
        raise ConnectError(f"{argv[0]} cannot be started: {exc.strerror}", node=node, hint=hint) from exc


class LocalConnection:
    """Connection to this machine."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.streams: list[ByteStream] = []
        """Streams that were opened, which `close` closes."""

    @property
    def target(self) -> Target:
        """See `dtctl.transport.base.Connection`."""
        return self._target

    def peer_address(self) -> str:
        """See `dtctl.transport.base.Connection`."""
        return "127.0.0.1"

    def open(self, command: str) -> ByteStream:
        """See `dtctl.transport.base.Connection`."""
        return self.start(["/bin/sh", "-c", command])

    def start(self, argv: list[str], *, noise: bytes = b"") -> LocalStream:
        """Start a program of this machine.

        Raises:
            ConnectError: it cannot be started.
        """
        home_folder = Path.home()
        if not home_folder.is_dir():
            raise ConnectError(f"the home folder {home_folder} does not exist", node=self._target.name, hint="set HOME")
        process = start_process(argv, node=self._target.name, cwd=home_folder)
        stream = LocalStream(process, node=self._target.name, noise=noise)
        self.streams.append(stream)
        return stream

    def alive(self) -> bool:
        """See `dtctl.transport.base.Connection`."""
        return True

    def close(self) -> None:
        """See `dtctl.transport.base.Connection`."""
        for stream in self.streams:
            stream.close()


class LocalTransport:
    """Transport to this machine, with any target."""

    def connect(self, target: Target) -> LocalConnection:
        """See `dtctl.transport.base.Transport`."""
        return LocalConnection(target)
