"""Launches that Slurm carries out: the same run as over SSH, whoever watches it, and whatever Slurm does to it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dtctl
from dtctl.launch.records.events import JobSubmitted, Note
from dtctl.launch.records.record import RunRecord, list_run_records
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import is_launcher_alive
from dtctl.sandbox import control, faults, slurm
from dtctl.sandbox.layout import Sandbox
from dtctl.slurm.job_watcher import read_job_reference
from tests.facts import missing
from tests.hosts import Finished, Project, wait_until
from tests.integration.progress_job import breaks_at_30
from tests.integration.slurm_hosts import ask, cluster, fields, hasten, is_clean, python_path, shared, state

__all__ = ["cluster", "shared"]

ROOT = Path(dtctl.__file__).parents[1]
SPEC = """\
cluster: {{transport: slurm, nodes: 2, slots: 2, python: {python}}}
job: {{name: test, script: train.py, kind: {kind}, max_restarts: {restarts}}}
slurm: {{requeues: 9{more}}}
"""
COUNT = """\
import os, time
for n in range({count}):
    print("line", n, flush=True)
    time.sleep(0.02)
"""


def spec(*, kind: str = "direct", restarts: int = 0, more: str = "") -> str:
    return SPEC.format(python=json.dumps(sys.executable), kind=kind, restarts=restarts, more=more)


def record(project: Project) -> RunRecord:
    return list_run_records(project.folder)[-1]


def events(project: Project) -> list[object]:
    return [event.event for event in record(project).events()]


def job_of(project: Project) -> str:
    return next(event.job for event in record(project).events() if isinstance(event, JobSubmitted))


def processes(cluster: Sandbox) -> str:
    """Processes of workers on all hosts."""
    found = [
        subprocess.run(
            control.enter_argv(cluster, node, ["pgrep", "-af", "train.py"]), capture_output=True, text=True, check=False
        ).stdout
        for node in cluster.nodes
    ]
    return "".join(found)


@pytest.mark.parametrize("kind", ["direct", "torchrun"])
def test_a_launch_is_followed_to_its_end(shared: Project, kind: str) -> None:
    shared.write("dtctl.yaml", spec(kind=kind))
    shared.write("train.py", COUNT.format(count=5))
    done = shared.run("launch", "--json")
    assert done.code == 0, done.err
    assert (done.done["status"], done.done["attempts"], done.done["left_behind"]) == ("succeeded", 1, 0)
    for rank in range(4):
        log = record(shared).log_path(f"node{1 + rank // 2}", rank)
        assert log.read_text().splitlines() == [f"line {n}" for n in range(5)]
        assert log.stat().st_mode & 0o777 == 0o600
    assert sum(line.endswith(" line 4") for line in done.err.splitlines()) == 4
    said = json.loads(shared.run("status", "--json").out)
    assert (said["status"], said["nodes"]) == ("succeeded", {"node1": "stopped", "node2": "stopped"})


def test_all_nodes_are_reached_by_one_job_step(shared: Project) -> None:
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", "import time\ntime.sleep(600)\n")
    assert shared.run("launch", "--detach").code == 0

    def list_steps() -> list[str]:
        said = ask(shared, "squeue", "--steps", "--noheader", "--jobs", job_of(shared), "--format=%j %N")
        return [line for line in said.splitlines() if line.startswith("dtctl-node ")]

    wait_until(list_steps, what="the launcher reaches the nodes")
    control = record(shared).folder.parents[1] / "slurm" / record(shared).run / "control" / "events.jsonl"
    wait_until(lambda: '"event":"started"' in control.read_text(), what="the workers run")
    assert list_steps() == ["dtctl-node node[1-2]"]
    assert shared.run("stop").code == 0


def test_a_site_whose_srun_starts_no_common_step_gets_one_for_each_node(shared: Project, tmp_path: Path) -> None:
    real = shutil.which("srun", path=shared.env["PATH"])
    refusing = f'#!/bin/sh\ncase " $* " in *" --label "*) echo refused >&2; exit 3;; esac\nexec {real} "$@"\n'
    shared.write("bin/srun", refusing)
    (shared.folder / "bin" / "srun").chmod(0o755)
    shared.write(
        "dtctl.yaml", spec().replace("name: test", f"name: test, setup: ['export PATH={shared.folder}/bin:$PATH']")
    )
    shared.write("train.py", COUNT.format(count=5))
    done = shared.run("launch", "--json")
    assert (done.code, done.done["attempts"], done.done["left_behind"]) == (0, 1, 0), done.err
    assert sum(line.endswith(" line 4") for line in done.err.splitlines()) == 4


@pytest.mark.slow
def test_the_ledger_has_all_of_the_time_between_the_command_and_its_end(shared: Project) -> None:
    """As over SSH, tests/integration/test_ledger.py."""
    shared.write("dtctl.yaml", spec(restarts=1).replace("name: test", f"name: test, env: {{PYTHONPATH: '{ROOT}'}}"))
    shared.write("train.py", breaks_at_30("os.kill(os.getpid(), signal.SIGKILL)"))
    begun = time.monotonic()
    done = shared.run("launch", "--json")
    outside_s = time.monotonic() - begun
    assert (done.code, done.done["attempts"]) == (0, 2), done.err
    ledger = json.loads((record(shared).folder / "ledger.json").read_text())
    told_s = list(record(shared).events())[-1].time - record(shared).info().started
    assert 0.95 * told_s - 0.5 <= ledger["wall_s"] <= outside_s, "the end of the interpreter is not in it"
    assert sum(ledger["phases_s"].values()) == pytest.approx(ledger["wall_s"], abs=0.02)
    assert done.done["duration_s"] == pytest.approx(ledger["wall_s"], abs=0.2)
    assert done.done["goodput"] == ledger["goodput"]
    assert ledger["course"][-1][0] == "stop"


def test_what_a_job_has_left_goes_with_its_run(shared: Project) -> None:
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", "open('weights.bin', 'wb').write(bytes(3_000_000))\n")
    assert shared.run("launch").code == 0
    run, old = record(shared).run, ("--older", "0s")
    (item,) = [each for each in json.loads(shared.run("clean", *old, "--json").out)["items"] if each["name"] == run]
    assert (item["node"], item["kind"], item["bytes"] > 3_000_000) == (None, "run", True)
    done = shared.run("clean", *old, "--yes")
    assert done.code == 0, done.err
    assert not [*shared.folder.glob(f".dtctl/*/{run}")]


def test_nodes_of_several_kinds_are_one_job(shared: Project) -> None:
    """Two workers on the first node, one on the second; Slurm gives each of them the resources of the first."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "DTCTL_SLOTS", "DTCTL_NNODES")
    nodes = "slots: auto, nodes: [{name: big, gres: 'gpu:2'}, {name: small, gres: 'gpu:1'}]"
    shared.write("dtctl.yaml", spec().replace("nodes: 2, slots: 2", nodes))
    shared.write("train.py", f"import os\nprint(*(os.environ[name] for name in {names}), flush=True)\n")
    done = shared.run("launch", "--json")
    assert done.code == 0, done.err
    assert not missing(done.err, "Slurm gives each node same largest number resource")
    (batch_file,) = (shared.folder / ".dtctl" / "slurm").glob("*/job.sbatch")
    assert "#SBATCH --gres=gpu:2" in batch_file.read_text().splitlines()
    (allocated,) = [event["nodes"] for event in done.events if event["event"] == "allocated"]
    assert isinstance(allocated, list)
    logs = {rank: record(shared).log_path(allocated[rank // 2], rank).read_text().split() for rank in range(3)}
    assert logs == {
        0: ["0", "0", "3", "2", "0", "2", "2"],
        1: ["1", "1", "3", "2", "0", "2", "2"],
        2: ["2", "0", "3", "1", "1", "1", "2"],
    }


@pytest.mark.parametrize(("kind", "rank"), [("direct", 3), ("torchrun", 3)])
def test_the_culprit_is_named(shared: Project, kind: str, rank: int) -> None:
    shared.write("dtctl.yaml", spec(kind=kind))
    shared.write(
        "train.py",
        "import os, time\nif os.environ['RANK'] == '3': raise ValueError('rank 3 has had enough')\ntime.sleep(1000)\n",
    )
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["rank"], failure["exit_code"]) == ("node2", rank, 1), done.err
    assert failure["summary"] == "ValueError: rank 3 has had enough"
    assert failure["log"].endswith("node2/rank-3.log")


def test_a_limit_of_the_shell_is_named(shared: Project) -> None:
    shared.write("dtctl.yaml", spec().replace("name: test", "name: test, setup: ['ulimit -S -t 1']"))
    shared.write("train.py", "while True: pass\n")
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert failure["signal"] == signal.SIGXCPU
    assert not missing(failure["summary"], "processor time ulimit job.setup")


@pytest.mark.slow
def test_a_prolog_that_fails_is_not_taken_for_a_user_who_holds_the_job(shared: Project, cluster: Sandbox) -> None:
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", "print('ran', flush=True)\n")
    path = slurm.build_config_path(cluster.state)
    before = path.read_text()
    path.write_text(f"{before}Prolog=/bin/false\n")
    try:
        ask(shared, "scontrol", "reconfigure")
        assert shared.run("launch", "--detach").code == 0
        wait_until(lambda: "held" in fields(shared, job_of(shared))["Reason"], what="Slurm holds the job")
        told = shared.run("status").out
        assert not missing(told, f"prolog sinfo -R scontrol release {job_of(shared)}")
        assert "somebody" not in told
    finally:
        path.write_text(before)
        ask(shared, "scontrol", "reconfigure")
        ask(shared, "scancel", "--user=root")
        for node in ("node1", "node2"):  # refused for one that was not drained
            resume = ["scontrol", "update", f"nodename={node}", "state=resume"]
            subprocess.run(resume, env=shared.env, capture_output=True, check=False)
        wait_until(
            lambda: {*ask(shared, "sinfo", "-h", "-N", "-o", "%T").split()} == {"idle"}, what="the nodes are back"
        )


def test_what_srun_has_ended_is_not_the_culprit(shared: Project) -> None:
    """The other workers do not react to SIGTERM, so that srun kills them; a signal would weigh more than an error."""
    shared.write("dtctl.yaml", spec())
    shared.write(
        "train.py",
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(1)\n"
        "if os.environ['RANK'] == '1': raise ValueError('rank 1 has had enough')\n"
        "time.sleep(1000)\n",
    )
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["rank"], failure["exit_code"]) == ("node1", 1, 1), done.err


def test_the_culprit_of_a_second_component_has_its_rank(shared: Project) -> None:
    nodes = "nodes: [{name: big, slots: 2}, {name: small, slots: 1}]"
    shared.write("dtctl.yaml", spec().replace("nodes: 2, slots: 2", nodes))
    script = "import os, time\nif os.environ['RANK'] == '2': raise ValueError('no')\ntime.sleep(1000)\n"
    shared.write("train.py", script)
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["rank"], failure["summary"]) == (2, "ValueError: no"), (
        record(shared).folder / "job.log"
    ).read_text()


