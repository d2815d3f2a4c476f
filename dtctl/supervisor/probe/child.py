"""A process of the job's Python next to the probe, with requests as JSON lines. Stdlib only, Python 3.8.

The process ends with the probe, and is killed if it does not answer in time.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import threading
import time

from dtctl import node_facts

_PR_SET_PDEATHSIG = 1
KEPT_BYTES = 4096
WORDS = 400
"""Most words of the process's warnings that are reported."""
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)(: |:$)")


class JobPythonProcess:
    """A process of the job's Python, its answers, and the end of its standard error."""

    def __init__(self, argv: list, env: dict) -> None:  # type: ignore[type-arg]
        """Start the process; `env` is its whole environment."""
        self._said = b""
        self._read = b""
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd="/",  # Modules in the home folder do not belong to the job.
            preexec_fn=_set_child_death_signal,  # noqa: PLW1509 - the function makes one system call and needs no lock
        )
        self._ear = threading.Thread(target=self._collect_stderr, daemon=True)
        self._ear.start()

    def _collect_stderr(self) -> None:
        errors = self._process.stderr
        while errors is not None:
            data = os.read(errors.fileno(), 65_536)
            if not data:
                return
            self._said = (self._said + data)[-KEPT_BYTES:]

    def exchange_message(self, message: dict, limit_s: float) -> dict:  # type: ignore[type-arg]
        """Send a message unless it is empty; return the last line of the answer, or the last one so far as `silent`."""
        deadline = time.monotonic() + limit_s
        last: dict = {}  # type: ignore[type-arg]
        try:
            if message and self._process.stdin is not None:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
            while not last.get("final"):
                line = self._read_stdout_line(deadline)
                if not line:
                    self.kill()
                    return {**last, "silent": True, "complained": self.complaint()}
                last = {**last, **json.loads(line.decode())}
        except (OSError, ValueError) as exc:
            self.kill()
            return {**last, "error": str(exc), "complained": self.complaint()}
        return last

    def _read_stdout_line(self, deadline: float) -> bytes:
        out = self._process.stdout
        while out is not None and b"\n" not in self._read:
            if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return b""
            data = os.read(out.fileno(), 65_536)
            if not data:
                self._process.wait()
                raise OSError("it has ended with status %s" % self._process.returncode)
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def complaint(self) -> str:
        """Return standard error from the last line with the name of an exception on; without one, the last line."""
        lines = [line.strip() for line in self._said.decode(errors="replace").strip().splitlines()]
        named = [at for at, line in enumerate(lines) if _EXCEPTION.match(line)]
        return " ".join(filter(None, lines[named[-1] if named else -1 :]))[:WORDS]

    def kill(self) -> None:
        """Kill the process, even if it still works."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._ear.join(1.0)  # This thread reads standard error to its end.
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # Unread requests cannot be sent any more.
                pass


def _set_child_death_signal() -> None:
    node_facts.set_process_attribute(_PR_SET_PDEATHSIG, 9)
