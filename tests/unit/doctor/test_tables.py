"""What people see: nodes by layer, pairs that fail, and the bandwidth of every way when one is bad."""

from __future__ import annotations

import pytest

from dtctl.cli import output
from dtctl.cli.common.doctor_view import show_examination
from dtctl.doctor.examine import Examination
from dtctl.doctor.findings import Finding
from dtctl.doctor.node_report import NodeReport, find_good_ways
from dtctl.doctor.tables import build_node_table, build_pair_table, link_table, list_link_measurements
from dtctl.errors import ConnectError

OK = tuple(Finding(check=check, status="ok") for check in ("reach", "disk", "torch", "gpus", "mtu"))


def nodes() -> tuple[NodeReport, ...]:
    a, b = NodeReport(name="a", address="10.0.0.1"), NodeReport(name="b", address="10.0.0.2")
    a.answers = [{"node": "b", "kind": "data-0", "result": "ok"}, {"node": "b", "kind": "data-1", "result": "dropped"}]
    b.answers = [{"node": "a", "kind": "data-0", "result": "ok"}]
    b.measured = {
        "a": [{"mbit_s": 40.0, "rtt_ms": [0.1, 0.2], "sent": 500, "lost": 9}, {"mbit_s": 48.0, "rtt_ms": [0.2, 0.2]}]
    }
    return a, b


def test_layers_that_were_not_examined_are_told_from_those_that_are_well() -> None:
    bad = Finding(check="disk", status="warn", nodes=("b",))
    header, rows = build_node_table(Examination(findings=(bad, *OK), seen=nodes()))
    assert header[2:] == ["REACH", "LIMITS", "SOFTWARE", "HARDWARE", "NETWORK", "SETTINGS", "TORCH"]
    assert rows == [
        ["a", "10.0.0.1", "ok", "ok", "ok", "ok", "ok", "-", "-"],
        ["b", "10.0.0.2", "ok", "warn", "ok", "ok", "ok", "-", "-"],
    ]


def test_of_a_node_that_is_away_only_that_is_known() -> None:
    a, b = nodes()
    b.error = ConnectError("no route", node="b")
    away = Finding(check="reach", status="fail", nodes=("b",))
    _, rows = build_node_table(Examination(findings=(away, *OK), seen=(a, b)))
    assert rows[1] == ["b", "10.0.0.2", "fail", "-", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize(("columns", "shown"), [(80, False), (100, True)])
def test_the_table_of_nodes_fits_the_terminal(
    columns: int, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "count_output_columns", lambda: columns)
    show_examination(Examination(findings=OK, seen=(NodeReport(name="localhost", address="127.0.0.1"),)), 1.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("NODE", "localhost"))]
    assert len(lines) == 2
    assert max(map(len, lines)) <= columns
    assert ("127.0.0.1" in lines[1]) == shown


def test_the_worst_answer_of_a_way_is_shown_and_only_good_ways_are_measured() -> None:
    done = Examination(findings=OK, seen=nodes())
    assert build_pair_table(done) == (["FROM \\ TO", "a", "b"], [["a", "", "DROP"], ["b", ".", ""]])
    assert find_good_ways(done.seen) == {("b", "a")}


def test_the_better_of_two_measurements_counts_and_the_map_is_shown_when_a_link_is_bad() -> None:
    slow = Finding(check="bandwidth", status="fail", nodes=("b",))
    assert list_link_measurements(nodes()) == [
        {"from": "b", "to": "a", "rtt_ms": 0.2, "mbit_s": 48.0, "sent": None, "lost": None}
    ]
    assert link_table(Examination(findings=OK, seen=nodes())) is None
    assert link_table(Examination(findings=(slow, *OK), seen=nodes())) == (
        ["FROM \\ TO", "a", "b"],
        [["a", "", "?"], ["b", "48 Mbit/s", ""]],
    )


def test_the_last_line_says_which_nodes_are_to_be_mended(capsys: pytest.CaptureFixture[str]) -> None:
    on_b = Finding(check="disk", status="fail", nodes=("b",))
    follows = Finding(check="workdir", status="fail", nodes=("a",), follows="disk")
    everywhere = Finding(check="collective", status="fail", nodes=("a", "b"))

    def last(*findings: Finding, seen: tuple[NodeReport, ...]) -> str:
        show_examination(Examination(findings=findings, seen=seen), 1.0)
        return capsys.readouterr().out.strip().splitlines()[-2]

    assert "until b is fixed" in last(on_b, follows, seen=nodes())
    assert "until" not in last(on_b, everywhere, seen=nodes())
    assert last(on_b, seen=nodes()[1:]).startswith("1 node cannot train in its")
