"""What the kernel knows about the end of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.supervisor import exit_cause
from dtctl.supervisor.exit_cause import OomCounters, describe_full_disk


def machine(root: Path, *, cgroup: int, vmstat: int) -> str:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/job/x\n")
    folder = root / "sys/fs/cgroup/job/x"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {cgroup}\n")
    (root / "proc/vmstat").write_text(f"nr_free_pages 7\noom_kill {vmstat}\n")
    return str(root)


def test_who_was_killed_by_somebody_is_no_matter_of_memory(tmp_path: Path) -> None:
    memory = OomCounters(machine(tmp_path, cgroup=2, vmstat=5))
    assert memory.reason(11) == ""


def test_a_counter_that_has_risen_names_the_lack_of_memory(tmp_path: Path) -> None:
    memory = OomCounters(machine(tmp_path, cgroup=2, vmstat=5))
    machine(tmp_path, cgroup=3, vmstat=6)
    assert memory.reason(11).endswith("killed it for lack of memory: oom_kill of its cgroup went from 2 to 3")


def test_what_was_killed_elsewhere_on_the_machine_is_no_evidence(tmp_path: Path) -> None:
    memory = OomCounters(machine(tmp_path, cgroup=2, vmstat=5))
    machine(tmp_path, cgroup=2, vmstat=6)
    assert memory.reason(11) == ""
    (tmp_path / "sys/fs/cgroup/job/x/memory.events").unlink()
    machine_only = OomCounters(str(tmp_path))
    (tmp_path / "proc/vmstat").write_text("oom_kill 9\n")
    assert machine_only.reason(11) == "", "no counter of its own: nothing is known"


def test_the_kernels_log_names_the_process(tmp_path: Path) -> None:
    memory = OomCounters(machine(tmp_path, cgroup=0, vmstat=0))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text("6,1,2,-;Out of memory: Killed process 11 (python) total-vm:9kB\n")
    assert (
        memory.reason(11)
        == "the kernel killed it for lack of memory: Out of memory: Killed process 11 (python) total-vm:9kB"
    )
    assert memory.reason(1) == ""


def test_a_disk_with_space_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_full_disk(str(tmp_path)) == ""
    assert describe_full_disk("/proc") == "", "which has no blocks at all"
    assert describe_full_disk(str(tmp_path / "none")) == ""
    monkeypatch.setattr(exit_cause, "FULL_BYTES", 1 << 60)
    assert describe_full_disk(str(tmp_path)) == f"the disk of {tmp_path} is full"