@pytest.mark.slow
def test_a_job_whose_time_is_up_is_told_as_such(shared: Project) -> None:
    shared.write("dtctl.yaml", spec(more=', time: "1", warn_s: 1'))
    shared.write("train.py", "import signal, time\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\ntime.sleep(400)\n")
    done = shared.run("launch", "--json")
    assert done.code == 8, done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert failure["rank"] is None
    assert "time limit" in failure["summary"]
    assert not missing(done.err, "signal 15 SIGTERM limit")


def test_a_worker_that_is_killed_is_started_again_in_the_same_job(shared: Project) -> None:
    shared.write("dtctl.yaml", spec(restarts=1))
    shared.write(
        "train.py",
        "import os, pathlib, signal, time\n"
        "print('attempt', os.environ['DTCTL_ATTEMPT'], flush=True)\n"
        "said = pathlib.Path.cwd()  # which all nodes see\n"
        "(said / ('said-' + os.environ['RANK'])).touch()\n"
        "if os.environ['DTCTL_ATTEMPT'] == '0':\n"
        "    while os.environ['RANK'] == '1' and len(list(said.glob('said-*'))) < 4: time.sleep(0.01)\n"
        "    if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(1000)\n",
    )
    done = shared.run("launch", "--json")
    assert done.code == 0, done.err
    assert done.done["attempts"] == 2
    (restart,) = [event for event in done.events if event["event"] == "restart"]
    assert (restart["node"], restart["rank"]) == ("node1", 1)
    assert not missing(done.err, "restart rank 1 node1 signal 9 SIGKILL")
    assert record(shared).log_path("node2", 3).read_text().splitlines() == ["attempt 0", "attempt 1"]


