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
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests import command_line

DTCTL = [sys.executable, "-m", "dtctl"]
_HAS_FAILED: Final = pytest.StashKey[bool]()


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
            control.remove_sandbox(folder.name)
        base.rmdir()
        del os.environ["DTCTL_SANDBOX_DIR"]


@pytest.fixture(scope="session")
def session_sandbox(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    if control.find_running_sandbox("main") is not None:  # a launch in a test before has started it
        control.remove_sandbox("main")
    yield control.start_sandbox("main", nodes=3)
    control.remove_sandbox("main")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_HAS_FAILED] = report.failed or item.stash.get(_HAS_FAILED, False)
    return report


@pytest.fixture
def sandbox(session_sandbox: Sandbox, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Three hosts; whatever a test breaks is healed afterwards, and whatever it leaves running fails it.

    What a test leaves that has failed already is killed: it may not end by itself, and its end would prove nothing.
    """
    found = control.find_running_sandbox(
        session_sandbox.name
    )  # not the one of the start: a host that was healed has another init
    assert found is not None
    yield found
    current = control.find_running_sandbox(session_sandbox.name)
    assert current is not None
    if faults.read_recorded_faults(current) or any(not control.list_host_processes(node) for node in current.nodes):
        faults.remove_host_faults(current, current.nodes)
        faults.write_recorded_faults(current, [])
        current = control.find_running_sandbox("main")
        assert current is not None
    left: dict[str, dict[int, str]] = {}

    def is_idle() -> bool:
        # One look decides and is told: a server may yet start the shell of a login whose client was killed meanwhile.
        left.clear()
        left.update({node.name: found for node in current.nodes if (found := workers(node))})
        if left and request.node.stash[_HAS_FAILED]:
            kill_workers(current)
        return not left

    with contextlib.suppress(AssertionError):
        wait_until(is_idle, 20.0)
    what = [f"{name}: {describe_process(pid)}" for name, found in left.items() for pid in found]
    assert not left, "\n".join(["a test has left processes behind", *what])


def describe_process(pid: int) -> str:
    """What the kernel knows of a process: what it waits for, what is open, and its children, zombies, too."""
    folder = Path(f"/proc/{pid}")
    words = []
    for name in ("stat", "wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            words.append(f"{name} {(folder / name).read_text().strip()}")
    with contextlib.suppress(OSError):
        words += [f"{fd.name} -> {fd.readlink()}" for fd in (folder / "fd").iterdir()]
    for other in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            stat = (other / "stat").read_text()
            if stat.rpartition(")")[2].split()[1] == str(pid):
                words.append(f"child {stat[:80]}")
    return f"{pid}: " + "; ".join(words)


def workers(node: SandboxNode) -> dict[int, str]:
    """Processes on a host that are neither its init nor its SSH server."""
    found = control.list_host_processes(node)
    # Without a command line: it has let go of its memory and is ending.
    found = {pid: line for pid, line in found.items() if line}
    return {
        pid: line for pid, line in found.items() if pid != node.pid and not line.startswith(("sshd:", "/usr/sbin/sshd"))
    }


def wait_for_none(*nodes: SandboxNode) -> None:
    """Until nothing runs on these hosts: what dtctl looked with itself ends a moment after it has said what it saw.

    What a test has started there sleeps longer than this waits.
    """
    wait_until(lambda: not any(map(workers, nodes)), 10, "nothing is left running")


def kill_workers(sandbox: Sandbox) -> None:
    """Kill what runs on hosts."""
    for pid in [pid for node in sandbox.nodes for pid in workers(node)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


PATIENCE: Final = 10
"""Limits in tests end what would wait for ever; a busy machine may take so many times as long."""
LIMIT_S: Final = 900.0
"""For one command."""


def wait_until(condition: Callable[[], object], limit_s: float = 60.0, what: str = "a condition") -> float:
    """Seconds until `condition` was true; looks often, and gives up after `PATIENCE` times `limit_s`.

    Looking takes at most a fifth of the time, since what is waited for needs the processor, too.
    """
    begun = looked = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now - begun > PATIENCE * limit_s:
            raise AssertionError(f"not within {PATIENCE * limit_s:g} s: {what}")
        time.sleep(min(1.0, max(0.02, 4 * (now - looked))))
        looked = time.monotonic()
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
        """Run a command to its end, in a process that is forked from one which has loaded dtctl."""
        environ = {**self.env, **(env or {})}
        done = command_line.dtctl_in(environ, *arguments, cwd=self.folder, timeout=timeout_s)
        return Finished(done.returncode, done.stdout, done.stderr)

    def printed(self, run: str) -> str:
        """What all workers of a run have printed."""
        folder = self.folder / ".dtctl" / "runs" / run / "logs"
        return "".join(path.read_text() for path in folder.rglob("rank-*.log"))

    def digest(self, run: str) -> dict[str, object]:
        """What `snapshot digest --json` says of a run's newest snapshot."""
        done = self.run("snapshot", "digest", run, "--json")
        assert done.out, done.err
        digest: dict[str, object] = json.loads(done.out)
        return digest

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command as a user does, with these variables beside the usual ones."""
        process = subprocess.Popen(
            [*DTCTL, *arguments],
            cwd=self.folder,
            env={**self.env, **(env or {})},
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
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):  # not to its end: who has inherited it may live on
                assert stream is not None
                stream.close()


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
