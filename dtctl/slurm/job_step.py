"""Job step for all nodes of an allocation: its tasks connect back to this process, and each runs its node's command.

A separate step for each node would cost one srun process here and one request to Slurm's controller per node.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

from dtctl.errors import ConnectError
from dtctl.schema import check_prose
from dtctl.slurm.batchlog import TaskFailed, parse_batch_line
from dtctl.supervisor import call_back
from dtctl.transport.srun import OPTIONS

FIRST: Final = "import json,sys;order=json.loads(sys.stdin.readline());exec(order['program']);main(order)"
"""Program of the tasks; it reads the rest from its standard input, which srun sends to all tasks."""
CALL_BACK_S: Final = 15.0
"""Seconds after which a node that has not connected back gets a job step of its own."""
HANDSHAKE_S: Final = 5.0
NAME_BYTES: Final = 1 << 12
"""Largest size of the message with which a task identifies itself, in bytes."""
MAX_LINES: Final = 200
"""Lines of a task's standard error that are kept until they are read; the last lines have the reason of its end."""
UNPROVEN: Final = 64
"""Limit on connections in their handshake, in addition to one for each node; more are closed at once."""
_LABELLED: Final = re.compile(r"\s*(\d+): (.*)", re.DOTALL)
"""Line of a task in the output of `srun --label`."""


