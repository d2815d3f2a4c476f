"""What is told beside a cause agrees with it: ends that follow from it, errors that are here, and other runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.diagnose import diagnose_log_files
from dtctl.doctor.explain.diagnosis import Diagnosis

RUN = Path(__file__).parent / "runs" / "torchrun-value-error"
"""A real run on three nodes of one worker each: rank 1 raised a ValueError, twice, and dtctl stopped the others."""
DIED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 7, in <module>
[rank1]: ValueError: bad batch
"""
SIGNALLED = "Received Signals.SIGTERM death signal, shutting down workers\n"
FAILED = f"{'=' * 60}\ntrain.py FAILED\n{'-' * 60}\nRoot Cause (first observed failure):\n[0]:\n"
ROW = "  host      : {node}\n  rank      : {rank} (local_rank: 0)\n  exitcode  : 1 (pid: 182)\n  error_file: <N/A>\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(RUN, tmp_path / "runs" / "a")
    return tmp_path / "runs" / "a"


def of(id_: str, found: list[Diagnosis]) -> Diagnosis | None:
    return next((one for one in found if one.id == id_), None)


def follow_up(id_: str) -> str:
    return signatures.by_id(id_).follows


def told(folder: Path, text: str) -> list[Diagnosis]:
    (folder / "job.log").write_text(text)
    return diagnose_log_files([folder / "job.log"])


def test_a_run_that_one_rank_failed_is_told_without_contradiction(run: Path) -> None:
    first, *rest = diagnose_log_files([run / "logs"])
    assert (first.id, first.ranks, first.nodes, first.confidence) == ("exception", (1,), ("node2",), "low")
    assert [(one.id, one.follows) for one in rest] == [("peer-closed", True), ("agent-signalled", True)]
    assert (rest[1].cause, rest[1].ranks, rest[1].nodes) == (follow_up("agent-signalled"), (), ("node3",))


def test_only_the_worker_whose_error_is_missing_is_said_to_have_failed_without_one(run: Path) -> None:
    (run / "logs" / "node3" / "rank-2.log").unlink()
    found = diagnose_log_files([run / "logs"])
    for id_ in ("worker-failed", "torchrun-no-traceback"):
        missing = of(id_, found)
        assert missing is not None
        assert (missing.ranks, missing.nodes) == ((2,), ("node3",))


def test_without_any_error_all_workers_that_failed_are_named(run: Path) -> None:
    for log in (run / "logs").rglob("rank-*.log"):
        log.unlink()
    failed = of("worker-failed", diagnose_log_files([run / "logs"]))
    assert failed is not None
    assert (failed.ranks, failed.nodes) == ((0, 1, 2), ("node1", "node2", "node3"))


def test_an_error_in_another_run_is_not_the_one_that_a_launcher_has_missed(run: Path) -> None:
    other = run.parent / "b"
    shutil.copytree(run, other)
    for log in (other / "logs").rglob("rank-*.log"):
        log.unlink()
    found = diagnose_log_files([run / "logs", other / "logs"])
    missing = of("worker-failed", found)
    assert missing is not None
    assert missing.ranks == (0, 1, 2)
    assert {Path(evidence.file).parents[2] for evidence in missing.evidence} == {other}


def test_what_ended_in_another_run_does_not_follow(run: Path) -> None:
    other = run.parent / "b" / "logs" / "node1"
    other.mkdir(parents=True)
    (run / "logs" / "node3" / "agent.log").unlink()
    (other / "agent.log").write_text(SIGNALLED)
    signalled = of("agent-signalled", diagnose_log_files([run / "logs", run.parent / "b" / "logs"]))
    assert signalled is not None
    assert not signalled.follows
    assert signalled.cause == signatures.by_id("agent-signalled").cause


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        (SIGNALLED, "agent-signalled"),
        ("Sending process 182 closing signal SIGTERM\n", "stopped"),
        ("slurmstepd: error: *** STEP 991.0 ON gpu1 CANCELLED AT 2026-01-05T10:00:00 ***\n", "cancelled"),
        ("  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 182)\n", "killed"),
        ("KeyboardInterrupt\n", "interrupted"),
    ],
)
def test_an_end_behind_a_failure_is_told_as_its_consequence_and_before_it_by_itself(
    tmp_path: Path, text: str, id_: str
) -> None:
    behind, before = of(id_, told(tmp_path, DIED + text)), of(id_, told(tmp_path, text + DIED))
    assert behind is not None
    assert before is not None
    assert (behind.follows, behind.cause) == (True, follow_up(id_))
    assert (before.follows, before.cause) == (False, signatures.by_id(id_).cause)


def test_a_job_that_was_only_told_to_stop_keeps_the_question_by_whom(tmp_path: Path) -> None:
    found = told(tmp_path, SIGNALLED + "Sending process 182 closing signal SIGTERM\n")
    assert [one.cause for one in found] == [signatures.by_id(id_).cause for id_ in ("agent-signalled", "stopped")]


def test_an_error_that_does_not_say_whose_it_is_may_be_that_of_the_worker_that_failed(tmp_path: Path) -> None:
    found = told(tmp_path, DIED.replace("[rank1]: ", "") + FAILED + ROW.format(node="gpu1", rank=1))
    assert [one.id for one in found] == ["exception"]


def test_an_error_that_was_survived_does_not_explain_an_end(tmp_path: Path) -> None:
    survived = "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n[rank1]: step 11 loss 2.0\n"
    found = told(tmp_path, survived + ROW.format(node="gpu1", rank=1))
    assert {one.id for one in found} >= {"cuda-oom", "worker-failed"}


def test_plans_of_several_runs_name_a_node_only_where_they_agree(tmp_path: Path) -> None:
    for run, nodes in (("a", ("gpu1", "gpu2")), ("b", ("gpu1", "gpu3"))):
        (tmp_path / run / "logs").mkdir(parents=True)
        plan = {
            "nodes": [
                {"name": name, "address": f"10.0.0.{rank}", "first_rank": rank, "slots": 1}
                for rank, name in enumerate(nodes)
            ]
        }
        (tmp_path / run / "plan.json").write_text(json.dumps(plan))
    text = "[rank{rank}]: torch.OutOfMemoryError: CUDA out of memory. Tried\n"
    for rank, expected in ((0, ("gpu1",)), (1, ())):
        (tmp_path / "a" / "logs" / "job.log").write_text(text.format(rank=rank))
        (tmp_path / "b" / "logs" / "job.log").write_text("all is well\n")
        assert diagnose_log_files([tmp_path / "a" / "logs", tmp_path / "b" / "logs"])[0].nodes == expected
