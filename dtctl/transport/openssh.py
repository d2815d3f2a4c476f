"""SSH by OpenSSH's own client, one process for each command: it can log in wherever the user's own `ssh` can.

A process is started before the command is known: the node's shell reads it as the first line of its input. So logins to
all nodes are under way while the rest of dtctl is still being imported, and a failed login is distinguished from a
failed command.

Options that must hold stand at the beginning of a configuration file that then includes the user's. The first value of
an option counts, and ssh hands the file on to the ssh that it starts for a jump host (ProxyJump).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import re
import secrets
import select
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dtctl.errors import ConnectError, LaunchError
from dtctl.shell import quote_word
from dtctl.transport.base import Target
from dtctl.transport.local import LocalStream, start_process
from dtctl.transport.openssh_errors import SshMessages, explain_failed_login, explain_missing_session, is_busy
from dtctl.transport.sshconfig import NO_CONFIG

FORCED: Final = (
    # A launch must not do this, even if the user's configuration allows it.
    "BatchMode yes",
    "StrictHostKeyChecking yes",
    "UpdateHostKeys no",
    "ClearAllForwardings yes",
    "ForwardAgent no",
    "ForwardX11 no",
    "PermitLocalCommand no",
    "RemoteCommand none",
    "RequestTTY no",
    "EscapeChar none",
    # A connection that the user has opened is used, so that a second factor is requested only once, there. dtctl opens
    # no such connection for others to use: it would outlive the launch.
    "ControlMaster no",
    "ConnectionAttempts 1",
    "ServerAliveInterval 15",
    # Messages of the supervisor decide if a node is lost; ssh does not.
    "ServerAliveCountMax 8",
    # The ssh of a jump host writes its messages to the same standard error as the command.
    "LogLevel ERROR",
)
WAVE: Final = 64
"""Most concurrent logins."""
TRIES: Final = 6
FIRST_WAIT_S: Final = 0.1
SHELL_LIMIT_S: Final = 120.0
"""Seconds for a login shell to start after the node was reached."""
COMMAND_LIMIT_S: Final = 300
"""Seconds that a node's shell waits for its command."""
COMMAND_MARGIN_S: Final = 60
"""Seconds before the end of that time from which on a login counts as too old."""
DEBUG_S: Final = 10.0
END_S: Final = 2.0
"""Seconds for ssh to end after its output has."""
LOST_STATUS: Final = 255
"""Exit status of ssh itself; a command may have it, too."""
MAX_SOCKET_LENGTH: Final = 80
"""Bytes of a socket's path; the system takes 107 bytes, and ssh makes it under a longer name first."""
FOLDER_PREFIX: Final = "dtctl-ssh-"
ROOM_HINT: Final = "set TMPDIR to a folder on a local disk that has room"
NEW_PREFIX: Final = "dtctl-new-ssh-"
"""Prefix of a folder that is not locked yet."""
EARLY_BYTES: Final = 1 << 16
"""Bytes of what a shell's start-up files may print before the command."""
LOG_LIMIT: Final = 1 << 16
"""Characters of a log from which on lines for debugging are dropped."""
_PASS_LINE: Final = r'''IFS= read -r line && printf "%s\n" "$line"'''
_AUTHENTICATED: Final = re.compile(r"^Authenticated to \S+ \((?:\[(?P<address>[^\]]+)\]:\d+|via proxy)\)", re.MULTILINE)