class StepStream:
    """Byte stream of a task of the step that runs a node's command."""

    def __init__(self, step: JobStep, connection: socket.socket, *, node: str, task: int) -> None:
        self._step, self._connection, self._node, self.task = step, connection, node, task
        self._reading = threading.Lock()
        self._closed = False

    def read(self, size: int) -> bytes:
        """See `dtctl.transport.base.ByteStream`."""
        with self._reading:
            try:
                data = self._connection.recv(size)
            except OSError:
                data = b""
            if not data or self._closed:
                self._connection.close()
                return b""
            return data

    def read_stderr(self) -> bytes:
        """See `dtctl.transport.base.ByteStream`."""
        return self._step.pop_stderr(self.task)

    def write(self, data: bytes) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        try:
            self._connection.sendall(data)
        except OSError as exc:
            raise ConnectError("the command no longer reads", node=self._node) from exc

    def close_stdin(self) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        with contextlib.suppress(OSError):  # the connection may be closed already
            self._connection.shutdown(socket.SHUT_WR)

    def exit_status(self, timeout_s: float) -> int | None:
        """See `dtctl.transport.base.ByteStream`."""
        return self._step.wait_for_exit(self.task, timeout_s)

    def end(self) -> None:
        """End the stream for its reader: Slurm has given up the node; its task may still run and be connected."""
        _shut_down(self._connection)

    def close(self) -> None:
        """See `dtctl.transport.base.ByteStream`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        # Closing while another thread reads is not safe: the descriptor's number may soon be that of another file.
        if self._reading.acquire(blocking=False):
            self._connection.close()
            self._reading.release()


class JobStep:
    """A job step with a task on each node; each task is handed out once."""

    def __init__(self, job: str, nodes: Sequence[str], *, note: Callable[[str], None]) -> None:
        """Prepare the step; nothing is started yet.

        Args:
            job: number of the job.
            nodes: names of the nodes in Slurm.
            note: receives a line for the job's log about nodes that the step does not reach.
        """
        count = len(nodes)
        placement = [f"--nodelist={','.join(nodes)}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        # A node or a task that fails must not end the others.
        placement += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        self._argv = ["srun", "--jobid", job, *placement, *OPTIONS, "--label"]
        self._nodes, self._note = frozenset(nodes), note
        self._key = os.urandom(32)
        self._news = threading.Condition()
        self._calls: dict[str, tuple[socket.socket, int, bytes, bytes]] = {}
        """Node -> connection, number of the task, and the nonces of both ends."""
        self._called: set[str] = set()
        self._taken: set[str] = set()
        self._stderr: dict[int, list[str]] = {}
        self._status: dict[int, int] = {}
        self._streams: dict[str, StepStream] = {}
        self._failed: dict[str, int | None] = {}
        """Node that has failed -> number of its task; None if the whole node has failed."""
        self._last_message = ""
        self._process: subprocess.Popen[str] | None = None
        self._has_ended = False
        self._deadline = 0.0
        self.port = 0
        """Port at which the tasks connect back, once the step is started."""
        self._unproven = 0

    def start(self) -> None:
        """Start the step in the background; if that fails, no node connects back."""
        family = socket.AF_INET6 if (both := socket.has_dualstack_ipv6()) else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=max(128, len(self._nodes)))
        text = resources.files("dtctl.supervisor").joinpath("call_back.py").read_text(encoding="utf-8")
        self.port = listener.getsockname()[1]
        order = {"program": text, "port": self.port, "key": self._key.hex()}
        try:
            self._process = subprocess.Popen(
                [*self._argv, sys.executable, "-I", "-S", "-c", FIRST],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd=Path.home(),
                start_new_session=True,
            )
        except OSError as exc:
            listener.close()
            self._has_ended, self._last_message = True, f"srun cannot be started: {exc.strerror}"
            return
        self._deadline = time.monotonic() + CALL_BACK_S
        for name, target in (("read", self._read_messages), ("accept", lambda: self._accept_calls(listener))):
            threading.Thread(target=target, name=f"job step: {name}", daemon=True).start()
        with contextlib.suppress(OSError):  # srun may have ended; its output has the reason
            assert self._process.stdin is not None  # noqa: S101 - for the type checker
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.close()

    def open(self, node: str, command: str) -> StepStream | None:
        """Start a command on a node by its task; return None if the task is taken or has not connected back."""
        with self._news:
            if node not in self._nodes or node in self._taken:
                return None
            self._taken.add(node)
            self._news.wait_for(
                lambda: node in self._calls or node in self._failed or self._has_ended,
                max(0.0, self._deadline - time.monotonic()),
            )
            call = self._calls.pop(node, None)
            if call is None:
                self._note(f"{node} gets a job step of its own: {self._describe_failure(node)}")
                return None
        connection, task, own, theirs = call
        text = command.encode()
        proof = call_back.compute_proof(self._key, b"launcher", theirs, own, text)
        try:
            connection.sendall(call_back.LENGTH.pack(len(text)) + text + proof)
        except OSError:  # the node was lost in the meantime
            connection.close()
            return None
        stream = StepStream(self, connection, node=node, task=task)
        with self._news:
            self._streams[node] = stream
            if self._failed.get(node, task) is None:  # while the command was sent
                stream.end()
        return stream

    def _describe_failure(self, node: str) -> str:
        """Return the reason why a node has not connected back."""
        task = self._failed.get(node)
        lines = self._stderr.get(task, []) if task is not None else []
        if lines or self._has_ended or node in self._failed:
            return lines[-1].strip() if lines else self._last_message or "the common one has ended"
        return f"it has not called back on port {self.port} within {CALL_BACK_S:g} s"

    def pop_stderr(self, task: int) -> bytes:
        """Return the new standard error of a task, and discard it."""
        with self._news:
            return "".join(self._stderr.pop(task, [])).encode()

    def wait_for_exit(self, task: int, timeout_s: float) -> int | None:
        """Return the exit status of a task, 128 + N for signal N; None if it is unknown after `timeout_s`."""
        with self._news:
            self._news.wait_for(lambda: task in self._status or self._has_ended, timeout_s)
            return self._status.get(task, 0 if self._has_ended else None)

    def _accept_calls(self, listener: socket.socket) -> None:
        """Accept connections until all nodes have connected back, the step has ended, or the time is over."""
        with listener:
            listener.settimeout(0.5)
            while not self._is_complete() and time.monotonic() < self._deadline:
                try:
                    connection, _ = listener.accept()
                except OSError:  # no connection within the time
                    continue
                with self._news:
                    has_room = self._unproven < len(self._nodes) + UNPROVEN
                    self._unproven += has_room
                if not has_room:
                    connection.close()
                    continue
                threading.Thread(target=self._prove_call, args=(connection,), name="call back", daemon=True).start()

    def _is_complete(self) -> bool:
        with self._news:
            return self._has_ended or self._nodes <= self._called | self._failed.keys()

    def _prove_call(self, connection: socket.socket) -> None:
        """Verify that a connection comes from a task of this step, and keep it for the node's command."""
        limit = threading.Timer(HANDSHAKE_S, _shut_down, (connection,))
        limit.daemon = True
        limit.start()
        try:
            own = os.urandom(call_back.NONCE_BYTES)
            connection.sendall(own)
            theirs = call_back.receive_exactly(connection, call_back.NONCE_BYTES)
            size = call_back.LENGTH.unpack(call_back.receive_exactly(connection, call_back.LENGTH.size))[0]
            name = call_back.receive_exactly(connection, min(size, NAME_BYTES))
            proof = call_back.receive_exactly(connection, call_back.PROOF_BYTES)
            if not hmac.compare_digest(proof, call_back.compute_proof(self._key, b"task", own, theirs, name)):
                raise OSError("not a task of this step")
            caller = json.loads(name)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:
            connection.close()
            return
        finally:
            limit.cancel()
            with self._news:
                self._unproven -= 1
        with self._news:
            self._calls[caller["node"]] = (connection, caller["task"], own, theirs)
            self._called.add(caller["node"])
            self._news.notify_all()

    def _read_messages(self) -> None:
        """Sort srun's output by task, until srun ends."""
        process = self._process
        assert process is not None  # noqa: S101 - for the type checker
        assert process.stderr is not None  # noqa: S101
        for line in process.stderr:
            with self._news:
                if match := _LABELLED.match(line):
                    lines = self._stderr.setdefault(int(match[1]), [])
                    lines.append(check_prose(match[2]))
                    del lines[:-MAX_LINES]
                elif line.startswith("srun: error: "):
                    self._last_message = check_prose(line.rstrip())
                for event in parse_batch_line(line.rstrip()):
                    if isinstance(event, TaskFailed):
                        self._failed[event.node] = event.task
                        if event.task is not None:
                            self._status[event.task] = event.exit_code or 1
                        elif event.node in self._streams:
                            stream = self._streams[event.node]
                            self._stderr.setdefault(stream.task, []).append(check_prose(line))
                            stream.end()
                self._news.notify_all()
        process.stderr.close()
        process.wait()
        with self._news:
            self._has_ended = True
            self._news.notify_all()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
