"""Whether and when a job of Slurm starts its workers again, decided by the rules of a launch over SSH.

Run by the batch file after a start that has failed, on the first node, with the workers' own Python. Where that has no
dtctl, they are started again at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dtctl import names
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.restart_policy import RestartDecision, RestartPolicy
from dtctl.slurm import job_record, placement
from dtctl.slurm.attempt_facts import AttemptFacts, begin
from dtctl.slurm.batchlog import Start
from dtctl.slurm.job_output import JOB_LOG, AttemptOutput


def main() -> None:
    """Print `wait SECONDS` or `stop REASON`; the arguments are those that the batch file has, see `decide`."""
    folder, apart, workers, trains = sys.argv[1:5]
    components = placement.from_text(workers)
    decision = decide(Path(folder), workers_apart=apart == "apart", components=components, trains=trains == "trains")
    if decision.give_up_reason:
        sys.stdout.write(f"stop {decision.give_up_reason}\n")
    else:
        sys.stdout.write(f"wait {decision.wait_s:g}\n")


def decide(
    folder: Path, *, workers_apart: bool, components: Sequence[placement.Component], trains: bool
) -> RestartDecision:
    """What to do after the last attempt.

    Args:
        folder: of the run, which all nodes see.
        workers_apart: whether each worker is a task of its own (kind direct).
        components: of the job.
        trains: whether the job is a training with dtctl.runtime, whose exit codes have a meaning.
    """
    policy, decision = RestartPolicy(trains=trains), RestartDecision()
    for attempt in attempts(folder, workers_apart=workers_apart, components=components):
        failure = attempt.first_failure(AttemptOutput(folder, attempt.number))
        if failure is not None and not attempt.taken_back:
            lasted_s = _failed_at(attempt, failure) - attempt.begun
            decision = policy.judge(failure, step=attempt.last_step, first=attempt.first_step, lasted_s=lasted_s)
    return decision


def attempts(folder: Path, *, workers_apart: bool, components: Sequence[placement.Component]) -> list[AttemptFacts]:
    """All attempts of a job so far, in their order."""
    texts = [_text(folder / name) for name in (JOB_LOG, names.PROGRESS_FILE)]
    facts: list[AttemptFacts] = []
    for at, event in job_record.in_order(*(text.splitlines() for text in texts), now=time.time()):
        if isinstance(event, Start):
            facts.append(begin(event, workers_apart=workers_apart, components=components))
        elif facts and getattr(event, "attempt", facts[-1].number) == facts[-1].number:
            facts[-1].apply(at, event)
    return facts


def _failed_at(attempt: AttemptFacts, failure: Failure) -> float:
    return failure.time if attempt.ended is None else min(attempt.ended, failure.time)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
