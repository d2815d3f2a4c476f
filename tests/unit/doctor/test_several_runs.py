"""Logs of several runs, one after another, in one file; and processes that fail while they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtctl.doctor.explain.diagnose import explain_all
from dtctl.doctor.explain.diagnosis import Explanation
from dtctl.errors import UsageError

MODULES = "Loaded module: python3/3.10\nLoaded dependency [cudnn/v8]: cuda/11.3\n"
UNPACK = """\
Traceback (most recent call last):
  File "train.py", line 352, in <module>
    main()
  File "train.py", line 20, in main
    images, labels = next(loader)
ValueError: too many values to unpack (expected 2)
"""
MISSING = """\
Traceback (most recent call last):
  File "train.py", line 23, in <module>
    f = open(path)
FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'
"""
CANCELLED = "slurmstepd: error: *** JOB 304184 ON gpu10 CANCELLED AT 2025-10-16T02:31:48 ***\n"


def told(folder: Path, text: str) -> Explanation:
    (folder / "job.log").write_text(text)
    return explain_all([folder / "job.log"])


@pytest.mark.parametrize("head", [MODULES, "Using TensorFlow backend.\n", ""])
def test_the_last_of_several_runs_in_one_file_is_the_one_that_failed(tmp_path: Path, head: str) -> None:
    found = told(tmp_path, head + UNPACK + head + MISSING)
    first, second = found.diagnoses
    assert (first.id, second.id) == ("missing-file", "exception")
    assert second.survived
    assert "started again" in second.cause


def test_processes_of_one_run_that_fail_differently_are_no_several_runs(tmp_path: Path) -> None:
    several = "".join(
        f"[rank{rank}]: {line}\n" for rank, text in ((0, UNPACK), (1, MISSING)) for line in text.split("\n")
    )
    assert told(tmp_path, several).diagnoses[0].id == "exception"
    launcher = "E1229 21:58:40.6 655 torch/distributed/elastic/x.py:8] failed (exitcode: 1) local_rank: 0 (pid: 7)\n"
    assert told(tmp_path, UNPACK + MISSING + launcher).diagnoses[0].id == "exception"


def test_a_peer_that_was_lost_tells_of_several_processes(tmp_path: Path) -> None:
    lost = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:54168"
    peer = UNPACK.replace("ValueError: too many values to unpack (expected 2)", lost)
    assert told(tmp_path, UNPACK + peer).diagnoses[0].id == "exception"


def test_a_warning_that_every_process_prints_first_begins_no_run(tmp_path: Path) -> None:
    warning = "/venv/torch/x.py:3: FutureWarning: pynvml is deprecated\n  import pynvml\n"
    assert told(tmp_path, warning + UNPACK + warning).verdict == "explained"


def test_a_run_that_was_cancelled_and_started_again_has_not_failed(tmp_path: Path) -> None:
    head = "Thu Oct 16 01:38:22 2025\n| NVIDIA-SMI 570.158.01 Driver Version: 570.158.01 |\n"
    assert told(tmp_path, head + CANCELLED + head + "step 5 loss 0.3\ntraining finished\n").verdict == "no-failure"
    assert told(tmp_path, head + UNPACK + head + CANCELLED).diagnoses[0].id == "cancelled"


@pytest.mark.parametrize("bar", [" 51%|█████▏    | 92/179 [00:59<00:56,  1.54it/s]", "92it [00:59,  2.38s/it]"])
def test_what_stands_behind_a_progress_bar_is_read(tmp_path: Path, bar: str) -> None:
    first = told(tmp_path, f"{bar}\r{bar}{CANCELLED}").diagnoses[0]
    assert (first.id, first.nodes) == ("cancelled", ("gpu10",))


@pytest.mark.parametrize(
    "text",
    [
        "terminate called without an active exception\n",
        "FATAL: exception not rethrown\n",
        "pure virtual method called\nterminate called without an active exception\n",
        "Fatal Python error: _enter_buffered_busy: could not acquire lock for <_io.BufferedWriter name='<stdout>'> at "
        "interpreter shutdown, possibly due to daemon threads\nPython runtime state: finalizing (tstate=0x1)\n",
    ],
)
@pytest.mark.parametrize("before", ["step 10 loss 0.2\n", "step 10 loss 0.2\ntraining finished\n"])
@pytest.mark.parametrize("end", ["Aborted (core dumped)\n", "failed (exitcode: -6) local_rank: 1 (pid: 15)\n"])
def test_a_process_that_aborts_while_it_ends_has_failed(tmp_path: Path, before: str, text: str, end: str) -> None:
    found = told(tmp_path, before + text + end)
    assert found.verdict == "explained"
    assert found.diagnoses[0].id == "aborted-at-exit"
    assert "destroy_process_group" in found.diagnoses[0].fix


def test_an_abort_behind_the_end_of_the_training_is_one_of_the_end(tmp_path: Path) -> None:
    found = told(tmp_path, "training finished\nfailed (exitcode: -6) local_rank: 1 (pid: 15)\n")
    assert (found.verdict, found.diagnoses[0].id) == ("explained", "aborted-at-exit")


def test_an_exception_comes_before_the_abort_that_it_leads_to(tmp_path: Path) -> None:
    text = UNPACK + "terminate called without an active exception\nfailed (exitcode: -6) local_rank: 0 (pid: 15)\n"
    assert told(tmp_path, text).diagnoses[0].id == "exception"


def test_a_worker_that_the_agent_killed_is_not_the_first_failure(tmp_path: Path) -> None:
    row = (
        "  time      : {time}\n  host      : gpu01\n  rank      : {rank} (local_rank: {rank})\n"
        "  exitcode  : {code} (pid: 7)\n"
    )
    found = told(
        tmp_path,
        "train.py FAILED\nFailures:\n[1]:\n"
        + row.format(time="2026-09-07_13:03:29", rank=0, code=-9)
        + "Root Cause (first observed failure):\n[0]:\n"
        + row.format(time="2026-09-07_13:02:58", rank=1, code=1)
        + "=====\n",
    )
    first = found.diagnoses[0]
    assert (found.verdict, first.id, first.ranks) == ("failed-unknown", "worker-failed", (1,))


def test_a_file_that_python_cannot_read_is_a_run_of_its_own(tmp_path: Path) -> None:
    text = '  File "make.py", line 71\n    data = f(data)\n    ^\nSyntaxError: invalid syntax\n'
    assert told(tmp_path, text + MISSING).diagnoses[0].id == "missing-file"


def test_a_command_that_a_shell_did_not_find_is_not_the_cause_of_what_ran_without_it(tmp_path: Path) -> None:
    missed = "/var/spool/slurm_script: line 9: SBATCH: command not found\n"
    assert told(tmp_path, missed + UNPACK).diagnoses[0].id == "exception"
    no_torch = UNPACK.replace("ValueError: too many values to unpack (expected 2)", "{error}")
    found = told(tmp_path, missed + no_torch.format(error="ModuleNotFoundError: No module named 'torch'"))
    assert found.diagnoses[0].id == "command-missing"


@pytest.mark.parametrize("end", ["End training....", "Treinamento concluído com sucesso", "训练完成"])
def test_what_is_cleared_away_behind_the_end_is_no_failure(tmp_path: Path, end: str) -> None:
    cleared = 'Traceback (most recent call last):\n  File "/x/writer.py", line 9, in run\nOSError: handle is closed\n'
    assert told(tmp_path, cleared.replace("x/", "job/") + "step 7 loss 0.1\n" * 6 + end + "\n").verdict == "no-failure"


def test_a_rank_of_horovodrun_is_read(tmp_path: Path) -> None:
    assert told(tmp_path, "[3]<stderr>:torch.OutOfMemoryError: CUDA out of memory. Tried\n").diagnoses[0].ranks == (3,)


@pytest.mark.parametrize("ended", [
    {"status": "failed", "error": "/x/RUN already exists"},
    {"status": "failed"},
    {"status": "failed", "first_failure": {"node": "n1", "rank": 1, "signal": 6, "exit_code": None}},
])  # fmt: skip
def test_a_run_that_left_only_its_record_is_not_healthy(tmp_path: Path, ended: dict[str, object]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "done", "time": 1.0, "run": "RUN", **ended}) + "\n")
    found = explain_all([tmp_path])
    assert found.verdict != "no-failure"
    assert found.diagnoses[0].evidence[0].file == str(tmp_path / "events.jsonl")
    assert "None" not in found.diagnoses[0].cause


def test_a_folder_with_neither_logs_nor_a_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no logs"):
        explain_all([tmp_path])


def test_the_recorded_end_of_a_run_decides_whether_it_failed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n")
    agent = {"node": "node1", "rank": None, "exit_code": 181, "signal": None}
    for ended, verdict in (
        ({"status": "succeeded"}, "no-failure"),
        ({"status": "failed", "first_failure": agent}, "explained"),
    ):
        (tmp_path / "events.jsonl").write_text(json.dumps({"event": "done", "time": 1.0, "run": "RUN", **ended}) + "\n")
        assert explain_all([tmp_path]).verdict == verdict
    (tmp_path / "logs" / "rank-0.log").write_text("all is well\n")
    found = explain_all([tmp_path])
    assert (found.verdict, found.diagnoses[0].primary) == ("failed-unknown", True)
    assert "the agent on node1 ended with exit code 181" in found.diagnoses[0].cause


def test_the_last_line_of_the_program_is_not_one_of_torchruns_report(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text(
        "+- Unrecognized options ---+\n| Unrecognized options: -x |\n+--------------------------+\n"
        "Failures:\n  <NO_OTHER_FAILURES>\nRoot Cause (first observed failure):\n[0]:\n"
        "  rank      : 0 (local_rank: 0)\n  exitcode  : 2 (pid: 7)\n  error_file: <N/A>\n"
    )
    found = explain_all([tmp_path])
    assert "rank      :" not in found.diagnoses[0].cause
    assert "Unrecognized options: -x" in found.diagnoses[0].cause