class SshLogin:
    """An ssh process; its node waits for the line with the command."""

    def __init__(self, target: Target, argv: Sequence[str], log: Path) -> None:
        """Start ssh.

        Args:
            target: the node.
            argv: of ssh.
            log: path of a FIFO for its own messages, separate from the standard error of the command.

        Raises:
            ConnectError: it cannot be started.
        """
        self.target = target
        self.early = b""
        """Output that has been read while the login was under way."""
        self.mark = b"dtctl-%s\n" % secrets.token_hex(8).encode()
        self.words = SshMessages()
        os.mkfifo(log, 0o600)
        # The pipe is opened for reading first; otherwise ssh would wait when it opens it for writing.
        self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._log_path = log
        self._log_lock = threading.Lock()
        self._begun = time.monotonic()
        command = f"exec /bin/sh -c {quote_word(build_waiting_script(self.mark.decode().strip(), COMMAND_LIMIT_S))}"
        try:
            self.process = start_process([*argv, "-E", _log_name(log), "--", target.address, command], node=target.name)
        except BaseException:
            self.close_log()
            raise

    def wait(self) -> bool:
        """Wait until the node has accepted the login; return whether it has. `words` has the messages of ssh.

        Raises:
            ConnectError: there is no result in time.
        """
        assert self.process.stdout is not None  # noqa: S101  # start_process made it a pipe
        stdout, log, deadline = self.process.stdout.fileno(), self._log, time.monotonic() + self._limit_s()
        waiting = select.poll()
        waiting.register(stdout, select.POLLIN)
        waiting.register(log, select.POLLIN)
        while not self.is_accepted:
            left_s = deadline - time.monotonic()
            ready = waiting.poll(left_s * 1000) if left_s > 0 else []
            if not ready:
                self.close_process()
                raise ConnectError(
                    f"no answer within {self._limit_s():g} s while logging in",
                    node=self.target.name,
                    hint="does `ssh -o BatchMode=yes` with the same user, address and port work?",
                )
            for fd, _ in ready:
                if fd == log and not self.read_log():
                    waiting.unregister(log)
                elif fd == stdout:
                    data = os.read(stdout, EARLY_BYTES)
                    self.early += data
                    if not data:
                        return self._has_ended_itself()
        return True

    @property
    def is_accepted(self) -> bool:
        """Return whether the login was accepted: ssh reports it, or the command's output has begun."""
        return self.mark in self.early or self.has_own_connection

    @property
    def has_expired(self) -> bool:
        """Return whether the node's shell may have ended before a command reaches it."""
        return time.monotonic() - self._begun > COMMAND_LIMIT_S - COMMAND_MARGIN_S

    @property
    def has_own_connection(self) -> bool:
        """Return whether ssh has logged in itself, and does not share a connection that the user has opened."""
        return _AUTHENTICATED.search(self.words.log) is not None

    @property
    def peer_address(self) -> str:
        """Numeric address that ssh connected to; empty if it used a proxy or a shared connection."""
        found = _AUTHENTICATED.search(self.words.log)
        return (found["address"] or "") if found else ""

    def read_log(self) -> bool:
        """Read the log of ssh; return False at its end."""
        with self._log_lock:
            if self._log < 0:
                return False
            try:
                while data := os.read(self._log, 1 << 12):
                    self.words.log += data.decode(errors="replace")
                    if len(self.words.log) > LOG_LIMIT:
                        self.words.forget_debug()
            except BlockingIOError:
                return True
            return False

    def kill(self) -> None:
        """End ssh; the node then sees the end of the connection."""
        with contextlib.suppress(OSError):
            self.process.terminate()
        self.close_log()

    def close_process(self) -> None:
        """End ssh and close its pipes, which nothing reads."""
        self.kill()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def close_log(self) -> None:
        """Close the log, and remove its name."""
        with contextlib.suppress(OSError):
            self._log_path.unlink()
        with self._log_lock:
            log, self._log = self._log, -1
            if log >= 0:
                os.close(log)

    def _limit_s(self) -> float:
        return self.target.connect_timeout_s + SHELL_LIMIT_S

    def _has_ended_itself(self) -> bool:
        """Return whether it is the node's shell that has ended the output, and not ssh before or instead of a login."""
        status = self.process.wait()
        self.read_log()
        if status != LOST_STATUS or self.is_accepted:
            return True
        if self.process.stderr is not None:
            self.words.stderr = _read_all(self.process.stderr.fileno()).decode(errors="replace")
        self.close_process()
        return False


