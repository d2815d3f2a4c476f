"""What sbatch and srun take from their surroundings, and what a job leaves on its nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.launch.records.record import list_run_records
from dtctl.slurm.job_watcher import read_job_reference
from tests.hosts import Project, wait_until
from tests.integration.progress_job import breaks_at_30
from tests.integration.slurm_hosts import cluster, fields, shared, state

__all__ = ["cluster", "shared"]

SPEC = """\
cluster: {{transport: slurm, nodes: {nodes}, slots: 1, python: {python}}}
job: {{name: test, script: train.py, kind: direct{job}}}
slurm: {{partition: main{slurm}}}
"""
TELL = """\
import json, os
keep = ("SLURM_JOB_PARTITION", "SLURM_CPUS_PER_TASK", "KEY", "OMP_NUM_THREADS")
print("SAID", json.dumps({name: os.environ.get(name) for name in keep}), flush=True)
print("BYTES", sum(len(value) for name, value in os.environ.items() if name.startswith("LARGE_")), flush=True)
"""


def write(project: Project, *, nodes: int = 1, job: str = "", slurm: str = "", script: str = TELL) -> None:
    project.write("train.py", script)
    project.write("dtctl.yaml", SPEC.format(nodes=nodes, python=json.dumps(sys.executable), job=job, slurm=slurm))


def said(text: str) -> dict[str, str | None]:
    line = next(line for line in text.splitlines() if "SAID " in line)
    return dict(json.loads(line.partition("SAID ")[2]))


def notes(events: list[dict[str, object]]) -> str:
    return " ".join(str(event["text"]) for event in events if event["event"] == "note")


def test_variables_of_sbatch_do_not_beat_the_spec(shared: Project) -> None:
    write(shared, job=", secrets: [KEY]", slurm=", cpus_per_task: 3")
    env = {
        "KEY": "secret",
        "SBATCH_PARTITION": "urgent",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_TIMELIMIT": "7",
        "SLURM_EXPORT_ENV": "NONE",
        "SLURM_CPUS_PER_TASK": "1",  # of an allocation that the shell is in
    }
    done = shared.run("launch", "--json", env=env)
    assert done.code == 0, done.err
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "3")}  # what the shell says wins
    assert said(done.err) == {"SLURM_JOB_PARTITION": "main", "SLURM_CPUS_PER_TASK": "3", "KEY": "secret", **threads}
    told = notes(done.events)
    assert all(name in told for name in ("SBATCH_PARTITION", "SBATCH_EXPORT", "SBATCH_TIMELIMIT", "SLURM_EXPORT_ENV"))
    submitted = next(event for event in done.events if event["event"] == "submitted")
    assert fields(shared, str(submitted["job"]))["TimeLimit"] == "00:07:00"  # the spec says nothing of it


def test_a_batch_file_that_was_submitted_without_variables(shared: Project) -> None:
    """`--export=NONE` is many a site's advice; workers get what the spec says all the same, and a secret is missed."""
    write(shared, job=", env: {LARGE_1: abc}")
    assert shared.run("sbatch", "--out", "job.sbatch").code == 0
    argv = ["sbatch", "--parsable", "--export=NONE", "--output=job.log", "job.sbatch"]
    job = subprocess.run(argv, cwd=shared.folder, env=shared.env, capture_output=True, text=True, check=True).stdout
    wait_until(lambda: state(shared, job.strip()) in ("COMPLETED", "FAILED"), 60, "it ends")
    log = (shared.folder / "job.log").read_text()
    assert "BYTES 3" in log, log
    assert said(log)["OMP_NUM_THREADS"] == "1"  # of one core, which is what Slurm gives a task unasked
    write(shared, job=", secrets: [KEY]")
    assert shared.run("sbatch", "--out", "job.sbatch", env={"KEY": "x"}).code == 0
    argv[3] = "--output=other.log"
    job = subprocess.run(argv, cwd=shared.folder, env=shared.env, capture_output=True, text=True, check=True).stdout
    wait_until(lambda: state(shared, job.strip()) in ("COMPLETED", "FAILED"), 60, "it ends")
    assert state(shared, job.strip()) == "FAILED"
    assert "KEY is not set" in (shared.folder / "other.log").read_text()


def test_a_large_environment_reaches_the_workers(shared: Project) -> None:
    """No argument of a program may have more than 128 KiB, and the script of a task is one."""
    size, count = 20_000, 20
    write(shared, job=f", env: {{{', '.join(f'LARGE_{n}: {chr(97 + n) * size}' for n in range(count))}}}")
    done = shared.run("launch")
    assert done.code == 0, done.err
    assert f"BYTES {size * count}" in done.out


def test_files_of_progress_lie_in_the_folder_of_the_job(shared: Project) -> None:
    """Not in /tmp, where a job that Slurm kills would leave them."""
    script = "import os\nprint('UMASK', oct(os.umask(0)))\nprint('FOLDER', os.environ['DTCTL_PROGRESS'], flush=True)\n"
    write(shared, nodes=2, script=script)
    before = os.umask(0o002)  # sbatch keeps it for the job
    try:
        done = shared.run("launch", "--json")
    finally:
        os.umask(before)
    assert done.code == 0, done.err
    assert done.err.count("UMASK 0o2") == 2, done.err
    job = Path(read_job_reference(list_run_records(shared.folder)[-1]).folder)
    found = {Path(line.split()[-1]) for line in done.err.splitlines() if "FOLDER" in line}
    assert len(found) == 2, "one for each node"
    assert all(job in folder.parents for folder in found)


