# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Faults at a moment of the examination, and jobs whose time or nodes do not suffice."""

from __future__ import annotations

from tests.fault.grammar.fault import Collection


def add(made: Collection) -> None:
    for words, when in (("asking", "while nodes are asked"), ("testing every pair", "while pairs are tested"), ("round 1", "in the first round"),
                        ("round 3", "in the last round"), ("adding up", "while numbers are added up")):  # fmt: skip
        for what in ("kill", "freeze") if words in ("round 1", "adding up") else ("kill",):
            node = made.host()
            made.add(f"time: {what} {when}", "times", "reach", [node], r".", during=((words, node, what),))
    for seconds in (1, 60):
        node = made.host()
        made.add(
            f"time: the cable is pulled after {seconds / 10:g} s",
            "times",
            "reach",
            [node],
            r".",
            during=(("asking" if seconds == 1 else "round 2", node, "cut"),),
        )
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    for left, fatal in ((30, True), (400, False)):
        made.add(f"time: a job that ends in {left} s", "times", "time-left", ["node1"], r"--time|requeue",
             environ={**inside, "SLURM_JOB_END_TIME": f"+{left}"}, fatal=fatal)  # fmt: skip
    made.add(
        "time: fewer nodes than the spec",
        "times",
        "tasks",
        ["node1"],
        r"--nodes",
        environ={**inside, "SLURM_JOB_NUM_NODES": "2"},
    )
    made.add("time: several tasks a node", "times", "tasks", ["node1"], r"ntasks-per-node", environ={**inside, "SLURM_NTASKS_PER_NODE": "4"},
         spec={"job.kind": "torchrun"}, fatal=False)  # fmt: skip
