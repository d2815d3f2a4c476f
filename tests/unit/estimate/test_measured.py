"""The formulas beside what tensors took on an H100 (check 16 of `make gpu`, whose result is kept)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtctl.advise.model import build_decoder_model
from dtctl.estimate.memory import GIB, ParallelLayout, estimate_layout_memory

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "benchmarks" / "results" / "gpu-20261127-0216.json"
SHAPES = {
    "124M": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072},
    "350M": {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096},
    "1B": {"layers": 18, "hidden": 2048, "heads": 16, "ffn": 8192},
    "3B": {"layers": 26, "hidden": 3072, "heads": 24, "ffn": 12288},
}
CASES = next(check for check in json.loads(KEPT.read_text())["checks"] if check["number"] == 16)["points"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"])
def test_tensors_take_what_is_predicted(case: dict[str, str]) -> None:
    name, precision = case["what"].split(", ")[0].split()
    mesh = {axis: int(size) for axis, size in re.findall(r"\b(dp|fsdp) (\d+)", case["what"])}
    micro_batch = int(case["what"].split()[-1])
    shape = {**SHAPES[name], "vocab": 50304, "seq": 1024}
    layout = ParallelLayout(**mesh, micro_batch=micro_batch, precision=precision)  # type: ignore[arg-type]
    found = re.search(r"([\d.]+) measured", case["found"])
    assert found
    predicted = estimate_layout_memory(build_decoder_model(**shape, tied=True), layout).tensors / GIB
    assert predicted == pytest.approx(float(found[1]), rel=0.15)
