"""Whether a job of Slurm starts its workers again: by its files, and by the rules of a launch over SSH."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from dtctl.launch.control.restart_policy import RestartDecision
from dtctl.slurm.next_start import attempts, decide
from dtctl.slurm.placement import Component
from tests.unit.slurm.test_job_record import WORKER


class Job:
    """The folder of a job of two workers on two nodes, kind direct."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts = 0

    def attempt(self, *ends: str, said: str = "", step: int | None = None) -> Job:
        """Add an attempt: what srun has told, what rank 1 has printed, and how far the workers were."""
        log = self.folder / "logs" / f"attempt-{self.starts}" / "node2" / "rank-1.log"
        log.parent.mkdir(parents=True)
        log.write_text(said)
        lines = [f"dtctl: run a, start {self.starts} on node[1-2], rendezvous 10.0.0.1:25000, {self.time(10)}", *ends]
        lines += [f"dtctl: start {self.starts} is over with exit code 1, {self.time(40)}"]
        with (self.folder / "job.log").open("a") as file:
            file.write("\n".join(lines) + "\n")
        if step is not None:
            worker = asdict(replace(WORKER, step=step, until=99))
            line = {"op": "progress", "attempt": self.starts, "time": 100 * self.starts + 30, "worker": worker}
            with (self.folder / "progress.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.starts += 1
        return self

    def time(self, second: int) -> str:
        minutes, seconds = divmod(100 * self.starts + second, 60)
        return f"1970-01-01T00:{minutes:02}:{seconds:02}.000Z"

    def next(self, *, trains: bool = True) -> RestartDecision:
        return decide(self.folder, workers_apart=True, components=[Component(2, 1)], trains=trains)


ERROR = "srun: error: node2: task 1: Exited with exit code 1"


def test_a_first_failure_is_followed_at_once(tmp_path: Path) -> None:
    assert Job(tmp_path).attempt(ERROR, said="ValueError: no\n").next() == RestartDecision()


def test_the_same_failure_without_progress_waits_longer_and_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path).attempt(ERROR, said="ValueError: no\n").attempt(ERROR, said="ValueError: no\n")
    assert job.next() == RestartDecision(wait_s=1.0)
    reason = job.attempt(ERROR, said="ValueError: no\n").next().give_up_reason
    assert reason == "3 attempts have failed in the same way at the start"


def test_what_each_attempt_has_printed_is_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for text in ("ValueError: one\n", "ValueError: two\n", "ValueError: three\n"):
        assert job.attempt(ERROR, said=text).next() == RestartDecision()


def test_a_failure_that_comes_back_at_the_same_step_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path).attempt(ERROR, said="ValueError: the loss\n", step=8)
    assert job.next() == RestartDecision()
    reason = job.attempt(ERROR, said="ValueError: the loss\n", step=8).next().give_up_reason
    assert reason == "2 attempts have failed with the same error after step 8"


def test_a_killed_worker_and_a_lost_node_are_no_ground_to_give_up(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(3):
        job.attempt("srun: error: node2: task 1: Killed", "srun: error: node1: task 0: Terminated")
        job.attempt("srun: error: Node failure on node2")
        assert job.next() == RestartDecision()


def test_workers_that_refuse_the_spec_are_not_started_again(tmp_path: Path) -> None:
    refusal = "srun: error: node2: task 1: Exited with exit code 3"
    job = Job(tmp_path).attempt(refusal, said="error: tp 5 does not divide 16\n")
    assert job.next().give_up_reason is not None
    assert job.next(trains=False) == RestartDecision(), "in another program it may mean anything"


def test_what_slurm_has_ended_is_nobodys_failure(tmp_path: Path) -> None:
    due = "slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-21T12:00:00 DUE TO PREEMPTION ***"
    job = Job(tmp_path)
    for _ in range(4):
        job.attempt(due, ERROR)
    assert job.next() == RestartDecision()


def test_who_does_not_react_to_the_end_of_the_others_is_not_the_culprit(tmp_path: Path) -> None:
    killed = "srun: error: node1: task 0: Killed"
    aborted = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
    job = Job(tmp_path).attempt(ERROR, aborted, killed, said="ValueError: no\n")
    job.attempt(aborted, killed, ERROR)
    first, second = attempts(tmp_path, workers_apart=True, components=[Component(2, 1)])
    assert [failure.rank for failure in first.failures] == [1]
    assert [failure.rank for failure in second.failures] == [0, 1], "nothing had failed before srun ended it"


def test_the_worker_that_torchrun_names_is_found_in_its_agents_log(tmp_path: Path) -> None:
    job = Job(tmp_path).attempt("srun: error: node2: task 1: Exited with exit code 1")
    agent = tmp_path / "logs" / "attempt-0" / "node2" / "agent.log"
    (agent.parent / "rank-1.log").unlink()
    agent.write_text(
        "[dtctl:2] fine\n[dtctl:3] ValueError: enough\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n"
    )
    from dtctl.slurm.job_output import AttemptOutput

    (attempt,) = attempts(job.folder, workers_apart=False, components=[Component(2, 2)])
    failure = attempt.first_failure(AttemptOutput(tmp_path, 0))
    assert failure is not None
    assert (failure.node, failure.rank, failure.summary) == ("node2", 3, "ValueError: enough")


def test_a_worker_that_printed_nothing_is_not_told_by_torchruns_table(tmp_path: Path) -> None:
    job = Job(tmp_path).attempt("srun: error: node2: task 1: Exited with exit code 1")
    agent = tmp_path / "logs" / "attempt-0" / "node2" / "agent.log"
    (agent.parent / "rank-1.log").unlink()
    table = "[0]:\n  rank      : 3 (local_rank: 1)\n  exitcode  : 3 (pid: 7)\n==========\n"
    agent.write_text(f"Root Cause (first observed failure):\n{table}")
    from dtctl.slurm.job_output import AttemptOutput

    (attempt,) = attempts(job.folder, workers_apart=False, components=[Component(2, 2)])
    failure = attempt.first_failure(AttemptOutput(tmp_path, 0))
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.tail) == (3, 3, ())
    assert "exit code 3" in failure.summary
    assert failure.log == str(agent)


def test_the_batch_file_reads_one_line(tmp_path: Path) -> None:
    job = Job(tmp_path).attempt(ERROR, said="ValueError: no\n", step=8)
    code = "from dtctl.slurm.next_start import main; main()"
    argv = [sys.executable, "-c", code, str(job.folder), "apart", "2x1", "trains"]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "wait 0\n"
    job.attempt(ERROR, said="ValueError: no\n", step=8)
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert said == "stop 2 attempts have failed with the same error after step 8\n"