def _log_name(fifo: Path) -> str:
    """Return a name of a FIFO of this process under which ssh can open it only while this process lives.

    ssh would wait for a reader for ever if this process ended before ssh had opened the FIFO. A name below
    /proc/PID ends with its process; elsewhere than on Linux there is none.
    """
    process = Path(f"/proc/{os.getpid()}")
    # The /proc folder of a process that others may not inspect (a Python with file capabilities) belongs to root.
    is_open = process.exists() and process.stat().st_uid == os.geteuid()
    return f"{process}/root{fifo}" if is_open else str(fifo)


def build_waiting_script(mark: str, limit_s: int) -> str:
    """Return a script for a node's shell that prints a line, reads a command in one line, and runs it.

    Without the limit a shell would wait for hours on a node whose link was cut: the SSH server does not detect it.

    Args:
        mark: the line.
        limit_s: seconds within which the command has to come. Without effect where there is no `timeout`.
    """
    # `read` has no limit in POSIX. A second shell reads, since only a shell's `read` takes no more than the line.
    read = f"timeout {limit_s} /bin/sh -c {quote_word(_PASS_LINE)} 2>/dev/null"
    # 124: the limit is over. 126, 127: there is no `timeout`. Anything else, such as a signal, ends the shell: a second
    # `read` without a limit could wait for hours.
    otherwise = "case $? in 124) ;; 126 | 127) IFS= read -r dtctl || exit;; *) exit 1;; esac"
    return f'echo {mark}; dtctl=$({read}) || {otherwise}; eval "$dtctl"'


class OpenSshStream(LocalStream):
    """A command on a node: one ssh process."""

    def __init__(self, login: SshLogin) -> None:
        super().__init__(login.process, node=login.target.name)
        self._login = login
        self._early = login.early
        self._is_marked = False
        self._is_told = False

    def read(self, size: int) -> bytes:
        """See `dtctl.transport.base.ByteStream`."""
        while not self._is_marked:
            before, mark, after = self._early.partition(self._login.mark)
            if mark:
                # The output of start-up files is kept: it would spoil the command's output over any other connection,
                # too.
                self._early, self._is_marked = before + after, True
                break
            data = super().read(EARLY_BYTES)
            self._early += data
            self._is_marked = not data or len(self._early) > EARLY_BYTES
            if not data and not self._early:
                self._require_session()
        if self._early:
            data, self._early = self._early[:size], self._early[size:]
            return data
        # Otherwise ssh would wait when the pipe is full: it logs each exchange of keys, and a run may take weeks.
        self._login.read_log()
        return super().read(size)

    def write(self, data: bytes) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        self._login.read_log()
        super().write(data)

    def _require_session(self) -> None:
        """Refuse an end without any output where the server takes logins and opens no session (MaxSessions).

        Raises:
            ConnectError: it does so.
        """
        if super().exit_status(END_S) == LOST_STATUS:
            self._login.read_log()
            if text := explain_missing_session(self._login.words):
                raise ConnectError(
                    f"it opens no session: {text}",
                    node=self._node,
                    hint="a login is accepted, and then no session: see MaxSessions of its SSH server",
                )

    def exit_status(self, timeout_s: float) -> int | None:
        """See `dtctl.transport.base.ByteStream`."""
        status = super().exit_status(timeout_s)
        if status != LOST_STATUS:
            return status if status is None or status < 128 or not self._was_killed else None
        return None if self._explain_lost_link() else status

    def read_stderr(self) -> bytes:
        """See `dtctl.transport.base.ByteStream`; at the end of a lost link with the messages of ssh."""
        if self.has_ended_output:
            # ssh closes its output first. Its last messages come after that, and so does the exit status, which shows
            # whether they are its own or the command's.
            super().exit_status(END_S)
        data = super().read_stderr()
        if self._login.process.poll() == LOST_STATUS and not self._is_told and (lost := self._explain_lost_link()):
            self._is_told = True
            data += b"ssh: %s\n" % lost.encode()
        return data

    def _explain_lost_link(self) -> str:
        """Return why ssh has lost the link; empty if exit status 255 is the command's own."""
        self._login.read_log()
        if not self._login.has_own_connection:
            return "the connection that it shares (ControlMaster) has ended, or its command has with status 255"
        return self._login.words.after_login()

    @property
    def _was_killed(self) -> bool:
        """Return whether a signal ended ssh itself, which is not a result of the command."""
        return (self._login.process.returncode or 0) < 0

    def close(self) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        self.close_stdin()
        self._login.kill()
        super().close()


