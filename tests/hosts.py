"""Virtual hosts for the tests of integration and of faults: one sandbox, healed after each test, and projects on it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox, SandboxNode

DTCTL = [sys.executable, "-m", "dtctl"]


@pytest.fixture(scope="session")
def sandbox_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment in which the tests' sandboxes are apart from everybody else's."""
    # Not below /tmp: the hosts have a /tmp of their own, and would not if their files lay there.
    base = Path.home() / ".cache" / f"dtctl-tests-{os.getpid()}"
    base.mkdir(parents=True)
    os.environ["DTCTL_SANDBOX_DIR"] = str(base)
    try:
        yield {**os.environ, "DTCTL_SANDBOX": "main", "NO_COLOR": "1"}
    finally:
        for folder in list(base.iterdir()):
            control.down(folder.name)
        base.rmdir()
        del os.environ["DTCTL_SANDBOX_DIR"]


@pytest.fixture(scope="session")
def session_sandbox(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    if control.find("main") is not None:  # a launch in a test before has started it
        control.down("main")
    yield control.up("main", nodes=3)
    control.down("main")


@pytest.fixture
def sandbox(session_sandbox: Sandbox) -> Iterator[Sandbox]:
    """Three hosts; whatever a test breaks is healed afterwards, and whatever it leaves running fails it."""
    found = control.find(session_sandbox.name)  # not the one of the start: a host that was healed has another init
    assert found is not None
    yield found
    current = control.find(session_sandbox.name)
    assert current is not None
    if faults.recorded(current) or any(not control.host_processes(node) for node in current.nodes):
        faults.heal(current, current.nodes)
        faults.record(current, [])
        current = control.find("main")
        assert current is not None
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not any(workers(node) for node in current.nodes), 20.0)
    left = {node.name: workers(node) for node in current.nodes}
    assert left == {node.name: {} for node in current.nodes}, "a test has left processes behind"


def workers(node: SandboxNode) -> dict[int, str]:
    """Processes on a host that are neither its init nor its SSH server."""
    found = control.host_processes(node)
    # Without a command line: it has let go of its memory and is ending.
    found = {pid: line for pid, line in found.items() if line}
    return {
        pid: line for pid, line in found.items() if pid != node.pid and not line.startswith(("sshd:", "/usr/sbin/sshd"))
    }


PATIENCE: Final = 10
"""Limits in tests end what would wait for ever; a busy machine may take so many times as long."""
LIMIT_S: Final = 900.0
"""For one command."""


def wait_until(condition: Callable[[], object], limit_s: float = 60.0, what: str = "a condition") -> float:
    """Seconds until `condition` was true; looks often, and gives up after `PATIENCE` times `limit_s`."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > PATIENCE * limit_s:
            raise AssertionError(f"not within {PATIENCE * limit_s:g} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - begun


@dataclass
class Finished:
    """A dtctl command that has ended."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def done(self) -> dict[str, object]:
        assert self.events[-1]["event"] == "done", self.err
        return self.events[-1]


@dataclass
class Project:
    """A folder with a spec, and the commands run in it."""

    folder: Path
    env: dict[str, str]
    unique: str = field(default_factory=lambda: f"run-{secrets.token_hex(4)}")
    """A name for a run that no other test has used on the same hosts."""
    _running: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, *arguments: str, timeout_s: float = LIMIT_S, env: dict[str, str] | None = None) -> Finished:
        done = subprocess.run(
            [*DTCTL, *arguments],
            cwd=self.folder,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*DTCTL, *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout_s: float = LIMIT_S) -> Finished:
        out, err = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, out, err)

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()


@pytest.fixture
def project(tmp_path: Path, sandbox_env: dict[str, str]) -> Iterator[Project]:
    folder = tmp_path / "project"
    folder.mkdir()
    made = Project(folder, sandbox_env)
    yield made
    made.close()


SPEC = """\
cluster: {{transport: sandbox, nodes: {nodes}, slots: {slots}}}
job: {{name: test, script: train.py, kind: direct, grace_s: {grace_s}}}
"""


def spec_text(*, nodes: int = 3, slots: int = 1, grace_s: float = 2.0) -> str:
    return SPEC.format(nodes=nodes, slots=slots, grace_s=grace_s)
