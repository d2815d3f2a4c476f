"""Lines of a job's log; those of srun are as Slurm 22.05 printed them."""

from __future__ import annotations

import pytest

from dtctl.slurm.batchlog import (
    Aborted,
    Begun,
    Ended,
    Requeued,
    ScriptEnded,
    Start,
    StepEnded,
    TakenBack,
    read,
    read_events,
)


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("dtctl: run a-1, start 2 on node[1-2,7], rendezvous 10.0.0.1:25000, 2026-11-22T11:40:03.250Z",
         [Start(2, 1795347603.25, ("node1", "node2", "node7"), "10.0.0.1:25000")]),
        ("dtctl: start 2 is over with exit code 137, 2026-11-22T11:40:03.250Z", [StepEnded(2, 1795347603.25, 137)]),
        ("dtctl: start 2 is over with exit code 0, sooner or later", []),
        ("dtctl: ended with exit code 75", [ScriptEnded(75)]),
        ("srun: error: node2: task 3: Exited with exit code 3", [Ended("node2", 3, 3, None)]),
        ("srun: error: node2: task 3: Exited with exit code 139", [Ended("node2", 3, 139, 11)]),
        ("srun: error: node1: tasks 0-1,4: Killed", [Ended("node1", task, 137, 9) for task in (0, 1, 4)]),
        ("srun: error: node1: task 0: Segmentation fault (core dumped)", [Ended("node1", 0, 139, 11)]),
        ("srun: error: node1: task 0: Out Of Memory",
         [Ended("node1", 0, 137, 9, "it used more memory than the job requested")]),
        ("srun: error: Node failure on node2", [Ended("node2", None, None, None)]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO PREEMPTION ***",
         [TakenBack("it was preempted")]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***",
         [TakenBack("its time limit was reached")]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD "
         "LOG FOR DETAILS ***", [TakenBack("a node failed")]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO JOB REQUEUE ***",
         [TakenBack("it was requeued (scontrol requeue)")]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 ***", []),
        ("dtctl: the time is nearly over, the workers save", [TakenBack("its time limit was near")]),
        ("srun: Job step aborted: Waiting up to 7 seconds for job step to finish.", [Aborted()]),
        ("srun: Terminating StepId=5.0", [Aborted()]),
        ("srun: First task exited 60s ago", [Aborted()]),
        ("dtctl: job 5 of run a-1 begins on node1, requeued 1 times, 2026-11-22T11:40:03.250Z", [Begun()]),
        ("dtctl: to be started again, 2026-11-22T11:40:03.250Z", [Requeued()]),
        ("dtctl: a node was lost, and no other one is left for its place", [TakenBack("a node failed")]),
        ("what a setup line prints", []),
    ],
)  # fmt: skip
def test_what_a_line_means(line: str, meaning: list[object]) -> None:
    assert read(line) == meaning


def test_what_has_no_time_is_as_old_as_what_follows_it() -> None:
    log = [
        "dtctl: run a, start 0 on n1, rendezvous 10.0.0.1:25000, 1970-01-01T00:00:10.000Z",
        "srun: error: n1: task 3: Killed",
        "dtctl: start 0 is over with exit code 137, 1970-01-01T00:00:20.000Z",
        "dtctl: run a, start 1 on n1, rendezvous 10.0.0.1:25001, 1970-01-01T00:00:21.000Z",
        "srun: error: n1: task 2: Killed",
    ]
    events = read_events(log, now=40.0)
    assert [(at, type(event).__name__) for at, event in events] == [
        (10.0, "Start"), (20.0, "Ended"), (20.0, "StepEnded"), (21.0, "Start"), (40.0, "Ended"),
    ]  # fmt: skip
    assert events[1][1] == Ended("n1", 3, 137, 9)
