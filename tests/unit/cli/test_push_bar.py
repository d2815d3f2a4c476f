"""The bar of a push, in a terminal of 80 columns and elsewhere."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from dtctl.cli.common.run_display import LaunchView
from dtctl.launch.records.events import NodeChanged, PushAdvanced

PART = PushAdvanced(nodes=320, nodes_done=128, bytes=1_000 << 20, of=2_047 << 20, bytes_per_s=1e9)
WHOLE = PushAdvanced(nodes=320, nodes_done=320, bytes=2_047 << 20, of=2_047 << 20, bytes_per_s=1e9)
TEXT = "1000.0 MiB of 2.0 GiB, 128 of 320 nodes, 953.7 MiB/s"


def lines_of(view: LaunchView) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(view._build_node_table())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_it_is_one_line_above_the_nodes_until_all_have_everything() -> None:
    view = LaunchView(json_lines=False)
    view.expect(["a", "b"])
    before = lines_of(view)
    view.event(NodeChanged(node="a", state="pushing"))
    view.event(PART)
    bar, *nodes = lines_of(view)
    assert bar.endswith(TEXT)
    assert len(bar) <= 80
    assert len(nodes) == len(before)
    view.event(WHOLE)
    assert len(lines_of(view)) == len(before)


def test_elsewhere_it_is_a_line_every_five_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    view, begun = LaunchView(json_lines=False), time.monotonic()
    for tenths in range(0, 120, 5):
        monkeypatch.setattr(time, "monotonic", lambda now=begun + tenths / 10: now)
        view.event(PART)
    assert capsys.readouterr() == ("", f"  files: {TEXT}\n" * 2)


def test_json_is_all_there_is_for_programs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    view = LaunchView(json_lines=True)
    monkeypatch.setattr(LaunchView, "PUSH_LINE_S", 0.0)
    view.event(PART)
    assert capsys.readouterr() == ("", "")
