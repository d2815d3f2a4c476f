"""A fault of each layer of the grammar, on hosts of its own, and what looks like one; the whole is in the benchmark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fault import grammar, scoring
from tests.fault.examining import needs_root

pytestmark = [pytest.mark.integration, needs_root]
BY_NAME = {fault.name: fault for fault in (*grammar.FAULTS, *grammar.PAIRS, *grammar.HARMLESS)}
KINDS = (
    "plan: network.interface docker0 on one node",
    "plan: rendezvous_address is a loopback address",
    "plan: several slots, no way of a node to itself, 0",
    "stream: stalls after 1.5 MB, out to one peer",
    "route: blackhole to one peer",
    "disk: 40 inodes",
    "cgroup: 120M of memory",
    "names: no localhost",
    "start-up file: limits open files",
    "sshd: no keys are read",
    "python: random.py beside the script",
    "pair: ports: outbound dropped, all + mtu: 9000 on one node",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_fault_is_named_with_its_place_and_a_fix(name: str, sandbox_env: dict[str, str]) -> None:
    fault = BY_NAME[name]
    row = scoring.score(fault, scoring.examine(fault))
    assert row["verdict"] == "right", json.dumps(row, indent=1)


@pytest.mark.parametrize("fault", grammar.HARMLESS[::4], ids=lambda fault: fault.name)
def test_what_only_looks_odd_is_no_fault(fault: grammar.Fault, sandbox_env: dict[str, str]) -> None:
    said = scoring.examine(fault)
    assert scoring.score(fault, said)["verdict"] == "right", json.dumps(said["findings"][:2], indent=1)


def test_every_fault_has_a_name_of_its_own_and_an_expectation() -> None:
    every = [*grammar.FAULTS, *grammar.PAIRS, *grammar.HARMLESS]
    assert len({fault.name for fault in every}) == len(every)
    for fault in (*grammar.FAULTS, *grammar.PAIRS):
        assert fault.expected, fault.name
        assert all(one.checks and one.nodes and one.fix for one in fault.expected), fault.name
    assert len(grammar.FAULTS) >= 150
    assert len(grammar.PAIRS) >= 50
    developed, held = grammar.of_half(held=False), grammar.of_half(held=True)
    assert {fault.name for fault in developed} & {fault.name for fault in held} == set()
    assert len(developed) + len(held) == len(grammar.FAULTS) + len(grammar.PAIRS)


RIGHT: dict[str, Any] = {"check": "bandwidth", "status": "warn", "nodes": ["node2"], "peers": ["node1"]}
RIGHT |= {"summary": "", "fix": "ethtool eth0"}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "right"),
        ({"nodes": ["node1"], "peers": ["node2"]}, "right"),
        ({"fix": "look at it"}, "partly"),
        ({"nodes": ["node3"], "peers": []}, "partly"),
        ({"nodes": ["node3"], "check": "mtu", "peers": []}, "wrong"),
        ({"nodes": ["node2"], "check": "mtu", "peers": []}, "missed"),
        (None, "missed"),
    ],
)
def test_the_scorer_asks_for_check_place_and_fix(changed: dict[str, Any] | None, verdict: str) -> None:
    expected = grammar.Expected(checks=("bandwidth",), nodes=("node1", "node2"), fix="ethtool", pair=True, fatal=False)
    fault = grammar.Fault(name="x", layer="x", expected=(expected,))
    findings = [] if changed is None else [{**RIGHT, **changed}]
    row = scoring.score(fault, {"ok": True, "findings": findings})
    assert (row["verdict"], row["can_train"]) == (verdict, False)
    deadly = grammar.Expected(checks=("mtu",), nodes=("node3",), fix="x")
    assert scoring.score(grammar.Fault(name="x", layer="x", expected=(deadly,)), {"ok": True, "findings": []})[
        "can_train"
    ]
