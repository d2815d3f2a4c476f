"""Peak rates of GPUs, against which the use that a run makes of them is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense peaks of one GPU, in units of 1e12 floating point operations per second."""

    half: float
    """bf16 and fp16 on tensor cores, without sparsity; of GPUs before 2020 fp16 alone."""
    single: float
    """fp32, without TF32."""
    source: str
    bf16: bool = True
    """True if tensor cores take bf16; else nothing is known of how fast it is."""
    parts: int = 7
    """Slices of its processors that MIG cuts it into."""


_NVIDIA: Final = "https://www.nvidia.com/en-us/data-center/"
_AMD: Final = "https://www.amd.com/en/products/accelerators/instinct/"

# A name is looked for in the device's name; the first that is found counts, so longer ones come first. Data sheets
# that give peaks with sparsity are halved.
PEAKS: Final[dict[str, Peak]] = {
    "GB300": Peak(2500.0, 80.0, _NVIDIA + "gb300-nvl72/ (a 72th)"),
    "GB200": Peak(2500.0, 80.0, _NVIDIA + "gb200-nvl72/ (a 72th)"),
    "B300": Peak(2250.0, 75.0, _NVIDIA + "hgx/ (an eighth of HGX B300)"),
    "B200": Peak(2250.0, 75.0, "https://www.nvidia.com/en-us/data-center/hgx/ (an eighth of HGX B200)"),
    "GH200": Peak(989.4, 67.0, _NVIDIA + "grace-hopper-superchip/"),
    "H200 NVL": Peak(835.5, 60.0, _NVIDIA + "h200/"),
    "H200": Peak(989.4, 67.0, _NVIDIA + "h200/"),
    "H100 NVL": Peak(835.0, 60.0, _NVIDIA + "h100/"),
    "H100 PCIe": Peak(756.0, 51.0, _NVIDIA + "h100/"),
    "H100": Peak(989.4, 67.0, _NVIDIA + "h100/"),
    "H800": Peak(989.4, 67.0, _NVIDIA + "h100/ (the same processors with slower links)"),
    "A800": Peak(312.0, 19.5, _NVIDIA + "a100/ (the same processors with slower links)"),
    "A100": Peak(312.0, 19.5, _NVIDIA + "a100/"),
    "A40": Peak(149.7, 37.4, _NVIDIA + "a40/"),
    "A30": Peak(165.0, 10.3, _NVIDIA + "products/a30-gpu/", parts=4),
    "A10": Peak(125.0, 31.2, _NVIDIA + "products/a10-gpu/"),
    "RTX 6000 Ada": Peak(364.2, 91.1, "https://www.nvidia.com/en-us/design-visualization/rtx-6000/"),
    "RTX A6000": Peak(154.8, 38.7, "https://www.nvidia.com/en-us/design-visualization/rtx-a6000/"),
    "RTX 4090": Peak(
        165.2, 82.6, "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
    ),
    "L40S": Peak(362.0, 91.6, _NVIDIA + "l40s/"),
    "L40": Peak(181.0, 90.5, _NVIDIA + "l40/"),
    "L4": Peak(121.0, 30.3, _NVIDIA + "l4/"),
    "V100": Peak(125.0, 15.7, _NVIDIA + "v100/ (SXM2)", bf16=False),
    "T4": Peak(65.0, 8.1, _NVIDIA + "tesla-t4/", bf16=False),
    "MI325X": Peak(1307.4, 163.4, _AMD + "mi300/mi325x.html"),
    "MI300X": Peak(1307.4, 163.4, _AMD + "mi300/mi300x.html"),
    "MI250X": Peak(191.5, 23.9, _AMD + "mi200/mi250x.html (one of its two dies, which is one device)"),
}


def peak_flops(name: str, precision: str) -> float | None:
    """Floating point operations per second that a device can do at most; None if it is not known.

    Args:
        name: of the device, as `torch.cuda.get_device_name` gives it.
        precision: fp32, tf32, bf16 or fp16.
    """
    words = re.split(r"[ /-]", name)
    peak = next((peak for known, peak in PEAKS.items() if all(word in words for word in known.split())), None)
    if peak is None or (precision == "bf16" and not peak.bf16):
        return None
    instance = re.search(r"MIG (\d)g\.", name)
    share = int(instance[1]) / peak.parts if instance else 1.0
    if precision == "tf32" and peak.bf16:  # both came with the same tensor cores, which take half as many of them
        return peak.half / 2 * 1e12 * share
    return (peak.single if precision in ("fp32", "tf32") else peak.half) * 1e12 * share