def test_a_batch_file_notices_that_its_job_hangs(shared: Project) -> None:
    script = breaks_at_30("os.kill(os.getpid(), signal.SIGSTOP)")
    write(shared, nodes=2, job=", max_restarts: 1, hang_s: 2", script=script)
    done = shared.run("sbatch", "--submit", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    wait_until(lambda: state(shared, answer["job"]) in ("COMPLETED", "FAILED"), 120, "it ends")
    log = Path(answer["log"]).read_text()
    assert state(shared, answer["job"]) == "COMPLETED", log
    (stacks,) = Path(answer["log"]).parent.glob("*/control/hangs/attempt-0")
    assert str(stacks.parent) in log
    assert [path.read_text()[:7] for path in stacks.glob("*/rank-1.txt")] == ["state T"]


KEEP = """\
import os
from pathlib import Path
out = Path("out")
out.mkdir(exist_ok=True)
print("FOUND", len(list(out.glob("step-*"))), flush=True)
(out / f"step-{os.environ['DTCTL_RUN_ID']}").write_text("weights")
if not os.path.islink("out/latest"):
    os.symlink(f"step-{os.environ['DTCTL_RUN_ID']}", "out/latest")
"""


@pytest.mark.parametrize("push", ["true", "false"])
def test_outputs_come_back_and_another_run_goes_on_in_them(shared: Project, push: str) -> None:
    write(shared, script=KEEP)
    name = "train.py" if push == "true" else f"{shared.folder}/train.py"
    spec = shared.folder / "dtctl.yaml"
    more = f"script: {name}, outputs: [out/], files: {{push: {push}}}"
    spec.write_text(spec.read_text().replace("script: train.py", more))
    first = shared.run("launch", "--json", "--name", "first")
    assert "FOUND 0" in first.err, first.err
    second = shared.run("launch", "--json", "--name", "second", "--resume", "first")
    assert "FOUND 1" in second.err, second.err
    third = shared.run("launch", "--json", "--name", "third")
    assert "FOUND 0" in third.err, third.err
    assert (first.code, second.code, third.code) == (0, 0, 0)
    (there,) = second.done["outputs"].values()  # type: ignore[attr-defined]
    # As over SSH: files with contents, and not links to them, which are brought all the same.
    assert (there["files"], Path(there["folder"]).name) == (2, "work")
    fetched = shared.run("fetch", "second", "--json")
    assert fetched.code == 0, fetched.err
    answer = json.loads(fetched.out)
    folder = Path(answer["folder"]) / "slurm"
    assert {path.name for path in (folder / "out").iterdir()} == {"step-first", "step-second", "latest"}
    assert (folder / "out" / "latest").read_text() == "weights"
    assert answer["nodes"]["slurm"]["files"] == 3
    assert shared.run("fetch", "second", "--json").code == 0
    assert shared.run("fetch", "second", "--node", "node1").code == 2
    assert "starts anew" not in second.err
    (shared.folder / "train.py").write_text("import time\ntime.sleep(300)\n")
    assert shared.run("launch", "--detach", "--name", "empty").code == 0
    stopped = shared.run("stop", "empty")
    assert "`dtctl launch --resume empty` starts with what its program has left in out" in stopped.err, stopped.err
    nothing = shared.run("fetch", "empty")
    assert (nothing.code, "no file was written into out/ (job.outputs)" in nothing.err) == (0, True), nothing.err
    (shared.folder / "train.py").write_text("")
    fresh = shared.run("launch", "--name", "fresh", "--resume", "empty")
    assert (fresh.code, "run empty has no file in out/ to continue from" in fresh.err) == (0, True), fresh.err


def test_a_command_runs_inside_of_the_job(shared: Project) -> None:
    script = "import time\nopen('own.txt', 'w').write('written')\nprint('up', flush=True)\ntime.sleep(300)\n"
    write(shared, nodes=2, job=", secrets: [KEY], env: {A: 'x y'}", script=script)
    assert shared.run("launch", "--detach", "--name", "inside", env={"KEY": "secret"}).code == 0
    wait_until(lambda: shared.run("logs").out.count("up") == 2, 60, "it runs, and what nobody follows is shown")
    line = 'hostname; echo $A; cat own.txt; echo; echo "$DTCTL_NODE $WORLD_SIZE [$RANK$KEY]"'
    done = shared.run("exec", "inside", "node2", "--", line)
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["node2", "x y", "written", "node2 2 []"]
    failed = shared.run("exec", "inside", "node1", "--", "sh", "-c", "cat; exit 5")
    assert failed.code == 5, failed.err
    other = shared.run("exec", "inside", "node9", "--", "true")
    assert (other.code, "node1, node2" in other.err) == (7, True)
    assert json.loads(shared.run("stop", "--json").out)["left_behind"] == 0
    over = shared.run("exec", "inside", "node1", "--", "true")
    assert (over.code, "CANCELLED" in over.err) == (7, True)