def _discard_expired_login(login: SshLogin | None) -> SshLogin | None:
    """Return the login, unless its node may not wait for a command any more."""
    if login is not None and login.has_expired:
        login.close_process()
        return None
    return login


class OpenSshConnection:
    """A node that has accepted a login.

    The first login runs the first command. Where more follow, they share one more connection (ControlMaster), which
    ends
    with this object: a login for each of many commands would be slow, and looks like an attack to some servers.
    """

    def __init__(self, transport: OpenSshTransport, login: SshLogin) -> None:
        self._transport = transport
        self._address = login.peer_address
        self._is_shared_by_user = not login.has_own_connection
        self._first: SshLogin | None = login
        self._master: MasterConnection | None = None
        self._streams: list[OpenSshStream] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self.target = login.target

    def peer_address(self) -> str:
        """See `dtctl.transport.base.Connection`."""
        return self._address

    def open(self, command: str) -> OpenSshStream:
        """See `dtctl.transport.base.Connection`."""
        with self._lock:
            login, self._first = self._first, None
            login = _discard_expired_login(login)
            if login is None and not self._is_shared_by_user and (self._master is None or self._master.has_ended):
                # An expired connection continues to serve the sessions that share it already.
                self._streams += [OpenSshStream(self._master.login)] if self._master else []
                self._master = self._transport.open_master(self.target)
            master = self._master
        stream = OpenSshStream(login or self._transport.log_in(self.target, master=master))
        with self._lock:
            self._streams.append(stream)
            is_closed = self._is_closed
        if is_closed:
            stream.close()
            raise ConnectError("the connection was closed", node=self.target.name)
        # The process has ended already; its output and exit status show why.
        with contextlib.suppress(ConnectError):
            stream.write(_line_of(command))
        return stream

    def alive(self) -> bool:
        """See `dtctl.transport.base.Connection`."""
        return not self._is_closed

    def close(self) -> None:
        """See `dtctl.transport.base.Connection`."""
        with self._lock:
            first, self._first, self._is_closed = self._first, None, True
            streams, self._streams = self._streams, []
            logins = [*([first] if first else []), *([self._master.login] if self._master else [])]
        streams += map(OpenSshStream, logins)
        for stream in streams:
            stream.close()


@dataclass(frozen=True, slots=True)
class MasterConnection:
    """A connection that commands share."""

    login: SshLogin
    socket: Path

    @property
    def has_ended(self) -> bool:
        """Return whether it can no longer be shared."""
        return self.login.has_expired or self.login.process.poll() is not None


