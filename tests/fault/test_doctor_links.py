"""Slow and lossy links, found by the doctor's own measurements, which agree with iperf3."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.fault.examining import bad, examine, expect, note, on

pytestmark = pytest.mark.integration


def test_a_node_whose_cable_is_slow(sandbox: Sandbox, project: Any) -> None:
    faults.limit_bandwidth(sandbox, sandbox.node("node2"), rate="200mbit")
    note(sandbox)
    expect(examine(project), "bandwidth", ["node2"], peers=["node1", "node3"], status="warn", said="Mbit/s")


def test_one_pair_whose_way_is_slow(sandbox: Sandbox, project: Any) -> None:
    faults.limit_bandwidth(sandbox, sandbox.node("node1"), rate="200mbit", peer=sandbox.node("node3"))
    note(sandbox)
    code, said = examine(project)
    (first,) = bad(said)
    assert (code, first["check"], first["primary"]) == (0, "bandwidth", True)
    assert sorted([*first["nodes"], *first["peers"]]) == ["node1", "node3"]
    assert "node2" not in json.dumps(first)


def test_a_node_that_loses_packets(sandbox: Sandbox, project: Any) -> None:
    faults.drop_packets(sandbox, sandbox.node("node3"), percent=2)
    note(sandbox)
    expect(examine(project), "packet-loss", ["node3"], peers=["node1", "node2"], status="warn", said="ethtool -S")


def test_a_pair_that_loses_packets_one_way(sandbox: Sandbox, project: Any) -> None:
    faults.drop_packets(sandbox, sandbox.node("node2"), percent=3, source=sandbox.node("node1"))
    note(sandbox)
    expect(examine(project), "packet-loss", ["node2"], peers=["node1"], status="warn", said="node1 -> node2")


@pytest.mark.slow
def test_people_see_the_bandwidth_of_every_way_when_one_is_slow(sandbox: Sandbox, project: Any) -> None:
    faults.limit_bandwidth(sandbox, sandbox.node("node2"), rate="50mbit")
    note(sandbox)
    examine(project, None, "--quick")
    done = project.run("doctor")
    assert done.code == 0
    assert "warn: bandwidth: node2" in done.out
    assert done.out.count("48 Mbit/s") >= 4
    assert not missing(done.err, "round 3")


def iperf3(sandbox: Sandbox, caller: str, called: str) -> float:
    """Mbit/s of payload that iperf3 finds."""
    argv = [
        *faults._build_nsenter_argv(sandbox, sandbox.node(called)),
        "iperf3",
        "-s",
        "-1",
        "-p",
        "5301",
        "--forceflush",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            assert server.poll() is None
        address = sandbox.node(called).address
        said = json.loads(on(sandbox, caller, "iperf3", "-c", address, "-p", "5301", "-t", "3", "-O", "1", "-J"))
        server.communicate()
    return float(said["end"]["sum_received"]["bits_per_second"]) / 1e6


@pytest.mark.parametrize(
    "rate", [pytest.param(50, marks=pytest.mark.slow), 200, pytest.param(800, marks=pytest.mark.slow)]
)
def test_the_bandwidth_agrees_with_iperf3_within_a_tenth(sandbox: Sandbox, project: Any, rate: int) -> None:
    faults.limit_bandwidth(sandbox, sandbox.node("node1"), rate=f"{rate}mbit")
    note(sandbox)
    directions = [("node1", "node2"), ("node2", "node1")]
    # A machine that does other things, too, makes iperf3 slower at times, and a slice of the doctor's slower or faster.
    found: dict[tuple[str, str], list[float]] = {way: [] for way in directions}
    known = dict.fromkeys(directions, 0.0)
    for _ in range(4):
        _, said = examine(project, {"cluster.nodes": ["node1", "node2"]})
        measured = {(link["from"], link["to"]): link["mbit_s"] for link in said["links"]}
        for way in directions:
            found[way].append(measured[way])
            known[way] = max(known[way], iperf3(sandbox, *way))
        agrees = {way: any(abs(rate / known[way] - 1) < 0.1 for rate in found[way]) for way in directions}
        if all(agrees.values()):
            break
    sys.stdout.write(f"doctor and iperf3, Mbit/s: {found}, {known}\n")
    assert all(agrees.values())
