"""What the machine of Slurm's commands may answer: a form for each of its requests, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dtctl.errors import NodeError
from dtctl.slurm import answers
from dtctl.supervisor import slurm_commands

DIRECT = answers.SlurmAnswer.__subclasses__()
KINDS = {kind.op: kind for parent in DIRECT for kind in (parent, *parent.__subclasses__())}


def test_there_is_a_type_for_every_request() -> None:
    assert KINDS.keys() == slurm_commands.OPS.keys()


def test_what_is_said_of_a_job_arrives() -> None:
    job = {
        "JobState": "COMPLETED", "Reason": "None", "ExitCode": "0:0", "Partition": "a", "Account": "b", "QOS": "c",
        "ids": ["7"], "nodes": ["n1"], "start": 1.0, "end": 5.0,
    }  # fmt: skip
    answer = answers.parse_login_answer(answers.JobStatus, {}, json.dumps({"job": job}), node="login")
    assert answer.job == answers.JobFacts(
        state="COMPLETED", reason="None", exit_code="0:0", partition="a", account="b", qos="c", ids=["7"],
        nodes=["n1"], start=1.0, end=5.0,
    )  # fmt: skip


def test_a_refusal_is_told_from_an_answer() -> None:
    with pytest.raises(answers.SlurmRequestRefused, match="sbatch: No such file"):
        answers.parse_login_answer(
            answers.ClusterResources, {}, json.dumps({"error": "sbatch: No such file"}), node="login"
        )


STATE = {"JobState": "RUNNING"}
NO_OFFER: dict[str, Any] = {"partitions": [], "nodes": []}
ODD: list[tuple[str, Any]] = [
    ("look", {"job": {}, "files": {}}),
    ("look", {"job": {"JobState": ["x"]}, "files": {}}),
    ("look", {"job": {**STATE, "nodes": ["../x"]}, "files": {}}),
    *(
        ("look", {"job": STATE, "files": {name: [0, ""]}})
        for name in (
            "logs/attempt-0/../rank-0.log",
            "control/logs/../rank-0.log",
            "control/logs/.x/rank-0.log",
            "control/run.json",
            "control/logs/node1/../../x.log",
            "logs/a/../../x",
            "/etc/x",
            "x",
            "logs/attempt-0/a/rank-x.log",
            "",
            "logs/attempt-0//rank-0.log",
            "logs/attempt-x/a/rank-0.log",
            "hangs/attempt-0/../rank-0.txt",
            "hangs/attempt-0/a/rank-0.sh",
        )
    ),
    ("look", {"job": STATE, "files": {"job.log": [-1, ""]}}),
    ("look", {"job": STATE, "files": {"job.log": [0, "%%%"]}}),
    ("look", {"job": STATE, "files": {"job.log": "x"}}),
    ("place", {**NO_OFFER, "folder": "/home/me"}),
    ("place", {**NO_OFFER, "folder": "slurm/one"}),
    ("place", {**NO_OFFER, "folder": "/x/slurm/two"}),
    ("place", {**NO_OFFER, "folder": "/x\n/slurm/one"}),
    ("submit", {"code": 0}),
    ("submit", {"code": 0, "job": "1; rm -rf ~"}),
    ("submit", {"code": 0, "job": 7}),
    ("offer", {"partitions": [{}], "nodes": []}),
    ("offer", {"partitions": [], "nodes": [["a"]]}),
    ("left", {"left": {"a": "none"}, "how": ""}),
    ("test", {"code": "0", "said": ""}),
    ("test", {"error": ["x"]}),
    ("test", []),
]


@pytest.mark.parametrize(("op", "said"), ODD)
def test_what_makes_no_sense_is_that_machines_fault(op: str, said: Any) -> None:
    with pytest.raises(NodeError):
        answers.parse_login_answer(KINDS[op], {"run": "one"}, json.dumps(said), node="login")


@pytest.mark.parametrize("said", ["", "{", "[" * 100_000, "\x00"])
def test_what_is_no_answer_is_told_from_one(said: str) -> None:
    with pytest.raises(answers.InvalidMessage):
        answers.parse_login_answer(answers.JobUpdate, {}, said, node="login")
