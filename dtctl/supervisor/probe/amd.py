"""Facts of AMD's tools and the kernel about AMD's GPUs, in nvidia-smi's columns. Stdlib only, Python 3.8.

Names and memory come from amd-smi, or from rocm-smi if only that is installed; the settings of a GPU come from the
files of its driver, which need no tool.
"""

from __future__ import annotations

import glob
import json
import os
import shutil

from dtctl import node_facts

_STATIC = ["amd-smi", "static", "--asic", "--driver", "--json"]
_METRIC = ["amd-smi", "metric", "--mem-usage", "--json"]
_ROCM = ["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json"]
DRM = "/sys/class/drm"
UNKNOWN = "[N/A]"


def format_amd_gpu_rows(devices: list, ask: object) -> tuple:  # type: ignore[type-arg]
    """Return a line for each GPU (index, name, MiB used, MiB in total, driver, uncorrected errors), and an error text.

    Args:
        devices: names of the device files, in the order of the GPUs.
        ask: runs a program; returns its output, and the reason if it has failed.
    """
    gpus, error = [], ""
    if shutil.which("amd-smi"):
        said, error = ask(_STATIC)  # type: ignore[operator]
        gpus = parse_amd_smi(said, ask(_METRIC)[0]) if not error else []  # type: ignore[operator]
    if not gpus and (shutil.which("rocm-smi") or not error):
        said, failed = ask(_ROCM)  # type: ignore[operator]
        gpus, error = parse_rocm_smi(said), failed if failed or not error else ""
    errors = [read_uncorrected_errors(device) for device in devices]
    return "\n".join(
        ", ".join([*row, errors[at] if at < len(errors) else UNKNOWN]) for at, row in enumerate(gpus)
    ), error


def parse_amd_smi(static: str, metric: str) -> list:  # type: ignore[type-arg]
    """Return index, name, MiB used, MiB in total and driver of each GPU, from amd-smi's JSON of ROCm 6 and 7."""
    used = {one.get("gpu"): one.get("mem_usage") for one in _parse_gpu_objects(metric)}
    gpus = []
    for one in _parse_gpu_objects(static):
        driver, memory = _coerce_dict(one.get("driver")), _coerce_dict(used.get(one.get("gpu")))
        name = _format_csv_field(_coerce_dict(one.get("asic")).get("market_name")) or "AMD GPU"
        mib = [_format_number_field(memory.get(kind)) for kind in ("used_vram", "total_vram")]
        version = _format_csv_field(driver.get("version") or driver.get("driver_version"))
        gpus.append([_format_csv_field(one.get("gpu")), name, mib[0], mib[1], version])
    return gpus


def _parse_gpu_objects(text: str) -> list:  # type: ignore[type-arg]
    """Return the list of GPUs in amd-smi's output, which is inside of an object since ROCm 6.4."""
    try:
        told = json.loads(text)
    except ValueError:
        return []
    told = told.get("gpu_data") if isinstance(told, dict) else told
    return [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []


def _coerce_dict(value: object) -> dict:  # type: ignore[type-arg]
    return value if isinstance(value, dict) else {}


def _format_csv_field(value: object) -> str:
    return str(value).replace(",", " ") if isinstance(value, (str, int)) else ""


def _format_number_field(value: object) -> str:
    """Return the number in `{"value": 283, "unit": "MB"}`, or a plain number; AMD's MB are MiB."""
    text = _format_csv_field(_coerce_dict(value).get("value") if isinstance(value, dict) else value)
    return text if text.isdigit() else UNKNOWN


def parse_rocm_smi(text: str) -> list:  # type: ignore[type-arg]
    """Return the columns of `parse_amd_smi` from rocm-smi's JSON."""
    try:
        cards = json.loads(text)
        driver = str(cards.get("system", {}).get("Driver version", ""))
    except (ValueError, AttributeError):
        return []
    gpus = []
    for card in sorted(name for name in cards if name.startswith("card") and name[4:].isdigit()):
        told = {str(name).lower(): str(value).replace(",", " ") for name, value in _coerce_dict(cards[card]).items()}
        name = told.get("card series") or told.get("card model") or "AMD GPU"
        memory = [told.get("vram total used memory (b)", ""), told.get("vram total memory (b)", "")]
        mib = [str(int(size) >> 20) if size.isdigit() else UNKNOWN for size in memory]
        gpus.append([card[4:], name, mib[0], mib[1], driver])
    return gpus


def format_amd_gpu_state(devices: list) -> str:  # type: ignore[type-arg]
    """Return a line with the settings of each GPU, in the columns of the query of nvidia-smi.

    The column of NVIDIA's clock reasons has the performance level that is set in the driver (`auto`, `low`, `manual`).
    Power limits are in W.
    """
    lines = []
    for index, device in enumerate(devices):
        caps = [_read_power_watts(device, name) for name in ("power1_cap", "power1_cap_default")]
        told = [_read_device_file(device, name) for name in ("power_dpm_force_performance_level", "current_link_width",
                                                 "max_link_width")]  # fmt: skip
        lines.append(", ".join([str(index), UNKNOWN, *caps, *(text or UNKNOWN for text in told), UNKNOWN, UNKNOWN]))
    return "\n".join(lines)


def read_uncorrected_errors(device: str) -> str:
    """Return the number of a GPU's memory errors that could not be corrected since its last reset."""
    words = _read_device_file(device, "ras/umc_err_count").split()
    return words[1] if words[:1] == ["ue:"] and len(words) > 1 and words[1].isdigit() else UNKNOWN


def _read_power_watts(device: str, name: str) -> str:
    for path in sorted(glob.glob(os.path.join(DRM, device, "device/hwmon/hwmon*", name))):
        text = node_facts.read_system_file(path).strip()
        if text.isdigit():
            return "%.2f" % (int(text) / 1e6)
    return UNKNOWN


def _read_device_file(device: str, name: str) -> str:
    return " ".join(node_facts.read_system_file(os.path.join(DRM, device, "device", name)).replace(",", " ").split())