def test_ctrl_c_ends_the_job_and_leaves_nothing(shared: Project, cluster: Sandbox) -> None:
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    process = shared.start("launch", "--json")
    wait_until(lambda: processes(cluster).count("train.py") >= 4, what="it runs")
    process.send_signal(signal.SIGINT)
    done = shared.finish(process)
    assert done.code == 130, done.err
    assert done.done["status"] == "stopped"
    assert state(shared, job_of(shared)) == "CANCELLED"
    assert processes(cluster) == ""


def test_stop_ends_a_job_that_nobody_follows(shared: Project, cluster: Sandbox) -> None:
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    assert shared.run("launch", "--detach").code == 0
    wait_until(lambda: processes(cluster).count("train.py") >= 4, what="it runs")
    stopped = shared.run("stop", "--json")
    assert (stopped.code, json.loads(stopped.out)["left_behind"]) == (0, 0), stopped.err
    assert processes(cluster) == ""
    assert json.loads(shared.run("status", "--json").out)["status"] == "stopped"


ESCAPES = """\
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "train.py"], start_new_session=True)
print("up", flush=True)
time.sleep({stays_s})
"""


def test_what_slurm_loses_sight_of_is_found_and_ended(shared: Project, cluster: Sandbox) -> None:
    """Its plugin here follows parents; a daemon has none. Without a look, four processes were left, and 0 was said."""
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", ESCAPES.format(stays_s=0))
    done = shared.run("launch", "--json")
    assert (done.code, done.done["left_behind"]) == (0, 0), done.err
    assert processes(cluster) == ""
    told = {event["node"]: event["left"] for event in done.events if event.get("state") == "stopped"}
    assert told == {"node1": 0, "node2": 0}


