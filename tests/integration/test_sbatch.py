"""Batch files given to real Slurm: the same workers as over SSH, and what ends early is gone on with."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.sandbox import control, slurm
from tests.facts import missing
from tests.hosts import Project, wait_until
from tests.integration.slurm_hosts import ask, cluster, shared, state

__all__ = ["cluster", "shared"]

SPEC = """\
cluster: {{transport: {transport}, nodes: 2, slots: 2}}
job:
  name: "a b"
  {program}
  args: ["it's", "\\\\$HOME", "a,b", "", "x\\ny", "é"]
  env: {{VALUE: "a,b 'c' \\"d\\"\\n$(e) `f` \\\\", LIST: "mlx5_0,mlx5_1"}}
train: {{steps: 5}}
"""
PYTHON = f"python: {json.dumps(sys.executable)}"
GOLDEN = Path(__file__).parents[1] / "golden" / "sbatch"
PLACES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "DTCTL_NNODES", "DTCTL_NODE_RANK"}
PLACES |= {"NODE_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"}
PLACES |= {"DTCTL_SLOTS", "DTCTL_NODE", "DTCTL_ATTEMPT", "DTCTL_TRAIN_CONFIG", "VALUE", "LIST", "OMP_NUM_THREADS"}
TELL = f"""\
import json, os, sys
found = {{name: os.environ.get(name, "") for name in {sorted(PLACES)}}}
# In one piece: torchrun passes on what two workers write at the same time as it comes.
sys.stdout.write("SAID " + json.dumps([os.environ["RANK"], sys.argv[1:], found]) + "\\n")
sys.stdout.flush()
"""


def submitted(project: Project) -> tuple[str, Path]:
    done = project.run("sbatch", "--submit", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    return said["job"], Path(said["log"])


def told(text: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Rank -> its argv and the part of its environment that a launcher decides on. Short: srun cuts long lines."""
    rows = [json.loads(line.partition("SAID ")[2]) for line in text.splitlines() if "SAID " in line]
    return {rank: (argv, env) for rank, argv, env in rows}


@pytest.mark.parametrize("program", ["kind: direct\n  script: tell.py", "kind: torchrun\n  script: tell.py"])
def test_the_workers_are_those_of_a_launch(shared: Project, program: str) -> None:
    shared.write("tell.py", TELL)
    shared.write(
        "dtctl.yaml", SPEC.format(transport="slurm", program=program).replace("slots: 2", "slots: 2, " + PYTHON)
    )
    job, log = submitted(shared)
    wait_until(lambda: state(shared, job) in ("COMPLETED", "FAILED"), 60, "the job ends")
    by_slurm = told(log.read_text())
    shared.write("dtctl.yaml", SPEC.format(transport="sandbox", program=program))
    launched = shared.run("launch")
    assert launched.code == 0, launched.err
    assert sorted(by_slurm) == ["0", "1", "2", "3"], log.read_text()
    assert by_slurm == told(launched.out + launched.err)


def test_a_worker_that_fails_fails_the_job(shared: Project) -> None:
    shared.write("bad.py", "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(1000)\n")
    shared.write("dtctl.yaml", SPEC.format(transport="slurm", program="kind: direct\n  script: bad.py"))
    job, log = submitted(shared)
    wait_until(lambda: state(shared, job) == "FAILED", 30, "the job fails")
    assert "first failure: rank 1 on node1 ended with exit code 3" in log.read_text()


BY_HAND = """\
cluster: {{transport: slurm, nodes: 2, slots: 1, python: {python}}}
job: {{name: hand, script: wait.py, kind: direct, grace_s: 1}}
slurm: {{partition: main{more}}}
"""


