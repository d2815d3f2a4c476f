"""Peak rates of GPUs, from which the utilization of a run is computed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """Dense peak rates of one GPU, in units of 1e12 floating point operations per second."""

    half: float
    """Peak in bf16 and fp16 on tensor cores, without sparsity; of GPUs before 2020 only in fp16."""
    single: float
    """Peak in fp32, without TF32."""
    source: str
    bf16: bool = True
    """True if tensor cores support bf16; otherwise its speed is unknown."""
    parts: int = 7
    """Number of slices into which MIG divides its processors."""


_NVIDIA: Final = "https://www.nvidia.com/en-us/data-center/"
_AMD: Final = "https://www.amd.com/en/products/accelerators/instinct/"

# The first key that occurs in the device's name is used, so longer keys come first. Peaks that data sheets give with
# sparsity are halved.
PEAKS: Final[dict[str, PeakFlops]] = {
    "GB300": PeakFlops(2500.0, 80.0, _NVIDIA + "gb300-nvl72/ (a 72th)"),
    "GB200": PeakFlops(2500.0, 80.0, _NVIDIA + "gb200-nvl72/ (a 72th)"),
    "B300": PeakFlops(2250.0, 75.0, _NVIDIA + "hgx/ (an eighth of HGX B300)"),
    "B200": PeakFlops(2250.0, 75.0, "https://www.nvidia.com/en-us/data-center/hgx/ (an eighth of HGX B200)"),
    "GH200": PeakFlops(989.4, 67.0, _NVIDIA + "grace-hopper-superchip/"),
    "H200 NVL": PeakFlops(835.5, 60.0, _NVIDIA + "h200/"),
    "H200": PeakFlops(989.4, 67.0, _NVIDIA + "h200/"),
    "H100 NVL": PeakFlops(835.0, 60.0, _NVIDIA + "h100/"),
    "H100 PCIe": PeakFlops(756.0, 51.0, _NVIDIA + "h100/"),
    "H100": PeakFlops(989.4, 67.0, _NVIDIA + "h100/"),
    "H800": PeakFlops(989.4, 67.0, _NVIDIA + "h100/ (the same processors with slower links)"),
    "A800": PeakFlops(312.0, 19.5, _NVIDIA + "a100/ (the same processors with slower links)"),
    "A100": PeakFlops(312.0, 19.5, _NVIDIA + "a100/"),
    "A40": PeakFlops(149.7, 37.4, _NVIDIA + "a40/"),
    "A30": PeakFlops(165.0, 10.3, _NVIDIA + "products/a30-gpu/", parts=4),
    "A10": PeakFlops(125.0, 31.2, _NVIDIA + "products/a10-gpu/"),
    "RTX 6000 Ada": PeakFlops(364.2, 91.1, "https://www.nvidia.com/en-us/design-visualization/rtx-6000/"),
    "RTX A6000": PeakFlops(154.8, 38.7, "https://www.nvidia.com/en-us/design-visualization/rtx-a6000/"),
    "RTX 4090": PeakFlops(
        165.2, 82.6, "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
    ),
    "L40S": PeakFlops(362.0, 91.6, _NVIDIA + "l40s/"),
    "L40": PeakFlops(181.0, 90.5, _NVIDIA + "l40/"),
    "L4": PeakFlops(121.0, 30.3, _NVIDIA + "l4/"),
    "V100": PeakFlops(125.0, 15.7, _NVIDIA + "v100/ (SXM2)", bf16=False),
    "T4": PeakFlops(65.0, 8.1, _NVIDIA + "tesla-t4/", bf16=False),
    "MI325X": PeakFlops(1307.4, 163.4, _AMD + "mi300/mi325x.html"),
    "MI300X": PeakFlops(1307.4, 163.4, _AMD + "mi300/mi300x.html"),
    "MI250X": PeakFlops(191.5, 23.9, _AMD + "mi200/mi250x.html (one of its two dies, which is one device)"),
}


def find_peak_flops(name: str, precision: str) -> float | None:
    """Return the largest number of floating point operations per second of a device; None if unknown.

    Args:
        name: name of the device from `torch.cuda.get_device_name`.
        precision: fp32, tf32, bf16 or fp16.
    """
    words = re.split(r"[ /-]", name)
    peak = next((peak for known, peak in PEAKS.items() if all(word in words for word in known.split())), None)
    if peak is None or (precision == "bf16" and not peak.bf16):
        return None
    instance = re.search(r"MIG (\d)g\.", name)
    share = int(instance[1]) / peak.parts if instance else 1.0
    # both formats came with the same tensor cores, which are half as fast in TF32
    if precision == "tf32" and peak.bf16:
        return peak.half / 2 * 1e12 * share
    return (peak.single if precision in ("fp32", "tf32") else peak.half) * 1e12 * share