def test_stop_ends_a_job_that_is_followed_on_another_machine(shared: Project, cluster: Sandbox) -> None:
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", ESCAPES.format(stays_s=600))
    assert shared.run("launch", "--detach").code == 0
    wait_until(lambda: processes(cluster).count("train.py") >= 8, what="it runs")
    with RunWriter(record(shared).folder).launcher_lock():
        stopped = shared.run("stop")
        assert stopped.code == 0, stopped.err
        assert stopped.out == "0 processes left on 2 nodes: counted on the nodes\n"
        assert processes(cluster) == ""
        assert state(shared, job_of(shared)) == "CANCELLED"


def over_ssh(project: Project, cluster: Sandbox) -> dict[str, str]:
    """A PATH whose `ssh` knows the nodes by their names."""
    folder = project.folder / "ways"
    folder.mkdir()
    hosts = "".join(f"Host {node.name}\n  HostName {node.address}\n" for node in cluster.nodes)
    login = f"User {cluster.user}\nIdentityFile {cluster.identity_file}\nUserKnownHostsFile {cluster.known_hosts}\n"
    (folder / "config").write_text(hosts + f"Host *\n{login}")
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}:{project.env['PATH']}"}


@pytest.mark.slow
def test_where_nobody_can_look_nothing_is_said(shared: Project, cluster: Sandbox) -> None:
    """The launcher inside is killed, the nodes are another job's at once, and Slurm's word is no proof here."""
    shared.write("dtctl.yaml", spec(more=", extra: {exclusive: true}"))
    shared.write("train.py", "import time\ntime.sleep(1000)\n")
    for name in ("first", "second"):
        assert shared.run("launch", "--detach", "--name", f"{shared.unique}-{name}").code == 0
    wait_until(lambda: fields(shared, job_of(shared))["Reason"] in ("Resources", "Priority"), what="the second waits")
    first = RunRecord(shared.folder / ".dtctl" / "runs" / f"{shared.unique}-first")
    job = read_job_reference(first)
    argv = control.enter_argv(cluster, cluster.nodes[0], ["pkill", "-KILL", "-f", f"{job.folder}/launcher.zip"])
    subprocess.run(argv, check=True)
    wait_until(lambda: state(shared, job.job) not in ("RUNNING", "COMPLETING"), 60, "the job is over")
    stopped = json.loads(shared.run("stop", first.run, "--json").out)
    assert stopped["left_behind"] is None
    assert stopped["nodes"] == dict.fromkeys(("node1", "node2"), "nobody could look")
    done = json.loads(shared.run("status", first.run, "--json").out)["done"]
    assert (done["status"], done["left_behind"]) == ("failed", None)
    (note,) = [event.text for event in first.events() if isinstance(event, Note)]
    assert note.startswith("the processes left on node1, node2 could not be counted: no job to count them could be")
    again = json.loads(shared.run("stop", first.run, "--json", env=over_ssh(shared, cluster)).out)
    assert (again["left_behind"], again["nodes"]) == (0, {"node1": 0, "node2": 0}), "their user may log in to them"
    assert shared.run("stop").code == 0