def by_hand(project: Project, script: str, *, more: str = "") -> str:
    """The number of a job whose file was written by dtctl, and submitted by its user."""
    project.write("wait.py", script)
    project.write("dtctl.yaml", BY_HAND.format(python=json.dumps(sys.executable), more=more))
    written = project.run("sbatch", "--out", "job.sbatch")
    assert written.code == 0, written.err
    argv = ["sbatch", "--parsable", "job.sbatch"]
    done = subprocess.run(argv, cwd=project.folder, env=project.env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_file_that_was_submitted_by_hand_is_known_by_its_number(shared: Project) -> None:
    job = by_hand(shared, "import os, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(1000)\n")
    wait_until(lambda: shared.run("logs", job).out.count("rank ") == 2, what="its workers have printed")
    told = json.loads(shared.run("status", job, "--json").out)
    assert (told["status"], told["job"], told["nodes"]) == ("running", job, {"node1": "running", "node2": "running"})
    stopped = shared.run("stop", job, "--json")
    assert (stopped.code, json.loads(stopped.out)["left_behind"]) == (0, 0), stopped.err
    assert state(shared, job) == "CANCELLED"
    ended = json.loads(shared.run("status", job, "--json").out)
    assert (ended["status"], ended["done"]["exit_code"]) == ("stopped", 143)
    unknown = shared.run("status", "987654")
    assert unknown.code == 7
    assert not missing(unknown.err, "job 987654 folder")


def test_a_task_of_an_array_is_known_by_its_number_and_a_failure_is_told(shared: Project) -> None:
    fails = "import os, sys\nprint('task', os.environ['SLURM_ARRAY_TASK_ID'])\nsys.exit(int(os.environ['RANK']) * 3)\n"
    job = by_hand(shared, fails, more=", array: 3-4")
    wait_until(lambda: state(shared, f"{job}_4") == "FAILED", 60, "the last task fails")
    told = json.loads(shared.run("status", f"{job}_4", "--json").out)
    assert told["status"] == "failed"
    assert (told["done"]["first_failure"]["rank"], told["done"]["first_failure"]["exit_code"]) == (1, 3)
    assert "task 4" in shared.run("logs", f"{job}_4").out
    array = shared.run("status", job)
    assert array.code == 7
    assert not missing(array.err, f"job {job} array {job}_3 {job}_4")


def test_a_job_that_waits_is_known_by_its_number(shared: Project) -> None:
    job = by_hand(shared, "", more=", extra: {begin: now+1hour}")
    told = json.loads(shared.run("status", job, "--json").out)
    assert (told["status"], told["job"]) == ("queued", job)
    assert shared.run("stop", job).code == 0
    assert state(shared, job) == "CANCELLED"


@pytest.mark.parametrize(("requeues", "ends"), [(1, "PENDING"), (0, "FAILED")])
def test_what_is_warned_saves_and_is_started_again_within_its_budget(shared: Project, requeues: int, ends: str) -> None:
    shared.write("wait.py", WAIT)
    spec = SPEC.format(transport="slurm", program="kind: direct\n  script: wait.py")
    shared.write("dtctl.yaml", spec + f"slurm: {{requeues: {requeues}}}\n")
    job, log = submitted(shared)
    wait_until(lambda: log.exists() and log.read_text().count("start 0 ready") == 4, what="it runs")
    ask(shared, "scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: state(shared, job) == ends, 30, "Slurm has it again, or not")
    again = (
        "dtctl: to be started again" if requeues else "started 0 times again, which is all that slurm.requeues allows"
    )
    assert again in log.read_text()
    ask(shared, "scancel", job)


WAIT = """\
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("start", os.environ["DTCTL_ATTEMPT"], "ready", flush=True)
time.sleep(1000)
"""


def test_slurm_takes_every_kept_batch_file(sandbox_env: dict[str, str], tmp_path: Path) -> None:
    """The files of tests/golden, on a cluster of 6 nodes that have 8 GPUs each by Slurm's count."""
    mine = control.start_sandbox(f"slurm-{secrets.token_hex(3)}", nodes=6, with_slurm=True)
    try:
        env = {**sandbox_env, **slurm.build_slurm_environment(mine)}
        for kept in sorted(GOLDEN.glob("*.sbatch")):
            argv = ["sbatch", "--test-only", f"--chdir={tmp_path}", str(kept)]
            done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
            assert (done.returncode, "to start at" in done.stderr) == (0, True), (kept.name, done.stderr)
    finally:
        control.remove_sandbox(mine.name)


@pytest.mark.parametrize("launcher", ["auto", "none"])
def test_every_index_of_an_array_is_a_run_of_its_own(shared: Project, launcher: str) -> None:
    shared.write("tell.py", "import os\nprint('RUN', os.environ['DTCTL_RUN_ID'], os.environ['RANK'], flush=True)\n")
    spec = SPEC.format(transport="slurm", program="kind: direct\n  script: tell.py")
    shared.write("dtctl.yaml", spec + f'slurm: {{array: "3-4", launcher: {launcher}}}\n')
    done = shared.run("sbatch", "--submit", "--json")
    said = json.loads(done.out)

    def output() -> str:
        return "".join(path.read_text() for path in Path(said["log"]).parent.glob("*.log"))

    wait_until(lambda: output().count("dtctl: ended with exit code 0") == 2, 60, "both have ended")
    told = sorted(line.partition("RUN ")[2].split() for line in output().splitlines() if "RUN " in line)
    assert told == [[f"{said['run']}.{index}", str(rank)] for index in (3, 4) for rank in range(4)]


def test_what_is_kept_is_for_this_user_alone(shared: Project) -> None:
    shared.write("tell.py", TELL)
    shared.write("dtctl.yaml", SPEC.format(transport="slurm", program="script: tell.py"))
    job, log = submitted(shared)
    ask(shared, "scancel", job)
    state_dir = shared.folder / ".dtctl"
    for folder in (state_dir, state_dir / "slurm", log.parent, log.parent / "work"):
        assert folder.stat().st_mode & 0o777 == 0o700, folder
    assert (log.parent / "spec.yaml").stat().st_mode & 0o777 == 0o600
    assert (state_dir / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ("slurm: {partition: nowhere}", 4, "there is no partition nowhere"),
        ('slurm: {time: "2-0"}', 4, "2-0 is more than partition main allows"),
        ("slurm: {gres: 'gpu:9'}", 4, "0 of the 2 nodes of partition main have gpu:9, and the job needs 2"),
        ("slurm: {extra: {mincpus: 9999}}", 7, "node configuration is not available"),
    ],
)
def test_what_can_never_start_is_refused_before_it_is_submitted(
    shared: Project, more: str, code: int, words: str
) -> None:
    shared.write("tell.py", TELL)
    shared.write("dtctl.yaml", SPEC.format(transport="slurm", program="script: tell.py") + more + "\n")
    done = shared.run("sbatch", "--submit")
    assert done.code == code, done.err
    assert words.lower() in done.err.lower(), done.err
    if code == 4:
        assert "dtctl.yaml:" in done.err


def test_more_nodes_than_there_are(shared: Project) -> None:
    shared.write("tell.py", TELL)
    text = SPEC.format(transport="slurm", program="script: tell.py").replace("nodes: 2", "nodes: 9")
    shared.write("dtctl.yaml", text)
    done = shared.run("launch")
    assert done.code == 4, done.err
    assert not missing(done.err, "9 nodes partition main 2")


def test_a_machine_without_slurm(shared: Project, tmp_path: Path) -> None:
    shared.write("tell.py", TELL)
    shared.write("dtctl.yaml", SPEC.format(transport="slurm", program="script: tell.py"))
    done = shared.run("sbatch", "--submit", env={"PATH": str(tmp_path)})
    assert done.code == 7
    assert "there is no sbatch on this machine" in done.err


CHATTY = """\
#!/bin/sh
echo "3 jobs wait before yours"
echo 12
exec {sbatch} "$@"
"""
FAILING = """\
#!/bin/sh
{sbatch} "$@" >/dev/null || exit $?
case $* in *--test-only*) exit 0;; esac
echo "your job is counted" >&2
exit 1
"""


@pytest.mark.parametrize("wrapper", [CHATTY, FAILING], ids=["chatty", "failing"])
def test_a_sites_own_sbatch_leaves_no_job_that_nobody_knows(shared: Project, tmp_path: Path, wrapper: str) -> None:
    """It prints more than the number, or fails after Slurm has taken the job."""
    real = shutil.which("sbatch", path=shared.env["PATH"])
    own = tmp_path / "bin" / "sbatch"
    own.parent.mkdir()
    own.write_text(wrapper.format(sbatch=real))
    own.chmod(0o755)
    shared.write("tell.py", TELL)
    shared.write(
        "dtctl.yaml",
        SPEC.format(transport="slurm", program="script: tell.py").replace("slots: 2", "slots: 2, " + PYTHON),
    )
    done = shared.run("launch", "--json", env={"PATH": f"{own.parent}:{shared.env['PATH']}"})
    assert done.code == 0, done.err
    assert done.done["status"] == "succeeded"
    assert "SAID" in done.err


def test_a_launcher_that_was_changed_is_not_started(shared: Project) -> None:
    shared.write("tell.py", "print('RAN')\n")
    shared.write("dtctl.yaml", SPEC.format(transport="slurm", program="kind: direct\n  script: tell.py"))
    assert shared.run("sbatch", "--out", "job.sbatch").code == 0
    with (shared.folder / "job.launcher.zip").open("ab") as file:
        file.write(b"more")
    argv = ["sbatch", "--wait", "--output=job.log", "job.sbatch"]
    done = subprocess.run(argv, cwd=shared.folder, env=shared.env, capture_output=True, text=True, check=False)
    assert done.returncode == 73
    log = (shared.folder / "job.log").read_text()
    assert "RAN" not in log
    assert not missing(log, "dtctl error job.launcher.zip submitted disk")


def test_a_job_runs_where_compute_nodes_have_no_scontrol(shared: Project) -> None:
    """Some sites keep it on login nodes; srun is what a job needs."""
    shared.write("tell.py", "import os\nprint('RUN', os.environ['RANK'], flush=True)\n")
    shared.write("dtctl.yaml", SPEC.format(transport="slurm", program="kind: direct\n  script: tell.py"))
    assert shared.run("sbatch", "--out", "job.sbatch").code == 0
    tools = shared.folder / "tools"
    tools.mkdir()
    for folder in map(Path, shared.env["PATH"].split(":")):
        for program in folder.glob("*"):
            if program.name not in ("scontrol", "squeue") and not (tools / program.name).is_symlink():
                (tools / program.name).symlink_to(program)
    argv = ["sbatch", "--wait", "--output=job.log", f"--export=PATH={tools}", "job.sbatch"]
    done = subprocess.run(argv, cwd=shared.folder, env=shared.env, capture_output=True, text=True, check=False)
    log = (shared.folder / "job.log").read_text()
    assert done.returncode == 0, log
    assert sorted(line.partition("RUN ")[2] for line in log.splitlines() if "RUN " in line) == ["0", "1", "2", "3"]
    assert "dtctl: there is no scontrol on this node" in log
