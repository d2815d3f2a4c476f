"""The pure parts of the checks: who is odd, whom to look at first, and what tools' outputs mean."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

from dtctl.doctor import examine
from dtctl.doctor.checks import network
from dtctl.doctor.checks import node as node_checks
from dtctl.doctor.checks.hardware import find_busy_gpus, find_dead_ports
from dtctl.doctor.findings import CHECKS, Finding, choose_covering_nodes, find_odd_nodes, order_findings
from dtctl.doctor.node_report import NodeReport
from dtctl.nccl.interfaces import choose_interface
from dtctl.spec.load import parse_spec
from tests.facts import missing


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
    assert find_odd_nodes(values) == (odd, usual)


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
    assert choose_covering_nodes(pairs) == nodes


def test_the_lower_layer_is_primary_and_its_consequences_say_so() -> None:
    nat = Finding(check="nat", status="fail", nodes=("a",))
    env = Finding(check="env-differs", status="fail", nodes=("a",))
    double = Finding(check="duplicate-address", status="fail", nodes=("a", "b"))
    warned = Finding(check="clock", status="warn", nodes=("a",))
    found = order_findings([env, nat, warned, double], ran=["reach", "nat"])
    assert [one.check for one in found] == ["duplicate-address", "nat", "env-differs", "clock", "reach"]
    assert [one.primary for one in found] == [True, False, False, False, False]
    assert [one.follows for one in found] == ["", "duplicate-address", "", "", ""]
    assert found[-1].status == "ok"


@pytest.mark.parametrize(
    ("slow", "peers", "primary"),
    [
        (("c",), ("a",), "packet-loss"),
        (("a",), ("c",), "packet-loss"),
        (("b",), ("a",), "bandwidth"),
        (("b", "c"), ("a",), "bandwidth"),
        (("a",), ("b", "c"), "bandwidth"),
    ],
)
def test_loss_is_the_cause_of_a_slow_link_where_it_is_on_all_of_it(
    slow: tuple[str, ...], peers: tuple[str, ...], primary: str
) -> None:
    found = order_findings(
        [
            Finding(check="bandwidth", status="fail", nodes=slow, peers=peers),
            Finding(check="packet-loss", status="warn", nodes=("c",), peers=("a", "b")),
        ],
        ran=[],
    )
    assert (found[0].check, found[0].primary) == (primary, True)
    assert found[1].follows == primary


def test_every_check_that_a_module_says_it_makes_is_known() -> None:
    from dtctl.doctor import checks
    from dtctl.doctor.checks import node
    from dtctl.slurm import partition_checks

    modules = [import_module(f"{checks.__name__}.{found.name}") for found in pkgutil.iter_modules(checks.__path__)]
    made = {name for module in modules for name in getattr(module, "RAN", ())}
    assert made | {*node.RAN_REACH, *partition_checks.CHECKS} == set(CHECKS)


def test_busy_gpus_are_read_from_nvidia_smi() -> None:
    said = "0, NVIDIA H100 80GB HBM3, 4, 81559\n1, NVIDIA H100 80GB HBM3, 34000, 81559\n2, NVIDIA H100, [N/A], 81559"
    assert find_busy_gpus(said) == ["GPU 1 34000 of 81559 MiB"]
    assert find_busy_gpus("") == []


def test_an_rdma_port_is_dead_only_beside_living_ones() -> None:
    up = {"device": "mlx5_0", "port": "1", "state": "4: ACTIVE"}
    down = {"device": "mlx5_1", "port": "1", "state": "1: DOWN"}
    assert find_dead_ports([up, down]) == ["mlx5_1:1 1: DOWN"]
    assert find_dead_ports([down]) == []  # a node whose RDMA is not used at all


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("eth", "eth0"),
        ("eth0", "eth0"),
        ("=eth", ""),
        ("=eth0", "eth0"),
        ("ib", ""),
        ("eth0:0", "eth0"),
        ("ib,eth", "eth0"),
        ("^eth", "lo"),
        ("^lo", "eth0"),
        ("^=eth0,lo", ""),
        ("st", "st0"),
    ],
)
def test_names_of_interfaces_are_matched_as_nccl_does(value: str, chosen: str) -> None:
    rows = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("st0", "")]
    have = [{"name": name, "address": address, "up": True} for name, address in rows]
    assert choose_interface(value, have) == chosen


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "100000", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "4"}


@pytest.mark.parametrize(
    ("changed", "check", "status", "said"),
    [
        ({"SLURM_JOB_END_TIME": "10300"}, "time-left", "warn", "5 minutes"),
        ({"SLURM_JOB_END_TIME": "10030"}, "time-left", "fail", "0 minutes"),
        ({"SLURM_NTASKS_PER_NODE": "8"}, "tasks", "warn", "8 tasks"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "tasks", "fail", "has 2"),
        ({"SLURM_OVERSUBSCRIBE": "YES"}, "tasks", "warn", "port 29500"),
    ],
)
def test_what_slurm_has_set_is_held_against_the_spec(
    changed: dict[str, str], check: str, status: str, said: str
) -> None:
    from dtctl.doctor.checks.scheduler import check_slurm_job

    def found(environ: dict[str, str]) -> list[Finding]:
        return list(check_slurm_job(environ, {}, node="a", nodes=4, kind=None, now=10_000.0, fixed_port=29500))

    assert found(JOB) == []
    assert found({name: value for name, value in {**JOB, **changed}.items() if name != "SLURM_JOB_ID"}) == []
    (one,) = found({**JOB, **changed})
    assert (one.check, one.status, one.nodes) == (check, status, ("a",))
    assert said in one.summary
    assert one.fix
    assert one.evidence


@pytest.mark.parametrize(
    ("job", "warns"),
    [
        ({"BatchFlag": "1", "Requeue": "0"}, True),
        ({"BatchFlag": "1", "Requeue": "1"}, False),
        ({"BatchFlag": "0", "Requeue": "0"}, False),  # salloc
        ({}, False),  # Slurm does not answer
    ],
)
def test_a_batch_job_that_is_not_started_again_is_told_of(job: dict[str, str], warns: bool) -> None:
    from dtctl.doctor.checks.scheduler import check_slurm_job

    found = list(check_slurm_job(JOB, job, node="a", nodes=4, kind=None, now=10_000.0, fixed_port=None))
    assert [(one.check, one.status, one.evidence) for one in found] == [("requeue", "warn", ("Requeue=0",))] * warns
    assert all("scontrol update JobId=7 Requeue=1" in one.fix for one in found)


def test_a_folder_that_is_another_one_on_some_nodes_and_files_that_come_late() -> None:
    from dtctl.doctor.checks.shared_folders import Sights, check_shared_folders

    def sights(**after: float | None) -> Sights:
        return {("/data", who, whose): after.get(who + whose, 0.01) for who in "abc" for whose in "abc" if who != whose}

    assert list(check_shared_folders(sights())) == []
    assert list(check_shared_folders(dict.fromkeys(sights()))) == [], (
        "each has its own, and nobody has said that it is shared"
    )
    (one,) = check_shared_folders(sights(ac=None, bc=None, ca=None, cb=None))
    assert (one.check, one.status, one.nodes, one.peers) == ("shared", "fail", ("c",), ("a", "b"))
    (one,) = check_shared_folders(sights(ba=2.5))
    assert (one.check, one.status, one.nodes) == ("visibility", "warn", ("b",))
    assert "2.5 s" in one.summary


def test_what_was_not_made_is_neither_ok_nor_wrong() -> None:
    lost = [
        Finding(check="collective", status="skip", summary="left out", nodes=("a",), missing=True),
        Finding(check="gpus", status="skip", summary="no node shows a GPU"),
    ]
    found = order_findings([], ran=["reach", "gpus", "mtu"], unexamined=lost)
    assert [(one.check, one.status, one.summary) for one in found] == [
        ("gpus", "skip", "no node shows a GPU"),
        ("collective", "skip", "left out"),
        ("reach", "ok", ""),
        ("mtu", "ok", ""),
    ]
    assert not any(one.primary for one in found)


@pytest.mark.parametrize(
    ("torch", "statuses"),
    [({"n1": None, "n2": None}, ["fail"]), ({"n1": "2.13.0", "n2": None}, []), ({"n1": "unknown", "n2": None}, [])],
)
def test_a_job_that_needs_torch_cannot_train_without_it(torch: dict[str, str | None], statuses: list[str]) -> None:
    """Where some nodes have it, the nodes differ, which another finding says."""
    facts = {name: {"job": {"python": "3.11.2", "torch": version}} for name, version in torch.items()}
    reports = [NodeReport(name=name, address=name, facts=each) for name, each in facts.items()]
    found = list(node_checks.check_torch_exists(reports, "kind torchrun"))
    assert [finding.status for finding in found] == statuses
    assert all(not missing(finding.summary, "n1 n2 torch torchrun") for finding in found)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("cluster: {}\njob: {script: t.py}", True),
        ("cluster: {}\njob: {script: t.py, kind: direct}", False),
        ("cluster: {}\njob: {script: t.py, kind: direct}\ntrain: {strategy: ddp}", True),
        ("cluster: {}\njob: {command: 'true'}", False),
        ("cluster: {}\njob: {script: t.py, setup: ['. venv/bin/activate']}", False),
        ("cluster: {}\njob: {script: t.py, environment: {requirements: r.txt}}", False),
        ("cluster: {nodes: [a]}", False),
    ],
)
def test_what_of_a_job_needs_torch(text: str, needs: bool, tmp_path: Path) -> None:
    spec = parse_spec(text, source="dtctl.yaml", base_dir=tmp_path)
    assert bool(examine._find_need_of_torch(spec)) is needs


def test_a_node_behind_a_tunnel_is_no_matter_of_routes() -> None:
    def node(name: str, address: str) -> NodeReport:
        facts: dict[str, object] = {"ways": {}, "interfaces": [], "neighbours": {}}
        return NodeReport(name=name, address=address, data_address=address, facts=facts)

    reports = [node("a", "127.0.0.1"), node("b", "10.0.0.2")]
    said = network._describe_route_fix("b", "a", reports)
    assert not missing(said, "127.0.0.1 cluster.nodes")
    assert "blackhole" not in said
    assert "blackhole" in network._describe_route_fix("a", "b", reports)