def test_a_job_is_found_again_after_its_launcher_was_killed(shared: Project) -> None:
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", COUNT.format(count=150))
    shared.start("launch", "--name", shared.unique)
    wait_until(lambda: list(shared.folder.glob(".dtctl/runs/*/logs/*/rank-0.log")), what="output has come")
    launcher = record(shared).info()
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not is_launcher_alive(launcher))
    followed = shared.run("logs", "-f")
    assert followed.code == 0, followed.err
    assert [followed.out.count(f" line {n}\n") for n in range(150)] == [4] * 150
    assert json.loads(shared.run("status", "--json").out)["status"] == "succeeded"


def test_a_detached_job_is_looked_at_when_somebody_asks(shared: Project) -> None:
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", COUNT.format(count=5))
    begun = shared.run("launch", "--detach", "--json")
    assert begun.code == 0, begun.err
    assert all("event" in json.loads(line) for line in begun.out.splitlines())
    wait_until(lambda: state(shared, job_of(shared)) == "COMPLETED", what="the job is over")
    said = json.loads(shared.run("status", "--json").out)
    assert (said["status"], said["job"]) == ("succeeded", job_of(shared))
    assert shared.run("logs").out.count(" line 4\n") == 4


def test_a_detached_job_that_never_stops_printing_can_be_looked_at_and_stopped(shared: Project) -> None:
    """There is news at each look, so waiting until there is none would not end."""
    shared.write("dtctl.yaml", spec())
    shared.write("train.py", COUNT.format(count=1_000_000))
    assert shared.run("launch", "--detach").code == 0
    wait_until(lambda: "line 50" in shared.run("logs", timeout_s=60).out, what="it prints")
    said = json.loads(shared.run("status", "--json", timeout_s=60).out)
    assert (said["status"], set(said["nodes"].values())) == ("running", {"running"})
    assert "has ended" not in shared.run("status", timeout_s=60).err
    assert shared.run("stop", timeout_s=90).code == 0
    assert state(shared, job_of(shared)) == "CANCELLED"
    assert json.loads(shared.run("status", "--json", timeout_s=60).out)["status"] == "stopped"


@pytest.mark.slow
def test_people_see_what_a_job_waits_for(shared: Project, cluster: Sandbox) -> None:
    shared.write("dtctl.yaml", spec(more=", extra: {exclusive: true}"))
    shared.write("train.py", "import time\ntime.sleep(1000)\n")
    assert shared.run("launch", "--detach").code == 0
    assert shared.run("launch", "--detach").code == 0
    wait_until(lambda: fields(shared, job_of(shared))["Reason"] in ("Resources", "Priority"), what="the second waits")
    said = shared.run("status")
    assert "queued" in said.out
    assert "waits: Resources" in said.out or "waits: Priority" in said.out
    for run in list_run_records(shared.folder):
        assert shared.run("stop", run.run).code == 0


def test_a_job_over_a_login_node(shared: Project, cluster: Sandbox) -> None:
    """From a machine that has nothing of Slurm; the code goes to the login node first."""
    login = cluster.nodes[0]
    folder = f"{shared.folder}/there"
    ssh = {
        "login": login.address, "user": "root", "port": 22, "identity_file": str(cluster.identity_file),
        "known_hosts": str(cluster.known_hosts), "ssh_config": "none", "workdir": folder,
    }  # fmt: skip
    text = json.loads(json.dumps({"transport": "slurm", "nodes": 2, "slots": 1, "python": sys.executable, **ssh}))
    job = {"name": "test", "script": "train.py", "kind": "direct"}
    shared.write("dtctl.yaml", json.dumps({"cluster": text, "job": job}))
    shared.write("train.py", COUNT.format(count=3))
    bashrc = f"export SLURM_CONF={shared.env['SLURM_CONF']}\n"
    write = control.enter_argv(cluster, login, ["sh", "-c", 'printf %s "$1" >~/.bashrc', "sh", bashrc])
    subprocess.run(write, check=True)
    env = {"SLURM_CONF": "/nowhere", "PATH": str(shared.folder)}
    done = shared.run("launch", "--json", env=env)
    assert done.code == 0, done.err
    assert (done.done["status"], done.done["left_behind"]) == ("succeeded", 0)
    assert record(shared).log_path("node2", 1).read_text().splitlines() == ["line 0", "line 1", "line 2"]


