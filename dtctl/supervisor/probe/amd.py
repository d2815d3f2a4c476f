"""Facts of AMD's tools and the kernel about AMD's GPUs, in nvidia-smi's columns. Stdlib only, Python 3.8.

Names and memory come from amd-smi, or from rocm-smi where only that is installed; how a GPU is set up comes from the
files of its driver, which are there without any tool.
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


def rows(devices: list, ask: object) -> tuple:  # type: ignore[type-arg]
    """Index, name, MiB used, MiB in all, driver and uncorrected errors, a line for each GPU; and why there are none.

    Args:
        devices: names of the device files, in the order of the GPUs.
        ask: runs a program; what it printed, and why it has failed.
    """
    gpus, error = [], ""
    if shutil.which("amd-smi"):
        said, error = ask(_STATIC)  # type: ignore[operator]
        gpus = of_amd_smi(said, ask(_METRIC)[0]) if not error else []  # type: ignore[operator]
    if not gpus and (shutil.which("rocm-smi") or not error):
        said, failed = ask(_ROCM)  # type: ignore[operator]
        gpus, error = of_rocm_smi(said), failed if failed or not error else ""
    errors = [uncorrected(device) for device in devices]
    return "\n".join(
        ", ".join([*row, errors[at] if at < len(errors) else UNKNOWN]) for at, row in enumerate(gpus)
    ), error


def of_amd_smi(static: str, metric: str) -> list:  # type: ignore[type-arg]
    """Index, name, MiB used, MiB in all and driver of each GPU, from amd-smi's JSON of ROCm 6 and 7."""
    used = {one.get("gpu"): one.get("mem_usage") for one in _listed(metric)}
    gpus = []
    for one in _listed(static):
        driver, memory = _part(one.get("driver")), _part(used.get(one.get("gpu")))
        name = _text(_part(one.get("asic")).get("market_name")) or "AMD GPU"
        mib = [_number(memory.get(kind)) for kind in ("used_vram", "total_vram")]
        version = _text(driver.get("version") or driver.get("driver_version"))
        gpus.append([_text(one.get("gpu")), name, mib[0], mib[1], version])
    return gpus


def _listed(text: str) -> list:  # type: ignore[type-arg]
    """Return the objects of GPUs in amd-smi's output: a list, which is inside of an object since ROCm 6.4."""
    try:
        told = json.loads(text)
    except ValueError:
        return []
    told = told.get("gpu_data") if isinstance(told, dict) else told
    return [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []


def _part(value: object) -> dict:  # type: ignore[type-arg]
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return str(value).replace(",", " ") if isinstance(value, (str, int)) else ""


def _number(value: object) -> str:
    """Return the number of `{"value": 283, "unit": "MB"}`, or a plain one; AMD's MB are MiB."""
    text = _text(_part(value).get("value") if isinstance(value, dict) else value)
    return text if text.isdigit() else UNKNOWN


def of_rocm_smi(text: str) -> list:  # type: ignore[type-arg]
    """Return the same from rocm-smi's JSON."""
    try:
        cards = json.loads(text)
        driver = str(cards.get("system", {}).get("Driver version", ""))
    except (ValueError, AttributeError):
        return []
    gpus = []
    for card in sorted(name for name in cards if name.startswith("card") and name[4:].isdigit()):
        told = {str(name).lower(): str(value).replace(",", " ") for name, value in _part(cards[card]).items()}
        name = told.get("card series") or told.get("card model") or "AMD GPU"
        memory = [told.get("vram total used memory (b)", ""), told.get("vram total memory (b)", "")]
        mib = [str(int(size) >> 20) if size.isdigit() else UNKNOWN for size in memory]
        gpus.append([card[4:], name, mib[0], mib[1], driver])
    return gpus


def state(devices: list) -> str:  # type: ignore[type-arg]
    """Return how each GPU is set up, a line each in the columns of the query of nvidia-smi.

    The column of NVIDIA's clock reasons has the performance level that is set in the driver (`auto`, `low`, `manual`).
    Power limits are in W.
    """
    lines = []
    for index, device in enumerate(devices):
        caps = [_watts(device, name) for name in ("power1_cap", "power1_cap_default")]
        told = [_said(device, name) for name in ("power_dpm_force_performance_level", "current_link_width",
                                                 "max_link_width")]  # fmt: skip
        lines.append(", ".join([str(index), UNKNOWN, *caps, *(text or UNKNOWN for text in told), UNKNOWN, UNKNOWN]))
    return "\n".join(lines)


def uncorrected(device: str) -> str:
    """Return how many errors of a GPU's memory could not be corrected since it was reset."""
    words = _said(device, "ras/umc_err_count").split()
    return words[1] if words[:1] == ["ue:"] and len(words) > 1 and words[1].isdigit() else UNKNOWN


def _watts(device: str, name: str) -> str:
    for path in sorted(glob.glob(os.path.join(DRM, device, "device/hwmon/hwmon*", name))):
        text = node_facts.read(path).strip()
        if text.isdigit():
            return "%.2f" % (int(text) / 1e6)
    return UNKNOWN


def _said(device: str, name: str) -> str:
    return " ".join(node_facts.read(os.path.join(DRM, device, "device", name)).replace(",", " ").split())
