"""A run with one node that lies, in many ways: its fault is named, limits hold, and nobody else is harmed."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.errors import DtctlError, TransportError
from dtctl.launch.cluster import ResolvedCluster, resolve_cluster
from dtctl.launch.control import deadlines, node_sessions
from dtctl.launch.control.controller import Result
from dtctl.launch.control.run import run_launch_job
from dtctl.launch.job_builder import CodePush, build_launch_job
from dtctl.launch.records.events import Event, NodeChanged
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter
from dtctl.spec.load import parse_spec
from dtctl.transport.base import Target
from dtctl.transport.local import LocalConnection, LocalStream
from tests.security import liar

SPEC = """
cluster: {transport: ssh, nodes: [{name: a, address: 127.0.0.1}, {name: b, address: 127.0.0.1}], slots: 1,
          workdir: ~/work, link_timeout_s: 10, python: PYTHON}
job: {script: t.py, kind: direct, grace_s: 1}
network: {rendezvous_address: 192.0.2.1}
"""
LONG = "import time\nprint('here', flush=True)\ntime.sleep(0.2)\n"


class HostileTransport:
    """This machine as two nodes with a home each, of which the second lies."""

    def __init__(self, homes: Path, lie: str) -> None:
        self.homes, self.lie = homes, lie
        self.made: list[LocalStream] = []

    def connect(self, target: Target) -> LocalConnection:
        lie = self.lie if target.name == "b" and self.lie in {**liar.LIES, **liar.DOCTOR} else None
        return HostileConnection(target, self.homes / target.name, lie, self.made)

    def bury(self) -> None:
        """End the liars, which do not end by themselves."""
        for stream in self.made:
            stream.close()
            if stream.exit_status(2.0) is None:
                stream._process.kill()
                stream.exit_status(10.0)


class HostileConnection(LocalConnection):
    def __init__(self, target: Target, home: Path, lie: str | None, made: list[LocalStream]) -> None:
        super().__init__(target)
        home.mkdir(mode=0o700, exist_ok=True)
        self.home, self.lie, self.made = home, lie, made

    def open(self, command: str) -> LocalStream:
        argv = ["/bin/sh", "-c", command] if self.lie is None else [sys.executable, liar.__file__, self.lie, command]
        self.made.append(self.start(["env", f"HOME={self.home}", *argv]))
        return self.made[-1]


class Run:
    """One launch, and all that it left behind."""

    def __init__(self, folder: Path, lie: str, *, script: str = LONG) -> None:
        project, self.events, self.lie = folder / "project", list[Event](), lie
        project.mkdir(mode=0o700)
        (folder / "homes").mkdir(mode=0o700)
        (project / "t.py").write_text(script)
        spec = parse_spec(SPEC.replace("PYTHON", sys.executable), source="dtctl.yaml", base_dir=project)
        code = CodePush(spec)
        found, transport = resolve_cluster(spec, start=False), HostileTransport(folder / "homes", lie)
        cluster = ResolvedCluster(nodes=found.nodes, targets=found.targets, make_transport=lambda: transport)
        job = replace(
            build_launch_job(spec, cluster, run="one", keep=False, code=code), token="0" * 32 + os.urandom(4).hex()
        )
        info = RunInfo(run="one", token=job.token, pid=1, started=0.0, spec="", command=[], detached=False)
        self.record = RunWriter.create(project, info)
        self.project = project
        self.signals: list[int] = []
        self.stops = lie.startswith("for ever")
        self.result: Result | None = None
        self.error: DtctlError | None = None
        ledger = Ledger(lambda: 0.0, begun=0.0)
        try:
            self.result = run_launch_job(job, self.record, emit=self.emit, signals=self.signals, ledger=ledger)
        except DtctlError as exc:
            self.error = exc
        finally:
            transport.bury()

    def emit(self, event: Event) -> None:
        if event.recorded:
            self.events.append(event)
        # A node that talks for ever is one whose job goes on, as far as anybody knows: somebody has to stop it.
        if self.stops and isinstance(event, NodeChanged) and (event.node, event.state) == ("a", "stopped"):
            # The second signal waits less; one flood is to be waited for as long as it takes.
            self.signals += [signal.SIGTERM] * (1 if self.lie.endswith("small messages") else 2)


def outside(folder: Path) -> set[str]:
    """Files that are in no place where a run may write."""
    allowed = ("project/.dtctl/", "homes/a/work/", "homes/b/work/")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return {path for path in found if not path.startswith(allowed)} - {"project/t.py"}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sessions, "START_SILENCE_S", 5.0)
    monkeypatch.setattr(node_sessions, "PUSH_SILENCE_S", 5.0)
    monkeypatch.setattr(deadlines, "START_LIMIT_S", 5.0)


@pytest.mark.parametrize("lie", liar.LIES)
def test_a_lie_is_the_fault_of_the_node_that_tells_it(tmp_path: Path, lie: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = Run(tmp_path, lie)
    if run.error is not None:
        assert isinstance(run.error, TransportError)
        assert run.error.node == "b"
        assert "bug" not in f"{run.error} {run.error.hint}"
    else:
        assert run.result is not None
        failure = run.result.first_failure
        assert failure is None or failure.node == "b", failure
        ends = "stopped" if run.stops and failure is None else "succeeded"
        assert (failure is None) == (run.result.status == ends)
        assert not any("bug" in str(event) for event in run.events)
    assert outside(tmp_path) == set()
    logs = list((run.record.folder / "logs").rglob("*.log"))
    assert {path.name for path in logs} <= {"rank-0.log", "rank-1.log", "agent.log"}
    assert len(run.events) < 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "more than 200 MiB"


def test_without_a_lie_all_is_well(tmp_path: Path) -> None:
    run = Run(tmp_path, "progress of garbage")
    assert run.error is None
    assert run.result is not None
    assert (run.result.status, run.result.left_behind) == ("succeeded", 0)
    assert outside(tmp_path) == set()


def test_what_belongs_to_the_other_node_is_not_believed(tmp_path: Path) -> None:
    run = Run(tmp_path, "metrics of the other node")
    assert run.result is not None
    assert run.result.status == "succeeded"
    assert not (run.record.folder / "metrics.jsonl").exists()
    assert json.loads((run.record.folder / "plan.json").read_text())["run"] == "one"
