"""That nodes can train is said only where everything that a launch needs was looked at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from dtctl.doctor import coverage
from dtctl.doctor.examine import Examination
from dtctl.doctor.findings import CHECKS, Finding, order_findings
from dtctl.doctor.node_report import NodeReport
from dtctl.doctor.tables import build_node_table
from dtctl.errors import ConnectError

FACTS: dict[str, Any] = {
    "job": {"python": "3.11.2", "torch": "2.13.0"}, "looked_up": {"a": ["10.0.0.1"], "localhost": ["127.0.0.1"]},
    "disk": {"total": 1 << 40}, "shm": {"total": 1 << 30}, "memory_limit": -1, "memory_free": 1 << 33,
    "addresses": ["10.0.0.1"], "gpus": 0, "xid_source": "", "gpu": "", "gpu_error": "", "rdma": [],
}  # fmt: skip
RAN = CHECKS


def cluster(count: int = 3) -> list[NodeReport]:
    """Nodes that have looked at everything."""
    names = [f"node{number + 1}" for number in range(count)]
    seen = []
    for name in names:
        one = NodeReport(name=name, address=f"10.0.0.{name[-1]}", facts=copy.deepcopy(FACTS))
        others = [other for other in names if other != name]
        one.ports = {"rendezvous": 20_001, "data-0": 40_000} if name == "node1" else {"data-0": 40_000}
        one.answers = [{"node": other, "port": 40_000, "kind": "data-0", "result": "ok"} for other in others]
        if name != "node1":
            one.answers.append({"node": "node1", "port": 20_001, "kind": "rendezvous", "result": "ok"})
        one.measured = {other: [{"mbit_s": 900.0, "sent": 100, "lost": 0}] for other in others}
        seen.append(one)
    return seen


def examined(seen: list[NodeReport], *found: Finding, **options: Any) -> Examination:
    options = {"skip": (), "ran": RAN, "rendezvous": True, **options}
    lost = list(coverage.find_unexamined_needs(seen, found=found, **options))
    return Examination(findings=tuple(order_findings(found, ran=options["ran"], unexamined=lost)), seen=tuple(seen))


def test_where_all_was_looked_at_nodes_can_train() -> None:
    done = examined(cluster())
    assert (done.ok, done.can_train) == (True, True)
    assert done.not_examined == (
        "no node shows a GPU",
        "no node has an InfiniBand or RoCE port",
        "the job's own code and data",
    )


def forget(*path: Any) -> Callable[[NodeReport], None]:
    *parents, last, value = path

    def change(node: NodeReport) -> None:
        place: Any = node.facts
        for parent in parents:
            place = place[parent]
        place[last] = value

    return change


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("python-environment", forget("job", {})),
        ("torch", forget("job", "torch", "unknown")),
        ("names", forget("looked_up", "localhost", None)),
        ("disk", forget("disk", "total", 0)),
        ("shm", forget("shm", "total", 0)),
        ("memory", forget("memory_free", -1)),
        ("duplicate-address", forget("addresses", [])),
        ("gpu-xid", lambda node: node.facts.update(gpus=8, gpu="0, H100, 1, 2, 3, 0")),
        ("gpu-ecc", lambda node: node.facts.update(gpus=8, xid_source="dmesg")),
        ("data-ports", lambda node: node.answers.clear()),
        ("rendezvous-port", lambda node: node.answers.pop()),
        ("bandwidth", lambda node: node.measured.clear()),
        ("bandwidth", lambda node: node.measured.update(node1=[{"error": "timed out"}])),
    ],
)
def test_what_was_not_looked_at_on_one_node_keeps_it_from_being_said(
    check: str, change: Callable[[NodeReport], None]
) -> None:
    seen = cluster()
    change(seen[1])
    done = examined(seen)
    assert (done.ok, done.can_train) == (True, None)
    missing = {one.check: one for one in done.findings if one.missing}
    assert check in missing
    assert "node2" in missing[check].nodes
    assert missing[check].summary in done.not_examined
    header, rows = build_node_table(done)
    assert "partly" in rows[1], header


def test_ports_that_could_not_be_opened_are_ways_that_nobody_has_gone() -> None:
    seen = cluster()
    for node in (seen[0], seen[2]):  # node2 listens nowhere
        node.answers = [one for one in node.answers if one["node"] != "node2"]
    (one,) = [one for one in examined(seen).findings if one.missing and one.check == "data-ports"]
    assert {*one.nodes} == {"node1", "node2", "node3"}
    assert "node1 to node2, node3 to node2" in one.summary


def test_what_was_left_out_on_purpose_is_not_examined_either() -> None:
    seen = cluster()
    for node in seen:
        node.measured = {}
    done = examined(seen, skip=("links", "collective"), ran=[one for one in CHECKS if one != "collective"])
    assert (done.ok, done.can_train) == (True, None)
    assert [row[-1] for row in build_node_table(done)[1]] == ["-", "-", "-"], "torch was not run"
    assert {"torch was not run", "bandwidth, loss and delay between nodes were left out"} <= {*done.not_examined}


def test_a_failure_says_more_than_what_it_kept_from_being_looked_at() -> None:
    seen = cluster()
    for node in seen:
        node.answers = [one for one in node.answers if "node2" not in (node.name, one["node"])]
    blocked = Finding(check="data-ports", status="fail", nodes=("node2",), peers=("node1", "node3"))
    done = examined(seen, blocked)
    assert done.can_train is False
    assert not [one for one in done.findings if one.missing and one.check == "data-ports"]


def test_a_node_that_is_away_is_a_failure_and_the_others_are_looked_at() -> None:
    seen = cluster()
    seen[0].error, seen[0].facts = ConnectError("no route", node="node1"), {}
    for node in seen[1:]:
        node.answers = [one for one in node.answers if one["node"] != "node1"]
    done = examined(seen, Finding(check="reach", status="fail", nodes=("node1",)), ran=("reach",))
    assert done.can_train is False
    missing = {one.check for one in done.findings if one.missing}
    assert missing == {"rendezvous-port", "rendezvous-address", "collective"}


def test_one_node_alone_has_no_ways() -> None:
    assert examined(cluster(1), ran=("reach",)).can_train is True
