"""Pictures that are drawn from dtctl's own arithmetic are those that it draws today."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from dtctl.train.mesh import Coordinate, resolve_degrees

ROOT = Path(__file__).resolve().parent.parent.parent


def test_meshes_and_what_workers_hold_are_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    meshes = importlib.import_module("meshes")
    try:
        for draw in (meshes.mesh, meshes.strategies):
            for theme in meshes.THEMES:
                committed = (meshes.PICTURES / f"{draw.__name__}.{theme}.svg").read_text(encoding="utf-8")
                assert meshes.drawn(draw, theme) == committed, "run docs/meshes.py"
        for name, strategy in meshes.STRATEGIES.items():
            degrees = resolve_degrees(strategy, workers=4, per_node=2)
            for what in meshes.HELD:
                copies = [0] * 4
                for rank in range(4):
                    for part in meshes.holds(Coordinate(degrees=degrees, rank=rank), what, divided=name == "zero1"):
                        copies[part] += 1
                divided = name == "zero1" and what == "optimizer"
                assert copies == [1 if divided else degrees.dp] * 4, (name, what)
    finally:
        sys.modules.pop("meshes")
