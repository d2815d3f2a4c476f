"""The pure parts of the checks: who is odd, whom to look at first, and what tools' outputs mean."""

from __future__ import annotations

import pytest

from dtctl.doctor.checks.environment import matches
from dtctl.doctor.checks.node import busy_gpus, dead_ports
from dtctl.doctor.findings import CHECKS, Finding, cover, odd_ones, ordered


@pytest.mark.parametrize(
    ("values", "odd", "usual"),
    [
        ({"a": 1, "b": 1, "c": 2}, ("c",), 1),
        ({"a": 1, "b": 1}, (), 1),
        ({"a": 1, "b": 2}, ("a", "b"), None),
        ({}, (), None),
    ],
)
def test_the_odd_node_out(values: dict[str, int], odd: tuple[str, ...], usual: int | None) -> None:
    assert odd_ones(values) == (odd, usual)


@pytest.mark.parametrize(
    ("pairs", "nodes"),
    [
        ([("a", "b")], ("b",)),
        ([("a", "b"), ("c", "b"), ("d", "b")], ("b",)),
        ([("a", "b"), ("a", "c"), ("a", "d")], ("a",)),
        ([("a", "b"), ("b", "a"), ("c", "b"), ("b", "c")], ("b",)),
        ([("a", "b"), ("c", "b"), ("a", "d"), ("c", "d")], ("b", "d")),
    ],
)
def test_few_machines_explain_all_failing_pairs(pairs: list[tuple[str, str]], nodes: tuple[str, ...]) -> None:
    assert cover(pairs) == nodes


def test_the_lower_layer_is_primary_and_its_consequences_say_so() -> None:
    nat = Finding(check="nat", status="fail", nodes=("a",))
    env = Finding(check="env-differs", status="fail", nodes=("a",))
    double = Finding(check="duplicate-address", status="fail", nodes=("a", "b"))
    warned = Finding(check="clock", status="warn", nodes=("a",))
    found = ordered([env, nat, warned, double], ran=["reach", "nat"])
    assert [one.check for one in found] == ["duplicate-address", "nat", "env-differs", "clock", "reach"]
    assert [one.primary for one in found] == [True, False, False, False, False]
    assert [one.follows for one in found] == ["", "duplicate-address", "", "", ""]
    assert found[-1].status == "ok"


def test_every_check_that_a_module_says_it_makes_is_known() -> None:
    from dtctl.doctor import collective
    from dtctl.doctor.checks import environment, links, network, node

    made = {*node.RAN_REACH, *node.RAN, *network.RAN, *links.RAN, *environment.RAN, *collective.RAN}
    assert made == set(CHECKS)


def test_busy_gpus_are_read_from_nvidia_smi() -> None:
    said = "0, NVIDIA H100 80GB HBM3, 4, 81559\n1, NVIDIA H100 80GB HBM3, 34000, 81559\n2, NVIDIA H100, [N/A], 81559"
    assert busy_gpus(said) == ["GPU 1 34000 of 81559 MiB"]
    assert busy_gpus("") == []


def test_an_rdma_port_is_dead_only_beside_living_ones() -> None:
    up = {"device": "mlx5_0", "port": "1", "state": "4: ACTIVE"}
    down = {"device": "mlx5_1", "port": "1", "state": "1: DOWN"}
    assert dead_ports([up, down]) == ["mlx5_1:1 1: DOWN"]
    assert dead_ports([down]) == []  # a node whose RDMA is not used at all


@pytest.mark.parametrize(
    ("value", "fits"),
    [("eth", True), ("eth0", True), ("=eth", False), ("=eth0", True), ("ib", False), ("eth0:0", True)],
)
def test_names_of_interfaces_are_matched_as_nccl_does(value: str, fits: bool) -> None:
    assert matches(value, value, ["lo", "eth0"]) is fits
