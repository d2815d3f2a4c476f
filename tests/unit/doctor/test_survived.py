"""What training survived, what only looks like an error, and which of two is the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.doctor.explain.diagnose import diagnose_log_files
from dtctl.doctor.explain.diagnosis import Diagnosis
from dtctl.doctor.explain.log_scan import UNLABELLED

CAUGHT = (
    "step 10: caught torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; halving micro batch to 4 "
    "and going on\n"
)
ERROR = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
KEY_ERROR = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/train.py", line 88, in <module>
[rank1]:     x = batch["labels"]
[rank1]: KeyError: 'labels'
"""


def told(folder: Path, text: str) -> list[Diagnosis]:
    (folder / "job.log").write_text(text)
    return diagnose_log_files([folder / "job.log"])


@pytest.mark.parametrize("caught", [CAUGHT, "[rank1]: " + CAUGHT, ERROR])
def test_the_last_uncaught_traceback_outweighs_what_training_survived(tmp_path: Path, caught: str) -> None:
    found = told(tmp_path, f"{caught}[rank1]: step 11 loss 2.0\nstep 5000 loss 1.2\n{KEY_ERROR}")
    assert found[0].id == "exception"
    assert "KeyError: 'labels'" in found[0].cause
    assert (found[0].ranks, found[0].confidence) == ((1,), "low")


def test_a_survived_error_is_told_as_such_behind_the_cause(tmp_path: Path) -> None:
    found = told(tmp_path, f"{ERROR}[rank1]: step 11 loss 2.0\n{KEY_ERROR}")
    assert [one.id for one in found] == ["exception", "cuda-oom"]
    assert found[1].cause.endswith("training went on after it")


def test_progress_of_another_worker_shows_nothing(tmp_path: Path) -> None:
    found = told(tmp_path, f"{ERROR}[rank0]: step 11 loss 2.0\n{KEY_ERROR}")
    assert (found[0].id, found[0].confidence) == ("cuda-oom", "medium")


def test_of_ranks_without_names_one_may_print_a_little_after_another_has_died(tmp_path: Path) -> None:
    died = (
        'Traceback (most recent call last):\n  File "t.py", line 3, in f\ntorch.OutOfMemoryError: CUDA out of memory.\n'
    )
    for lines, expected in ((1, True), (UNLABELLED, False)):
        assert told(tmp_path, died + "step 7 loss 1.0\n" * lines)[0].primary is expected


def test_an_error_that_was_survived_is_still_the_best_guess_when_a_worker_failed(tmp_path: Path) -> None:
    found = told(tmp_path, f"{ERROR}[rank1]: step 11 loss 2.0\nfailed (exitcode: 1) local_rank: 1 (pid: 7)\n")
    assert [one.id for one in found] == ["cuda-oom", "worker-failed"]
    assert found[0].confidence == "medium"


@pytest.mark.parametrize(
    "text",
    [
        "INFO: Handling CUDA out of memory tests: passed\nwarning: Address already in use, trying port 29501\n"
        "training finished successfully\n",
        'Traceback (most recent call last):\n  File "t.py", line 3, in f\njson.decoder.JSONDecodeError: Expecting\n'
        "warning: above was retried, ok\ntraining finished successfully\n",
        "step 10: CUDA out of memory. Tried to allocate 2.00 GiB; halving micro batch and going on\nstep 11 loss 1.0\n",
        "Our code never logs CUDA out of memory.\n",
        "x = torch.OutOfMemoryError\n",
    ],
)
def test_a_run_that_ended_well_or_speaks_of_errors_has_no_cause(tmp_path: Path, text: str) -> None:
    assert not any(one.primary for one in told(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[rank1]:     except torch.cuda.OutOfMemoryError as error:\n"
         "[rank1]: ValueError: CUDA out of memory budget must be positive\n", "ValueError: CUDA out of memory budget"),
        ("Our code never logs CUDA out of memory.\nstep 1 loss 2.0\nKeyError: 'labels'\n", "KeyError: 'labels'"),
        ("[rank0]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x10 and 12x4)\n"
         "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n", "RuntimeError: mat1 and mat2"),
    ],
)  # fmt: skip
def test_an_exception_without_its_traceback_is_what_it_says(tmp_path: Path, text: str, cause: str) -> None:
    first = told(tmp_path, text)[0]
    assert first.confidence in ("low", "medium", "high")
    assert cause in first.cause


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "torch.cuda.OutOfMemoryError: CUDA out of memory",
        "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB",
        "RuntimeError: CUDA error: out of memory",
        "2026-01-05 10:00:02 ERROR train: CUDA out of memory. Tried to allocate 2 GiB",
        "  what():  CUDA out of memory. Tried to allocate 2 GiB",
        "2026-11-21T10:00:00.123Z stderr F torch.OutOfMemoryError: CUDA out of memory.",
        "(RayTrainWorker pid=123, ip=10.0.0.3) torch.OutOfMemoryError: CUDA out of memory.",
    ],
)
def test_a_full_gpu_is_known_by_the_form_of_its_exception(tmp_path: Path, line: str) -> None:
    assert told(tmp_path, line + "\n")[0].id == "cuda-oom"


def test_what_is_definite_comes_before_what_may_have_many_reasons(tmp_path: Path) -> None:
    killed = "failed (exitcode: -9) local_rank: 0 (pid: 87) of binary: python3\n"
    assert told(tmp_path, killed)[0].id == "killed"
    found = told(tmp_path, killed + "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0.\n")
    assert [one.id for one in found] == ["oom-killer", "killed"]


def test_an_application_error_in_the_kernels_log_does_not_blame_the_gpu(tmp_path: Path) -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1234, name=python\n"
    assert told(tmp_path, line.format(31))[0].id == "illegal-access"
    assert told(tmp_path, line.format(79))[0].id == "gpu-fell-off"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("RuntimeError: boom", "RuntimeError: boom"),
        ("ValueError:\nit is too short", "ValueError it is too short"),
        (
            "RuntimeError: Error(s) in loading:\n\tsize mismatch for head.weight",
            "loading: size mismatch for head.weight",
        ),
        ("KeyError: 'labels'", "KeyError: 'labels'"),
    ],
)
def test_what_is_printed_after_an_exception_is_no_part_of_its_cause(tmp_path: Path, message: str, cause: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "/w/train.py", line 12, in <module>\n    main()\n{message}\n'
    found = told(tmp_path, f"{trace}saved to /tmp/x\nwrote 12 files\n")
    assert cause in found[0].cause
    assert "saved" not in found[0].cause
    assert "wrote" not in found[0].cause
