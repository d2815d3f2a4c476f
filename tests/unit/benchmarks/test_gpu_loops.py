"""The benchmark for GPUs refuses to measure without one; tests/integration/test_gpu_checks.py runs its loops."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import gpu_loops

pytestmark = pytest.mark.torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_loops"])
    with pytest.raises(SystemExit) as ended:
        gpu_loops.main()
    assert "--sizes tiny --device cpu" in str(ended.value.code)
