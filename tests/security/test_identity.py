"""`stop` and `sweep` end the process that was meant, whoever has its number now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.errors import SandboxError
from dtctl.launch.records.record import RunInfo, RunRecord
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import is_launcher_alive
from dtctl.launch.stop import request_launcher_stop
from dtctl.node_facts import read_boot_id, start_ticks
from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import SandboxNode
from dtctl.supervisor import processes


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def record(folder: Path, pid: int, **facts: object) -> RunRecord:
    info = {"run": "one", "token": "x", "pid": pid, "started": 1.0, "spec": "", "command": [], "detached": True}
    return RunWriter.create(folder, RunInfo(**{**info, **facts}))  # type: ignore[arg-type]


def sweep(folder: Path) -> None:
    """In a process of its own, whose children are ended by it."""
    code = (
        "import json, sys\nfrom dtctl.supervisor import setup\n"
        "from dtctl.supervisor.messages.setup import EndOrphanedRun\n"
        "setup.sweep_run(sys.argv[1], EndOrphanedRun(**json.loads(sys.argv[2])))"
    )
    asked = json.dumps({"run": "run", "token": "f" * 32, "grace_s": 0.0})
    subprocess.run([sys.executable, "-c", code, str(folder), asked], check=True)


STRANGERS: dict[str, dict[str, object]] = {
    "no start": {},
    "its start, of no boot": {"pid_started": 1},
    "its start, of another boot": {"pid_started": 1, "boot": "0"},
    "all of it": {"pid_started": 1, "boot": 1},
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_record_that_names_a_strangers_process_ends_it_not(
    tmp_path: Path, victim: subprocess.Popen[bytes], kind: str
) -> None:
    facts = dict(STRANGERS[kind])
    if "pid_started" in facts:
        facts["pid_started"] = start_ticks(victim.pid)
    if facts.get("boot") == 1:
        facts["boot"] = read_boot_id()
    assert not request_launcher_stop(record(tmp_path, victim.pid, **facts), wait_s=1.0)
    assert victim.poll() is None


@pytest.mark.parametrize("pid", [0, -1, -12345, 1, 2**31])
def test_numbers_that_mean_many_processes_mean_none(tmp_path: Path, pid: int) -> None:
    info = record(tmp_path, pid, pid_started=start_ticks(1), boot="").info()
    assert not is_launcher_alive(info)


def test_a_launcher_is_known_by_start_and_boot(tmp_path: Path) -> None:
    own = {"pid_started": start_ticks(os.getpid()), "boot": read_boot_id()}
    assert is_launcher_alive(record(tmp_path, os.getpid(), **own).info())


@pytest.mark.parametrize("identity", [None, "", "0 1", 7])
def test_a_sweep_ends_no_process_that_has_a_supervisors_number(
    tmp_path: Path, victim: subprocess.Popen[bytes], identity: object
) -> None:
    facts = {"pid": victim.pid, "token": "f" * 32}
    told = facts if identity is None else {**facts, "identity": identity}
    (tmp_path / "supervisor.json").write_text(json.dumps(told))
    sweep(tmp_path)
    assert victim.poll() is None
    (tmp_path / "supervisor.json").write_text(
        json.dumps({**facts, "identity": processes.read_process_identity(victim.pid)})
    )
    sweep(tmp_path)
    assert victim.wait(60) == -15


@pytest.mark.parametrize("off_by", [1, -1, 10**9])
def test_a_host_whose_number_another_process_has_is_off(victim: subprocess.Popen[bytes], off_by: int) -> None:
    started = start_ticks(victim.pid)
    node = SandboxNode(name="node1", address="10.0.0.1", index=1, pid=victim.pid, started=started + off_by)
    assert not control.is_host_running(node)
    assert control.list_host_processes(node) == {}
    with pytest.raises(SandboxError):
        faults.freeze_host(node)
    assert victim.poll() is None
    assert control.is_host_running(replace(node, started=started))
