"""What a cluster offers beside what is asked for; the rows are as scontrol and sinfo of Slurm 22.05 print them."""

from __future__ import annotations

from typing import Any

import pytest

from dtctl.slurm.answers import ClusterResources
from dtctl.slurm.partition_checks import UnmetRequirement, check_job_offer, parse_time_limit
from dtctl.spec.model import Slurm

PARTITIONS = [
    {"PartitionName": "main", "Default": "YES", "State": "UP", "MaxTime": "1-00:00:00", "MaxNodes": "UNLIMITED"},
    {"PartitionName": "gpu", "Default": "NO", "State": "UP", "MaxTime": "UNLIMITED", "MaxNodes": "2",
     "AllowAccounts": "lab,physics", "DenyQos": "low"},
    {"PartitionName": "old", "Default": "NO", "State": "DRAIN", "MaxTime": "UNLIMITED"},
]  # fmt: skip
NODES = [
    ["c1", "main*", "idle", "(null)", "(null)"],
    ["c2", "main*", "mixed", "(null)", "(null)"],
    ["c3", "main*", "down*", "(null)", "(null)"],
    ["g1", "gpu", "allocated", "gpu:a100:8(S:0-1)", "a100,ib"],
    ["g2", "gpu", "idle", "gpu:a100:8(S:0-1)", "a100,ib"],
    ["g3", "gpu", "idle", "gpu:v100:4", "v100"],
    ["o1", "old", "drained", "(null)", "(null)"],
]
OFFER = ClusterResources(partitions=PARTITIONS, nodes=NODES)


def found(nodes: int, **slurm: Any) -> list[UnmetRequirement]:
    return list(check_job_offer(Slurm(**slurm), nodes, OFFER))


@pytest.mark.parametrize(
    ("nodes", "slurm"),
    [
        (2, {}),
        (2, {"partition": "gpu", "gres": "gpu:8"}),
        (2, {"partition": "gpu", "gres": "gpu:a100:8", "extra": {"constraint": "a100&ib"}}),
        (2, {"partition": "gpu", "gres": "gpu", "account": "lab"}),
        (2, {"partition": "gpu,main", "time": "1-0"}),
        (1, {"time": "1-00:00:00"}),
        (2, {"partition": "gpu", "time": "100-0"}),
        (2, {"partition": "gpu", "extra": {"constraint": "[a100*1&v100*1]"}}),
    ],
)
def test_what_the_cluster_has(nodes: int, slurm: dict[str, Any]) -> None:
    assert found(nodes, **slurm) == []


@pytest.mark.parametrize(
    ("nodes", "slurm", "key", "never", "words"),
    [
        (1, {"partition": "gpus"}, "slurm.partition", True, "there is no partition gpus"),
        (1, {"partition": "main,gpus"}, "slurm.partition", True, "there is no partition gpus"),
        (1, {"time": "1-00:01"}, "slurm.time", True, "1-00:01 is more than partition main allows"),
        (4, {}, "cluster.nodes", True, "the job needs 4 nodes, and partition main gives 3"),
        (3, {"partition": "gpu"}, "cluster.nodes", True, "the job needs 3 nodes, and partition gpu gives 2"),
        (3, {}, "cluster.nodes", False, "2 of the 3 of partition main work"),
        (1, {"partition": "gpu", "account": "art"}, "slurm.account", True, "does not take account art"),
        (1, {"partition": "gpu", "qos": "low"}, "slurm.qos", True, "does not take qos low"),
        (1, {"gres": "gpu:1"}, "slurm.gres", True, "0 of the 3 nodes of partition main have gpu:1"),
        (
            2,
            {"partition": "gpu", "gres": "gpu:v100:4"},
            "slurm.gres",
            True,
            "1 of the 3 nodes of partition gpu have gpu:v100:4",
        ),
        (2, {"partition": "gpu", "extra": {"constraint": "v100"}}, "slurm.extra.constraint", True, "have v100"),
    ],
)
def test_what_it_lacks_is_named_by_the_key(
    nodes: int, slurm: dict[str, Any], key: str, never: bool, words: str
) -> None:
    (lack,) = found(nodes, **slurm)
    assert (lack.key, lack.never) == (key, never)
    assert words in lack.summary
    assert lack.fix


@pytest.mark.parametrize(
    ("partition", "slurm", "key", "words"),
    [
        ({}, {"time": "2:00", "warn_s": 120}, "slurm.warn_s", "may run for 120 s"),
        ({"DefaultTime": "00:01:00"}, {}, "slurm.warn_s", "may run for 60 s"),
        ({"PreemptMode": "CANCEL", "GraceTime": "0"}, {}, "slurm.partition", "cancels the jobs that it preempts"),
    ],
)
def test_what_keeps_an_interrupted_job_from_going_on(
    partition: dict[str, str], slurm: dict[str, Any], key: str, words: str
) -> None:
    offer = ClusterResources(partitions=[PARTITIONS[0] | partition], nodes=NODES)
    (lack,) = check_job_offer(Slurm(**slurm), 1, offer)
    assert (lack.check, lack.key, lack.never) == ("requeue", key, False)
    assert words in lack.summary


@pytest.mark.parametrize(
    ("partition", "slurm"),
    [
        ({"PreemptMode": "REQUEUE", "DefaultTime": "NONE"}, {"time": "3:00"}),
        ({"PreemptMode": "CANCEL"}, {"requeues": 0, "requeue": False}),
        ({"PreemptMode": "OFF", "DefaultTime": "01:00:00"}, {"warn_s": 300}),
    ],
)
def test_an_interrupted_job_that_can_go_on(partition: dict[str, str], slurm: dict[str, Any]) -> None:
    offer = ClusterResources(partitions=[PARTITIONS[0] | partition], nodes=NODES)
    assert list(check_job_offer(Slurm(**slurm), 1, offer)) == []


def test_a_partition_that_takes_no_jobs_now() -> None:
    first, *_ = found(1, partition="old")
    assert (first.key, first.never) == ("slurm.partition", False)
    assert first.summary == "partition old is drain"


def test_no_default_partition() -> None:
    (lack,) = check_job_offer(Slurm(), 1, ClusterResources(partitions=PARTITIONS[1:], nodes=NODES))
    assert lack.never
    assert "one of: gpu, old" in lack.fix


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("90", 90),
        ("30:30", 30.5),
        ("1:30:00", 90),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("2-0:0:30", 2880.5),
        ("UNLIMITED", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, value: float | None) -> None:
    assert parse_time_limit(text) == value


@pytest.mark.parametrize(
    ("state", "typed"),
    [("drained", "sudo scontrol update nodename=c3 state=resume"), ("reserved", "scontrol show reservation")],
)
def test_nodes_that_take_no_jobs_are_named_with_what_brings_them_back(state: str, typed: str) -> None:
    rows = [[*row[:2], state, *row[3:]] if row[0] == "c3" else row for row in NODES]
    (lack,) = check_job_offer(Slurm(), 3, ClusterResources(partitions=PARTITIONS, nodes=rows))
    assert (lack.check, lack.nodes) == ("job-nodes", ("c3",))
    assert typed in lack.fix
