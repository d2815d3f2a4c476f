"""What the probe hears of tools that fail, do not end, or may not look; the tools are scripts on the PATH."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dtctl.supervisor.probe import amd as amd_probe
from dtctl.supervisor.probe import devices

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
    monkeypatch.setattr(devices.node_facts, "list_nvidia_devices", lambda: ["nvidia0", "nvidia1"])
    monkeypatch.setattr(devices.node_facts, "list_amd_devices", list)
    return tmp_path


def look() -> dict[str, Any]:
    return devices.gather_device_facts()


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
    assert abs(devices.parse_line_time(f"[{uptime_s - 5:.1f}] {XID}", now) - (now - 5)) < 2


def test_a_machine_without_gpus_is_asked_nothing(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.node_facts, "list_nvidia_devices", list)
    program(tools, "dmesg", "exit 1")
    assert not look()["gpu_error"]
    found = look()
    assert (found["vendor"], found["gpus"], found["xid_source"]) == ("", 0, "")


ROCM = """{
  "card0": {"VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297721856",
            "Card Series": "AMD Instinct MI300X", "Card Model": "0x74a1", "Card Vendor": "AMD/ATI"},
  "card1": {"VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "N/A", "Card series": "MI300X, OAM"},
  "system": {"Driver version": "6.7.0"}
}"""
"""As of rocm-smi 6; older ones write `Card series`."""


@pytest.fixture
def amd(tools: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same machine with two GPUs of AMD, where NVIDIA's tool leaves a mark when it is asked."""
    monkeypatch.setattr(devices.node_facts, "list_nvidia_devices", list)
    monkeypatch.setattr(devices.node_facts, "list_amd_devices", lambda: ["renderD128", "renderD129"])
    program(tools, "nvidia-smi", f": > {tools}/asked-in-vain")
    return tools


def test_gpus_of_amd_are_asked_of_rocm_smi(amd: Path) -> None:
    (amd / "said.json").write_text(ROCM + "\n")
    program(amd, "rocm-smi", f'while read -r line; do echo "$line"; done < {amd}/said.json')
    program(amd, "dmesg", f"echo '{at(60)} amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!'; echo '{at(60)} amdgpu: ok'")
    found = look()
    assert (found["vendor"], found["gpus"], found["gpu_error"]) == ("amd", 2, "")
    assert found["gpu"].splitlines() == [
        "0, AMD Instinct MI300X, 283, 196592, 6.7.0, [N/A]",
        "1, MI300X  OAM, [N/A], 196592, 6.7.0, [N/A]",
    ]
    assert found["xid"].endswith("GPU reset begin!")
    assert not (amd / "asked-in-vain").exists()


def test_a_rocm_smi_that_is_not_there_or_talks_nonsense(amd: Path) -> None:
    assert "No such file" in look()["gpu_error"]
    for text in ("not json", "[]", "{}", '{"card0": {}}'):
        program(amd, "rocm-smi", f"echo '{text}'")
        found = look()
        assert (found["gpu_error"], found["gpu"] in ("", "0, AMD GPU, [N/A], [N/A], , [N/A]")) == ("", True)


STATIC = """{"gpu_data": [
  {"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002"}, "driver": {"version": "6.14.14"}},
  {"gpu": 1, "asic": {"market_name": "N/A, OAM"}, "driver": {"driver_version": "6.14.14"}}]}"""
"""As of amd-smi of ROCm 7; before 6.4 the list stood by itself."""
METRIC = """[{"gpu": 1, "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": "N/A"}},
  {"gpu": 0, "mem_usage": {"total_vram": {"value": 196592}, "used_vram": {"value": 284, "unit": "MB"}}}]"""


def amd_smi(folder: Path, static: str, metric: str) -> None:
    (folder / "static").write_text(static + "\n")
    (folder / "metric").write_text(metric + "\n")
    program(folder, "amd-smi", f'while read -r line; do echo "$line"; done < {folder}/$1')


def test_gpus_of_amd_are_asked_of_amd_smi_where_it_is_there(amd: Path) -> None:
    amd_smi(amd, STATIC, METRIC)
    program(amd, "rocm-smi", f": > {amd}/asked-in-vain")
    found = look()
    assert (found["gpu_error"], found["gpu"].splitlines()) == (
        "",
        [
            "0, AMD Instinct MI300X, 284, 196592, 6.14.14, [N/A]",
            "1, N/A  OAM, [N/A], 196592, 6.14.14, [N/A]",
        ],
    )
    assert not (amd / "asked-in-vain").exists()


def test_an_amd_smi_that_fails_leaves_it_to_rocm_smi(amd: Path) -> None:
    program(amd, "amd-smi", "echo 'ModuleNotFoundError: amdsmi' >&2; exit 1")
    assert look()["gpu_error"] == "amd-smi ends with status 1: ModuleNotFoundError: amdsmi"
    (amd / "said.json").write_text(ROCM + "\n")
    program(amd, "rocm-smi", f'while read -r line; do echo "$line"; done < {amd}/said.json')
    found = look()
    assert (found["gpu_error"], len(found["gpu"].splitlines())) == ("", 2)


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", "[1, null]", '{"gpu_data": 3}', '[{"asic": 1, "driver": []}]']
)
def test_what_amd_smi_says_may_be_anything(amd: Path, text: str) -> None:
    amd_smi(amd, text, text)
    found = look()
    assert found["gpu"] in ("", ", AMD GPU, [N/A], [N/A], , [N/A]")


def test_how_gpus_of_amd_are_set_up_is_read_from_the_files_of_their_driver(
    amd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amd_probe, "DRM", str(amd / "drm"))
    own = amd / "drm" / "renderD128" / "device"
    for name, text in {
        "hwmon/hwmon3/power1_cap": "550000000", "hwmon/hwmon3/power1_cap_default": "750000000",
        "power_dpm_force_performance_level": "low", "current_link_width": "8", "max_link_width": "16",
        "ras/umc_err_count": "ue: 2\nce: 7",
    }.items():  # fmt: skip
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text + "\n")
    amd_smi(amd, STATIC, METRIC)
    found = look()
    first, second = found["state"].splitlines()
    assert first == "0, [N/A], 550.00, 750.00, low, 8, 16, [N/A], [N/A]"
    assert second == "1, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]", "there are no such files"
    assert [row.rpartition(", ")[2] for row in found["gpu"].splitlines()] == ["2", "[N/A]"]