TRAIN = """\
import os, time
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

def train(config, worker):
    torch.manual_seed(3)
    inputs = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    data = TensorData(inputs, inputs[:, :1])
    slow = os.environ["SLOW"] == "1" and os.environ["DTCTL_ATTEMPT"] == "0"

    def loss(model, batch):
        if slow and trainer.step >= 5:
            print("slow", flush=True)
            # Longer than it takes until all are interrupted, also beside other tests.
            time.sleep(1 if trainer.step < 20 else 4)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(config, worker, model, loss, data)
    return trainer.run()

raise SystemExit(run(train))
"""


@pytest.mark.torch
@pytest.mark.slow
def test_a_run_is_gone_on_from_by_its_name(shared: Project) -> None:
    train = {"steps": 6, "micro_batch": 4, "seed": 1}
    text = spec().replace("slots: 2", "slots: 1").replace("kind: direct", 'kind: direct, env: {SLOW: "0"}')
    shared.write("dtctl.yaml", text + f"train: {json.dumps(train)}\n")
    shared.write("train.py", TRAIN)
    first = f"{shared.unique}-first"
    done = shared.run("launch", "--json", "--name", first)
    assert done.code == 0, done.err
    again = shared.run("launch", "--resume", first, "--set", "train.steps=9", "--json")
    assert again.code == 0, again.err
    assert "resumed at step 6 of 9: " in again.err
    refused = shared.run("launch", "--resume", "nobody")
    assert refused.code == 7


@dataclass
class Training:
    """A training of two workers, and what became of it."""

    project: Project
    snapshots: str
    process: subprocess.Popen[str] | None = None
    done: Finished | None = None

    def launch(self) -> None:
        self.process = self.project.start("launch", "--json")
        wait_until(
            lambda: list_run_records(self.project.folder) and "submitted" in events(self.project),
            what="it is submitted",
        )

    def trains(self) -> bool:
        """Whether it has got past its first steps."""
        return any(path.read_text().count("slow") > 2 for path in record(self.project).folder.glob("logs/*/rank-0.log"))

    def nodes(self) -> list[str]:
        nodes = fields(self.project, job_of(self.project))["NodeList"]
        return ask(self.project, "scontrol", "show", "hostnames", nodes).split()

    def is_started_again(self) -> bool:
        """Whether Slurm has done so, once it has taken the job back; has it start as soon as its nodes are clean."""
        job = job_of(self.project)
        facts = fields(self.project, job)
        if facts["Restarts"] == "0" or facts["JobState"] == "COMPLETING":
            return False
        if facts["JobState"] != "PENDING":
            return True
        if is_clean(self.project, job):
            hasten(self.project, job)
        return False

    def finish(self) -> None:
        assert self.process is not None
        self.done = self.project.finish(self.process, 240)

    def read_digest(self) -> dict[str, object]:
        """Return the digest of the last snapshot, of the newest run, as over SSH."""
        assert self.done is not None
        assert self.done.code == 0, self.done.err
        told = self.project.run("snapshot", "digest", "--json")
        assert told.code == 0, told.err
        return dict(json.loads(told.out))


def training(base: Path, env: dict[str, str], name: str, *, more: str = "") -> Training:
    """A training, slow in its first start, on nodes that it does not share with others; live, if its name says so."""
    folder = base / name
    folder.mkdir(parents=True)
    project, snapshots = Project(folder, env), str(folder / "snapshots")
    text = spec(restarts=int("live" in name), more=f", extra: {{exclusive: true}}{more}").replace(
        "slots: 2", "slots: 1"
    )
    text = text.replace("kind: direct", f'kind: direct, env: {{SLOW: "{int(name != "alone")}"}}')
    train = {"steps": 40, "micro_batch": 4, "seed": 1, "snapshot": {"dir": snapshots, "every_steps": 5}}
    project.write("dtctl.yaml", text + f"train: {json.dumps(train)}\n")
    project.write("train.py", TRAIN)
    return Training(project, snapshots)


