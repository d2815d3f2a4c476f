"""Lines of a job's log; those of srun are as Slurm 22.05 printed them."""

from __future__ import annotations

import pytest

from dtctl.slurm.batchlog import (
    BatchScriptEnded,
    BatchScriptStarted,
    JobRequeued,
    JobStepEnded,
    JobTerminated,
    TaskFailed,
    TasksAborted,
    WorkersStarted,
    parse_batch_line,
    read_events,
)


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("dtctl: run a-1, start 2 on node[1-2,7], rendezvous 10.0.0.1:25000, 2026-11-22T11:40:03.250Z",
         [WorkersStarted(2, 1795347603.25, ("node1", "node2", "node7"), "10.0.0.1:25000")]),
        ("dtctl: start 2 is over with exit code 137, 2026-11-22T11:40:03.250Z", [JobStepEnded(2, 1795347603.25, 137)]),
        ("dtctl: start 2 is over with exit code 0, sooner or later", []),
        ("dtctl: ended with exit code 75", [BatchScriptEnded(75)]),
        ("srun: error: node2: task 3: Exited with exit code 3", [TaskFailed("node2", 3, 3, None)]),
        ("srun: error: node2: task 3: Exited with exit code 139", [TaskFailed("node2", 3, 139, 11)]),
        ("srun: error: node1: tasks 0-1,4: Killed", [TaskFailed("node1", task, 137, 9) for task in (0, 1, 4)]),
        ("srun: error: node1: task 0: Segmentation fault (core dumped)", [TaskFailed("node1", 0, 139, 11)]),
        ("srun: error: node1: task 0: Out Of Memory",
         [TaskFailed("node1", 0, 137, 9, "it used more memory than the job requested")]),
        ("srun: error: Node failure on node2", [TaskFailed("node2", None, None, None)]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO PREEMPTION ***",
         [JobTerminated("it was preempted")]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***",
         [JobTerminated("its time limit was reached")]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD "
         "LOG FOR DETAILS ***", [JobTerminated("a node failed")]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO JOB REQUEUE ***",
         [JobTerminated("it was requeued (scontrol requeue)")]),
        ("slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 ***", []),
        ("dtctl: the time is nearly over, the workers save", [JobTerminated("its time limit was near")]),
        ("srun: Job step aborted: Waiting up to 7 seconds for job step to finish.", [TasksAborted()]),
        ("srun: Terminating StepId=5.0", [TasksAborted()]),
        ("srun: First task exited 60s ago", [TasksAborted()]),
        ("dtctl: job 5 of run a-1 begins on node1, requeued 1 times, 2026-11-22T11:40:03.250Z", [BatchScriptStarted()]),
        ("dtctl: to be started again, 2026-11-22T11:40:03.250Z", [JobRequeued()]),
        ("dtctl: a node was lost, and no other one is left for its place", [JobTerminated("a node failed")]),
        ("what a setup line prints", []),
    ],
)  # fmt: skip
def test_what_a_line_means(line: str, meaning: list[object]) -> None:
    assert parse_batch_line(line) == meaning


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
        (10.0, "WorkersStarted"),
        (20.0, "TaskFailed"),
        (20.0, "JobStepEnded"),
        (21.0, "WorkersStarted"),
        (40.0, "TaskFailed"),
    ]
    assert events[1][1] == TaskFailed("n1", 3, 137, 9)
