"""`dtctl doctor --log` as people and programs call it, and what a failed launch says by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import dtctl


def test_json_says_cause_culprit_and_evidence(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("[rank1]: OSError: [Errno 28] No space left on device\n")
    (tmp_path / "b.log").write_text("[rank0]: RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:5\n")
    done = dtctl("doctor", "--log", "a.log", "--log", "b.log", "--json", cwd=tmp_path)
    assert done.returncode == 9, done.stderr
    first, second = json.loads(done.stdout)["diagnoses"]
    assert (first["id"], first["ranks"], first["primary"], first["confidence"]) == ("disk-full", [1], True, "medium")
    assert first["evidence"] == [
        {"file": "a.log", "line": 1, "text": "[rank1]: OSError: [Errno 28] No space left on device"}
    ]
    assert {"cause", "nodes", "fix"} < set(first)
    assert (second["id"], second["primary"]) == ("peer-closed", False)


def test_several_paths_may_follow_one_option_and_a_folder_means_its_logs(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("OSError: [Errno 28] No space left on device\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.out").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    done = dtctl("doctor", "--log", "a.log", "more", "--json", cwd=tmp_path)
    assert {diagnosis["id"] for diagnosis in json.loads(done.stdout)["diagnoses"]} == {"disk-full", "cuda-oom"}


def test_a_link_that_leads_nowhere_keeps_nobody_from_the_other_logs(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.log").write_text("OSError: [Errno 28] No space left on device\n")
    (tmp_path / "more" / "b.log").symlink_to("nowhere")
    (tmp_path / "more" / "c.log").symlink_to("x" * 300)
    (tmp_path / "more" / "d.log").symlink_to("d.log")
    done = dtctl("doctor", "--log", "more", "--json", cwd=tmp_path)
    assert done.returncode == 9, done.stderr
    assert json.loads(done.stdout)["diagnoses"][0]["id"] == "disk-full"


def test_a_log_without_a_failure_has_exit_code_0(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("all is well\n")
    done = dtctl("doctor", "--log", "a.log", cwd=tmp_path)
    assert done.returncode == 0
    assert "no failure in these logs" in done.stdout


@pytest.mark.parametrize("path", ["missing.log", "empty"])
def test_a_path_without_logs_is_an_error_that_names_it(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    done = dtctl("doctor", "--log", path, cwd=tmp_path)
    assert done.returncode == 2
    assert path in done.stderr


def test_of_several_folders_those_without_logs_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    for run in ("first", "second", "third"):
        (tmp_path / run / "logs").mkdir(parents=True)
    (tmp_path / "second" / "logs" / "job.log").write_text("OSError: [Errno 28] No space left on device\n")
    folders = ["first/logs", "second/logs", "third/logs"]
    done = dtctl("doctor", "--log", *folders, "--json", cwd=tmp_path)
    assert done.returncode == 9, done.stderr
    told = json.loads(done.stdout)
    assert [diagnosis["id"] for diagnosis in told["diagnoses"]] == ["disk-full"]
    assert [unread["file"] for unread in told["unread"]] == ["first/logs", "third/logs"]
    assert "first/logs" in done.stderr
    assert "second/logs" not in done.stderr


def test_several_folders_of_which_none_has_logs_are_an_error_that_names_them_all(tmp_path: Path) -> None:
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
    done = dtctl("doctor", "--log", "first", "second", cwd=tmp_path)
    assert done.returncode == 2
    assert "first" in done.stderr
    assert "second" in done.stderr


def test_a_failed_launch_tells_the_cause_by_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('/dev/full', 'w').write('x' * 100000)\n")
    (tmp_path / "dtctl.yaml").write_text(
        f"cluster: {{transport: local, workdir: {tmp_path}/node}}\njob: {{script: train.py, kind: direct}}\n"
    )
    done = dtctl("launch", cwd=tmp_path)
    assert done.returncode == 8, done.stderr
    assert "cause: the disk of this node" in done.stderr
    assert "fix: df -h" in done.stderr


KILLED = """\
import os, pathlib, signal, sys, time
print("begins", flush=True)
if os.environ["RANK"] == "1" and os.environ["DTCTL_ATTEMPT"] in sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
"""


@pytest.mark.parametrize(
    ("fails_in", "restarts", "found"),
    [([0], 0, True), ([0], 1, False), ([0, 1], 1, True), ([], 0, False)],
    ids=["killed", "killed, then well", "killed twice", "well"],
)
def test_the_record_of_a_run_tells_what_its_logs_do_not(
    tmp_path: Path, fails_in: list[int], restarts: int, found: bool
) -> None:
    """A worker that gets SIGKILL prints nothing about it."""
    (tmp_path / "train.py").write_text(KILLED)
    (tmp_path / "dtctl.yaml").write_text(
        f"cluster: {{transport: local, slots: 2}}\n"
        f"job: {{script: train.py, kind: direct, args: {fails_in}, max_restarts: {restarts}, grace_s: 0}}\n"
    )
    dtctl("launch", cwd=tmp_path)
    (run,) = (tmp_path / ".dtctl" / "runs").iterdir()
    for path in (str(run), str(run / "logs")):
        done = dtctl("doctor", "--log", path, "--json", cwd=tmp_path)
        assert done.returncode == (9 if found else 0), done.stdout
        primary = [each for each in json.loads(done.stdout)["diagnoses"] if each["primary"]]
        assert [(each["id"], each["ranks"]) for each in primary] == [("killed", [1])] * found
