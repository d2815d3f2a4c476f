"""How sure an answer about a log is, by the evidence in it; harmless words make no failure of a healthy log."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.doctor.explain.attribution import node_named, rank_named
from dtctl.doctor.explain.diagnose import explain_all

CAUSE = """Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    loss.backward()
RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB
"""
OTHER = """Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    split = data[name]
KeyError: 'valid'
"""


def confidence(tmp_path: Path, text: str) -> str:
    (tmp_path / "job.log").write_text(text)
    return explain_all([tmp_path / "job.log"]).diagnoses[0].confidence


def test_evidence_decides_and_not_the_text_alone(tmp_path: Path) -> None:
    assert confidence(tmp_path, CAUSE) == "high"
    assert confidence(tmp_path, "ERROR: the licence server gave up\n" + CAUSE) == "medium"  # what came first is unknown
    between = "".join(f"line {number} of the set-up\n" for number in range(40))
    assert confidence(tmp_path, CAUSE + between + OTHER) == "low"  # one process cannot end twice


def test_what_a_line_calls_a_warning_is_a_guess(tmp_path: Path) -> None:
    text = "/job/a.py:3: UserWarning: libfoo.so: cannot open shared object file: No such file or directory\n"
    (tmp_path / "job.log").write_text(text + "failed (exitcode: 1) local_rank: 1 (pid: 7)\n")
    assert explain_all([tmp_path / "job.log"]).verdict == "failed-unknown"


HEALTHY = (
    "Napoleon died on 5 May 1821, and the war had ended on 9 June.\nstep 3 loss 2.0\n",  # samples that a model wrote
    "/var/spool/job/slurm_script: line 3: module: command not found\n" + "a line of the program\n" * 30,
    "Failed to load 0307_2113.pkl\nloading the 4th file of 9\n",
    "[INFO:swift] Traceback (most recent call last):\n  File \"/lib/swift/utils.py\", line 9, in encode\n    raise E\n"
    "TypeError: 'str' object cannot be interpreted as an integer\nanother one is taken\nTrain: 40/40 loss: 1.0\n",
    "/usr/lib/python3.10/multiprocessing/resource_tracker.py:237: UserWarning: resource_tracker: '/e9': [Errno 2] No "
    "such file or directory: '/e9'\nstep 9 loss 1.0\n",
    "COMPUTE_DTYPE: torch.float32 (auto-detected: CUDA SM 75, bf16 not supported, using fp32)\nstep 1 loss 4.0\n",
)  # fmt: skip


@pytest.mark.parametrize("text", HEALTHY)
def test_harmless_words_are_no_failure(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.log").write_text(text)
    assert explain_all([tmp_path / "job.log"]).verdict == "no-failure"


@pytest.mark.parametrize(
    ("text", "rank", "node"),
    [
        ("ERROR:composer.cli.launcher:Global rank 3 (PID 147193) exited with code 1", 3, None),
        ("[sciml2302.example.org] Rank 7, Local Rank 3: stack.size() failed", 7, "sciml2302.example.org"),
        ("[ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call failed", 1, None),
        ("[proxy:0:2@gpu-2-4.local] HYDU_create_process: execvp error on file 0", None, "gpu-2-4.local"),
        ("[mpiexec@cpu-6-2.local] one of the processes terminated badly; aborting", None, "cpu-6-2.local"),
        ("=   PID 4821 RUNNING AT fv-az557-506", None, "fv-az557-506"),
        ("srun: error: Task launch for 36.0 failed on node cn131: Job credential expired", None, "cn131"),
        ("Error: failed to run torchrun on gpu-1648, is localhost: False, exception: refused", None, "gpu-1648"),
        ("waiting for rank 3 of 8", None, None),
        ("loss 0.3 on worker threads", None, None),
    ],
)
def test_a_line_names_who_something_happened_to(text: str, rank: int | None, node: str | None) -> None:
    assert rank_named(text) == rank
    assert node_named(text) == node
