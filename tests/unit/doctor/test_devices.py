"""What the probe hears of tools that fail, do not end, or may not look; the tools are scripts on the PATH."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dtctl.doctor.probe import devices

ROW = "0, NVIDIA H100 80GB HBM3, 4, 81559, 550.54.15, 0"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH, of a machine with two GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(devices.node_facts, "nvidia_devices", lambda: ["nvidia0", "nvidia1"])
    return tmp_path


def look() -> dict[str, Any]:
    return devices.devices()


def at(seconds_ago: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S,000000+00:00", time.localtime(time.time() - seconds_ago))


def test_a_lost_gpu_is_told_of_with_the_rows_of_the_others(tools: Path) -> None:
    lost = "Unable to determine the device handle for GPU 0000:5E:00.0: GPU is lost.  Reboot the system to recover"
    program(tools, "nvidia-smi", f"echo '{ROW}'; echo '{lost}' >&2; exit 15")
    program(tools, "dmesg", f"echo '{at(60)} {XID}'")
    found = look()
    assert found["gpu"] == ROW
    assert found["gpu_error"].startswith("nvidia-smi ends with status 15: Unable to determine the device handle")
    assert (found["xid"].endswith(XID), found["xid_source"]) == (True, "dmesg")


def test_the_kernel_is_asked_although_nvidia_smi_says_nothing(tools: Path) -> None:
    program(tools, "nvidia-smi", "exit 255")
    program(tools, "dmesg", f"echo '{at(60)} {XID}'")
    assert look()["xid"].endswith(XID)


def test_a_call_that_does_not_end_is_told_of(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "SMI_LIMIT_S", 0.2)
    program(tools, "nvidia-smi", "while true; do /bin/sleep 1; done")
    assert look()["gpu_error"] == "nvidia-smi has not ended after 0.2 s"


def test_a_tool_that_is_not_there(tools: Path) -> None:
    assert "No such file" in look()["gpu_error"]


def test_the_journal_stands_in_for_a_dmesg_that_is_root_s_alone(tools: Path) -> None:
    program(tools, "nvidia-smi", f"echo '{ROW}'")
    program(tools, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    found = look()
    assert (found["xid"], found["xid_source"]) == ("", ""), "nobody has looked"
    program(tools, "journalctl", f"echo '{at(60)} node kernel: {XID}'")
    found = look()
    assert (found["xid"].endswith(XID), found["xid_source"]) == (True, "journalctl")


def test_old_messages_are_left_out(tools: Path) -> None:
    program(tools, "nvidia-smi", f"echo '{ROW}'")
    program(tools, "dmesg", f"echo '{at(devices.RECENT_S + 3600)} {XID}'; echo '{at(10)} something else'")
    found = look()
    assert (found["xid"], found["xid_source"]) == ("", "dmesg")
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    now = time.time()
    assert abs(devices.told_at(f"[{uptime_s - 5:.1f}] {XID}", now) - (now - 5)) < 2


def test_a_machine_without_gpus_is_asked_nothing(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.node_facts, "nvidia_devices", list)
    program(tools, "dmesg", "exit 1")
    assert not look()["gpu_error"]
