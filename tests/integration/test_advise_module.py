"""Models that `dtctl advise` builds on the meta device, under the Python of the job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dtctl.advise.gather import inspect_model_factory
from dtctl.errors import UsageError
from tests.facts import raises


@pytest.mark.slow
@pytest.mark.torch
def test_a_module_is_built_on_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.table = nn.Embedding(1000, 64)\n"
        "        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(),\n"
        "            nn.Linear(256, 64)) for _ in range(6))\n        self.head = nn.Linear(64, 1000, bias=False)\n"
        "    def forward(self, x):\n        x = self.table(x)\n        for block in self.blocks:\n"
        "            x = x + block(x)\n        return self.head(x)\n"
        "def broken():\n    raise RuntimeError('no such weights')\n"
        "def number():\n    return 3\n"
        "def odd():\n    return nn.Conv2d(3, 4, 5)\n"
        "def told():\n    return nn.Conv2d(3, 4, 5), (torch.zeros(1, 3, 8, 8, device='meta'),)\n"
    )
    found = inspect_model_factory("mine:Net", seq=128, python=sys.executable)
    block = 64 * 2 + 64 * 256 + 256 + 256 * 64 + 64
    assert (found["params"], found["layers"], found["block_params"]) == (2 * 64_000 + 6 * block, 6, block)
    assert (found["vocab"], found["seq"], found["looked_up"]) == (1000, 128, 64_000)
    # For each block, fp32: input and output of the norm (64 each), 256 before and after GELU, statistics.
    assert found["kept_bytes"] / 6 / 128 / 4 == pytest.approx(64 * 2 + 256 * 2 + 2, rel=0.1)
    assert inspect_model_factory("mine:told", seq=8, python=sys.executable)["params"] == 4 * 3 * 25 + 4
    for name, text in (
        ("mine:broken", "cannot be built on the meta device: RuntimeError: no such weights"),
        ("mine:number", "returns int, and not a model"),
        ("mine:odd", "forward pass cannot be run"),
        ("mine:nothing", "has no nothing"),
        ("nowhere:x", "cannot be imported"),
        ("mine", "is not MODULE:FACTORY"),
    ):
        with pytest.raises(UsageError, match=text):
            inspect_model_factory(name, seq=8, python=sys.executable)
    with raises(UsageError, "run"):
        inspect_model_factory("mine:Net", seq=8, python=str(tmp_path / "no-python"))