class OpenSshTransport:
    """Connects to nodes by `ssh`."""

    def __init__(self, targets: Iterable[Target] = ()) -> None:
        """Prepare to connect.

        Args:
            targets: nodes whose logins begin at once; if there are many, only the first ones.

        Raises:
            LaunchError: there is no folder for ssh's configuration.
        """
        try:
            self._folder = _make_private_folder()
        except OSError as exc:
            raise LaunchError(f"no folder for ssh's configuration can be made: {exc.strerror}", hint=ROOM_HINT) from exc
        self._begun: dict[str, SshLogin] = {}
        self._cleanup = weakref.finalize(self, _clean_up, self._folder, self._begun, os.getpid())
        self._lock = threading.Lock()
        self._configs: dict[tuple[str | None, str | None], Path] = {}
        self._count = 0
        self._wave = threading.Semaphore(WAVE)
        for target in [*targets][:WAVE]:
            # If a login cannot begin, the reason is reported when its node is connected.
            with contextlib.suppress(ConnectError):
                self._begun[target.name] = self._begin_login(target)

    def connect(self, target: Target) -> OpenSshConnection:
        """See `dtctl.transport.base.Transport`."""
        return OpenSshConnection(self, self.log_in(target))

    def open_master(self, target: Target) -> MasterConnection | None:
        """Open a connection that later commands share; return None where the name of its socket would be too long.

        Raises:
            TransportError: of the class for the reason.
        """
        with self._lock:
            self._count += 1
            socket = self._folder / f"m{self._count}"
        if len(str(socket)) > MAX_SOCKET_LENGTH:
            return None
        # Its log is not read later.
        options = ("-o", "LogLevel=VERBOSE", "-o", "ControlMaster=yes", "-S", str(socket))
        return MasterConnection(self.log_in(target, options=options), socket)

    def log_in(
        self, target: Target, *, master: MasterConnection | None = None, options: Sequence[str] = ()
    ) -> SshLogin:
        """Log in to a node; again where a server has too many logins under way to take one more (MaxStartups).

        Args:
            target: the node.
            master: an open connection to share.
            options: further options of ssh.

        Raises:
            TransportError: of the class for the reason.
        """
        deadline = time.monotonic() + target.connect_timeout_s
        wait_s = FIRST_WAIT_S
        if master is not None:
            options = ("-S", str(master.socket))
        for attempt in range(TRIES):
            with self._lock:
                login = None if options else _discard_expired_login(self._begun.pop(target.name, None))
            with self._wave:
                login = login or self._begin_login(target, options)
                if login.wait():
                    return login
            is_last = attempt == TRIES - 1 or time.monotonic() + wait_s > deadline
            if is_last or not is_busy(login.words):
                raise explain_failed_login(
                    login.words, target, lambda: self._debug_host_key(target), lambda: self._jump_hosts(target)
                )
            # The random factor prevents that all logins are repeated at the same moment.
            time.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s *= 2
        raise ConnectError("it could not be reached", node=target.name)

    def _begin_login(self, target: Target, options: Sequence[str] = ()) -> SshLogin:
        with self._lock:
            self._count += 1
            log = self._folder / f"log-{self._count}"
        try:
            return SshLogin(target, self.argv(target, options), log)
        except OSError as exc:
            raise ConnectError(
                f"files for ssh cannot be made in {self._folder}: {exc.strerror}", node=target.name, hint=ROOM_HINT
            ) from exc

    def _jump_hosts(self, target: Target) -> str:
        """Return the jump hosts of a node, as its configuration names them; empty without."""
        argv = [*self.argv(target), "-G", "--", target.address]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        found = re.search(r"^proxyjump (.+)$", done.stdout, re.MULTILINE)
        return found[1] if found and found[1] != "none" else ""

    def _debug_host_key(self, target: Target) -> str:
        """Return the output of `ssh -v` up to a host key that it refuses, which comes before any login."""
        argv = [*self.argv(target), "-v", "--", target.address, "true"]
        limit_s = target.connect_timeout_s + DEBUG_S
        try:
            done = subprocess.run(argv, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return ""
        return done.stderr.decode(errors="replace")

    def argv(self, target: Target, options: Sequence[str] = ()) -> list[str]:
        """Return the command line of ssh, without the node's address and what it runs; `options` take precedence."""
        # At this level ssh logs the offered keys and the host key, without a second login.
        argv = ["ssh", *options, "-F", str(self._prepare_ssh_config(target)), "-T", "-x", "-o", "LogLevel=DEBUG1"]
        argv += ["-o", f"ConnectTimeout={math.ceil(target.connect_timeout_s)}"]
        if target.user:
            argv += ["-l", target.user]
        if target.port:
            argv += ["-p", str(target.port)]
        if target.identity_file:
            argv += ["-o", "IdentitiesOnly=yes", "-i", target.identity_file.replace("%", "%%")]
        return argv

    def _prepare_ssh_config(self, target: Target) -> Path:
        """Return a configuration file that begins with the options that must hold."""
        key = (target.ssh_config, target.known_hosts)
        with self._lock:
            if key not in self._configs:
                path = self._folder / f"config-{len(self._configs)}"
                path.write_text(render_ssh_config(*key), encoding="utf-8", errors="surrogateescape")
                self._configs[key] = path
            return self._configs[key]


def _make_private_folder() -> Path:
    """Make a private folder, and remove those that killed processes have left."""
    # The folder gets its final name only after it is locked; otherwise another process would take it for a leftover and
    # remove it.
    unlocked = Path(tempfile.mkdtemp(prefix=NEW_PREFIX))
    _lock_folder(unlocked)
    folder = unlocked.rename(unlocked.with_name(unlocked.name.replace(NEW_PREFIX, FOLDER_PREFIX, 1)))
    for other in folder.parent.glob(f"{FOLDER_PREFIX}*"):
        # A process that uses such a folder holds a lock on it, also in another container that shares the parent folder.
        with contextlib.suppress(OSError):
            if other != folder and other.stat().st_uid == os.getuid():
                os.close(_lock_folder(other))
                shutil.rmtree(other, ignore_errors=True)
    return folder


def _lock_folder(folder: Path) -> int:
    """Lock a folder for as long as this process lives, or until the descriptor is closed.

    Raises:
        OSError: another process uses it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _clean_up(folder: Path, begun: dict[str, SshLogin], pid: int) -> None:
    """End logins that were begun and not used, and remove the folder of a transport."""
    if os.getpid() != pid:  # this is a forked copy of the process
        return
    for login in begun.values():
        login.kill()
    for login in begun.values():
        login.close_process()
    shutil.rmtree(folder, ignore_errors=True)


def render_ssh_config(ssh_config: str | None, known_hosts: str | None) -> str:
    """Return an OpenSSH configuration: what must hold, then the user's.

    Args:
        ssh_config: the user's file; None for the usual ones, `none` for no configuration.
        known_hosts: file of known host keys instead of the user's and the system's.
    """
    lines = [*FORCED]
    if known_hosts is not None:
        lines += [f"UserKnownHostsFile {_quote_config_path(known_hosts)}", "GlobalKnownHostsFile /dev/null"]
    if ssh_config is None:
        lines += ["Include ~/.ssh/config", "Include /etc/ssh/ssh_config"]
    elif ssh_config != NO_CONFIG:
        lines.append(f"Include {_quote_config_path(ssh_config, is_pattern=True)}")
    # Workers have the variables that the spec names, and not the locale of the user who launches.
    lines += ["Match all", "SendEnv -*"]
    return "".join(f"{line}\n" for line in lines)


def _quote_config_path(path: str, *, is_pattern: bool = False) -> str:
    """Return a path as a value of ssh_config(5)."""
    path = str(Path(path).expanduser().absolute())
    # ssh takes one backslash of two away, and glob(3) one of the two that are left.
    path = path.replace("\\", "\\\\\\\\" if is_pattern else "\\\\")
    path = re.sub(r"([\[\]*?])", r"\\\1", path) if is_pattern else path.replace("%", "%%")
    return '"' + path.replace('"', '\\"') + '"'


def _line_of(command: str) -> bytes:
    """Return a command as one line for the waiting shell."""
    if "\n" in command:
        escaped = command.replace("\\", "\\\\").replace("\n", "\\n")
        command = f'eval "$(printf %b {quote_word(escaped)})"'
    return command.encode(errors="surrogateescape") + b"\n"


def _read_all(fd: int) -> bytes:
    """Return the remaining output of a process that has ended."""
    data = b""
    with contextlib.suppress(OSError):
        while (more := os.read(fd, 1 << 16)) and len(data) < EARLY_BYTES:
            data += more
    return data