LOST = {"node lost": 1, "node lost, live": 1, "first node lost, live": 0}
"""Name -> which of a training's nodes is lost."""


@pytest.fixture(scope="module")
def trainings(sandbox_env: dict[str, str]) -> Iterator[dict[str, Training]]:
    """One that was left alone, and those that Slurm has interrupted, all at the same time: most of it is waiting."""
    # Of two minutes, all but about 30 s are for the workers that save: with all these trainings on a busy machine,
    # torch alone may take a minute to import.
    limit = ', time: "2", warn_s: 90'
    more = {"time limit": limit, "time limit, live": limit, "preempted": "", "preempted, live": ""}
    interrupted = {**more, **dict.fromkeys(LOST, "")}
    # Those that have lost a node need another one.
    mine = control.start_sandbox(
        f"slurm-{secrets.token_hex(3)}", nodes=2 * len(interrupted) + len(LOST), with_slurm=True
    )
    env = {**sandbox_env, **slurm.build_slurm_environment(mine), "DTCTL_SANDBOX": mine.name, "PATH": python_path()}
    base = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"trainings-{secrets.token_hex(3)}"
    made = {name: training(base, env, name, more=more) for name, more in {"alone": "", **interrupted}.items()}
    try:
        for name in interrupted:
            made[name].launch()
        at_once = [name for name in interrupted if "time limit" not in name]
        wait_until(lambda: all(made[name].trains() for name in at_once), 90, "they train")
        for name, place in LOST.items():
            faults.power_off_host(mine, mine.node(made[name].nodes()[place]))
        for name in at_once:
            if name not in LOST:
                nodes = ",".join(made[name].nodes())
                urgent = ["sbatch", "--partition=urgent", "--nodes=2", f"--nodelist={nodes}", "--exclusive"]
                subprocess.run([*urgent, "--output=/dev/null", "--wrap=sleep 1"], env=env, check=True, cwd=base)
        waiting = set(interrupted)

        def all_are_started_again() -> bool:
            for name in sorted(waiting):
                if made[name].is_started_again():
                    waiting.remove(name)  # not asked again, since Slurm forgets a job some minutes after its end
            return not waiting

        wait_until(all_are_started_again, 300, "Slurm has taken all back, and started them again")
        made["alone"].launch()
        for one in made.values():
            one.finish()
        yield made
    finally:
        for one in made.values():
            one.project.close()
        control.remove_sandbox(mine.name)
        shutil.rmtree(base)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("time limit", "its time limit was near"),
        ("time limit, live", "its time limit was near"),
        ("preempted", "it was preempted"),
        ("preempted, live", "it was preempted"),
        ("node lost", "a node failed"),
        ("node lost, live", "was lost"),
        ("first node lost, live", "a node failed"),
    ],
)
def test_what_slurm_interrupts_ends_with_the_same_bits(trainings: dict[str, Training], name: str, reason: str) -> None:
    one = trainings[name]
    assert one.done is not None
    restarts = [event["reason"] for event in one.done.events if event["event"] == "restart"]
    assert one.done.done["attempts"] == 1 + len(restarts)
    assert set(restarts) == {reason}
    assert len(restarts) == 1 or "time limit" in name, "a busy machine may not get far in the time of one start"
    assert one.read_digest() == trainings["alone"].read_digest()
    logs = [path.read_text() for path in record(one.project).folder.glob("logs/*/rank-0.log")]
    assert "".join(logs).count("40 steps") == one.done.done["attempts"], "the log is kept over the requeue"
    steps = [
        json.loads(line)["step"] for line in (record(one.project).folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", LOST)
def test_a_lost_node_is_not_used_again(trainings: dict[str, Training], name: str) -> None:
    done = trainings[name].done
    assert done is not None
    first, second = [event["nodes"] for event in done.events if event["event"] == "allocated"]
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert len(first) == len(second) == 2
    assert first[LOST[name]] not in second
