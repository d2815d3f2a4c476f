"""The same faults on this machine, over SSH and under Slurm: what is recorded of a run is the same."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dtctl.launch.records.record import list_run_records
from dtctl.sandbox import control, faults, slurm
from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, wait_until
from tests.integration.slurm_hosts import ask, cluster, python_path

__all__ = ["cluster"]

BACK_ENDS: Final = ("local", "ssh", "slurm")
OF_ONE_BACK_END: Final = {
    "submitting": "a job is submitted before it has nodes",
    "submitted": "a job is submitted before it has nodes",
    "queued": "a job waits for its nodes",
    "allocated": "Slurm chooses the nodes, which the plan of a launch over SSH names",
    "pushing": "a job's folder is on a disk that all nodes share",
    "pushed": "a job's folder is on a disk that all nodes share",
    "push": "a job's folder is on a disk that all nodes share",
    "plan.nodes": "Slurm chooses the nodes",
    "note": "Slurm is asked what it has left on a lost node, which over SSH nobody can be",
    "done.outputs": "all nodes of a job write into one folder, so its files are counted once",
}
"""Events, states of nodes and fields that are not compared, each with the reason for which they differ."""
NOT_COMPARED: Final = ("time", "run", "job", "rendezvous", "interface", "goodput")
"""Moments, names and addresses, as all fields whose names end with `_s`."""
TWO: Final = """\
import os, signal, sys, time
import pathlib
attempt, rank = int(os.environ["DTCTL_ATTEMPT"]), int(os.environ["RANK"])
print("up", flush=True)
pathlib.Path(os.environ["UP"], os.environ["BACK_END"] + str(rank)).touch()
time.sleep(1)
"""
HANGS: Final = """\
from dtctl.runtime.telemetry.progress import ProgressFile, WorkerPhase
progress = ProgressFile(rank)
progress.begin(0, until=20)
for step in range(20):
    progress.forward()
    progress.backward()
    time.sleep(0.05)
    progress.step(step + 1)
    if step == 10 and not attempt:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else time.sleep(1000)
progress.end()
"""
LACKS_MEMORY: Final = """\
if rank == 1:
    own = pathlib.Path("/sys/fs/cgroup/memory", os.environ["DTCTL_RUN_ID"])
    own.mkdir()
    (own / "memory.limit_in_bytes").write_text(str(32 << 20))
    (own / "cgroup.procs").write_text(str(os.getpid()))
    held = b"x" * (256 << 20)
time.sleep(1000)
"""
Act = Callable[["Launched"], None]


@dataclass
class Launched:
    """A launch that is under way."""

    project: Project
    process: subprocess.Popen[str]
    is_last: bool
    """Whether those on the other back ends are up already."""

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        stopped = self.project.run("stop", "--json")
        assert (stopped.code, json.loads(stopped.out)["left_behind"]) == (0, 0), stopped.err


@dataclass
class Fault:
    """What goes wrong in a job, and how it ends."""

    script: str
    exit_code: int
    job: Mapping[str, Any] = field(default_factory=dict)
    act: Act | None = None
    """What is done to it once all workers are up."""
    time_s: float | None = None
    """The time that it may take, from its launcher's start."""
    back_ends: tuple[str, ...] = BACK_ENDS
    is_slow: bool = False


FAULTS: Final = {
    "none": Fault("", 0),
    "a worker fails": Fault("if rank == 1: raise ValueError('no')\ntime.sleep(1000)\n", 8),
    "a worker is killed": Fault("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1000)\n", 8),
    # The kernel's log says so of a process of this machine; a host of a sandbox numbers its processes otherwise.
    "a worker lacks memory": Fault(LACKS_MEMORY, 8, back_ends=("ssh", "slurm")),
    "a training hangs": Fault(HANGS, 0, {"hang_s": 2, "max_restarts": 1}, is_slow=True),
    "restarts are used up": Fault("if rank == 1: sys.exit(3)\ntime.sleep(1000)\n", 8, {"max_restarts": 1}),
    "a restart succeeds": Fault(
        "if attempt == 0 and rank == 1: sys.exit(3)\nif attempt == 0: time.sleep(1000)\n", 0, {"max_restarts": 1}
    ),
    "the user stops it": Fault("time.sleep(1000)\n", 143, act=Launched.stop),
    "the user interrupts it": Fault("time.sleep(1000)\n", 130, act=Launched.interrupt),
    "its time is over": Fault("time.sleep(1000)\n", 75, time_s=4),
}


@pytest.fixture(scope="module")
def base(cluster: Sandbox) -> Iterator[Path]:
    """A folder that all hosts see."""
    folder = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"faults-{secrets.token_hex(3)}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def write(
    base: Path, env: Mapping[str, str], cluster: Sandbox, back_end: str, fault: Fault, *, nodes: int, patience: float
) -> Project:
    """Make the project of a job with a fault, for one back end."""
    folder = base / f"{back_end}-{secrets.token_hex(3)}"
    folder.mkdir()
    own = {**slurm.build_slurm_environment(cluster), "DTCTL_SANDBOX": cluster.name, "PATH": python_path()}
    project = Project(folder, {**env, **own})
    project.write("train.py", TWO + fault.script)
    where: dict[str, dict[str, Any]] = {
        "local": {},
        "slurm": {"nodes": nodes},
        "ssh": {
            "nodes": [{"name": node.name, "address": node.address} for node in cluster.nodes[:nodes]],
            "user": cluster.user,
            "identity_file": str(cluster.identity_file),
            "known_hosts": str(cluster.known_hosts),
            "ssh_config": "none",
        },
    }
    of_job = {"name": "test", "script": "train.py", "kind": "direct", "grace_s": 2, **fault.job}
    of_job |= {} if fault.time_s is None else {"time_s": fault.time_s * patience}
    spec: dict[str, Any] = {
        "cluster": {"transport": back_end, "slots": 2 // nodes, "python": sys.executable, **where[back_end]},
        "job": {**of_job, "env": {"UP": str(base), "BACK_END": back_end}},
    }
    if nodes > 1:
        spec["cluster"]["link_timeout_s"] = 4.0
        spec |= {"slurm": {"requeue": False}} if back_end == "slurm" else {}
    project.write("dtctl.yaml", yaml.safe_dump(spec))
    return project


def is_up(base: Path, back_end: str) -> bool:
    return all((base / f"{back_end}{rank}").exists() for rank in range(2))


def outcomes(
    base: Path, env: Mapping[str, str], cluster: Sandbox, fault: Fault, *, patience: float, nodes: int = 1
) -> dict[str, list[str]]:
    """What each back end records of a job with a fault; the launches are under way together.

    A job whose time ends is given `patience` times its time.
    """
    back_ends = fault.back_ends
    for back_end in back_ends:
        for rank in range(2):
            (base / f"{back_end}{rank}").unlink(missing_ok=True)
    projects = {each: write(base, env, cluster, each, fault, nodes=nodes, patience=patience) for each in back_ends}
    launched = {
        each: Launched(project, project.start("launch", "--json", "--yes"), is_last=each == back_ends[-1])
        for each, project in projects.items()
    }
    try:
        if fault.act is not None:
            for back_end, one in launched.items():
                wait_until(lambda name=back_end: is_up(base, name), what=f"the workers are up: {back_end}")  # type: ignore[misc]
                fault.act(one)
        found = {}
        for back_end, one in launched.items():
            done = one.project.finish(one.process)
            assert done.code == fault.exit_code, f"{back_end}: {done.err}"
            found[back_end] = normalise(one.project)
        return found
    finally:
        for project in projects.values():
            project.close()
        if "slurm" in projects:
            ask(projects["slurm"], "scancel", "--user=root")


def normalise(project: Project) -> list[str]:
    """What the record of a project's run tells, a line each, with names of nodes that do not depend on the back end.

    States of nodes come first, since their order among other events is that of threads.
    """
    record = list_run_records(project.folder)[-1]
    lines = [json.loads(line) for line in (record.folder / "events.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["time"])  # a follower of a job tells what it does before what it then reads
    names = sorted({line["node"] for line in lines if line["event"] == "node"})
    states: dict[str, list[Any]] = {}
    told: list[dict[str, Any]] = []
    for line in lines:
        kind = line["event"]
        if kind in OF_ONE_BACK_END and (kind != "note" or is_of_slurm(line) or is_of_other_run(line)):
            continue
        facts = {
            key: plain(value, record.folder, names)
            for key, value in line.items()
            if not (key in NOT_COMPARED or key.endswith("_s") or f"{kind}.{key}" in OF_ONE_BACK_END)
        }
        if kind == "node":
            if facts["state"] not in OF_ONE_BACK_END:
                states.setdefault(facts["node"], []).append({key: facts[key] for key in facts if key != "node"})
        elif kind == "exit" and told and told[-1]["event"] == "exit":
            told = [*told[:-1], *sorted([told[-1], facts], key=lambda each: str(each["rank"]))]
        else:
            told.append(facts)
    of_nodes = [{"node": node, **state} for node in sorted(states) for state in of_node(states[node])]
    return [json.dumps(each) for each in [*of_nodes, *told]]


def is_of_slurm(note: dict[str, Any]) -> bool:
    return str(note["text"]).startswith("the processes left on")


def is_of_other_run(note: dict[str, Any]) -> bool:
    """Return whether the note is about a run of another test that this machine has at the moment."""
    return str(note["text"]).endswith("both share their GPUs, cores and memory")


def of_node(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of a node; `running` is that it has printed, which a worker that ends at once may not be seen to."""
    return [state for state in states if state["state"] != "running"]


def plain(value: Any, folder: Path, names: list[str]) -> Any:
    """A value without what is different in every run."""
    if isinstance(value, dict):
        return {key: plain(inner, folder, names) for key, inner in value.items() if not key.endswith("_s")}
    if isinstance(value, list):
        return [plain(inner, folder, names) for inner in value]
    if not isinstance(value, str):
        return value
    text = value.replace(f"{folder}/", "")
    for place, name in enumerate(names):
        text = re.sub(rf"\b{re.escape(name)}\b", f"NODE{place}", text)
    text = re.sub(r"\d+\.\d+\.\d+\.\d+:\d+", "ADDRESS", text)
    return re.sub(r"\b\d+ s\b", "N s", text)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if fault.is_slow else []) for name, fault in FAULTS.items()]
)
def test_a_fault_is_recorded_alike_on_all_back_ends(
    base: Path, sandbox_env: dict[str, str], cluster: Sandbox, name: str
) -> None:
    if name == "a worker lacks memory" and not os.access("/sys/fs/cgroup/memory", os.W_OK):
        pytest.skip("no memory cgroup of version 1 can be made here")
    require_alike(lambda patience: outcomes(base, sandbox_env, cluster, FAULTS[name], patience=patience))


def require_alike(take: Callable[[float], dict[str, list[str]]]) -> None:
    """See that the same is recorded on all back ends.

    What a busy machine makes of the order of two events is another thing each time. What back ends do otherwise is the
    same each time, so a difference counts if it is there twice. The second time a job has the more time to get under
    way: workers that are not up yet when their time ends leave another record on each back end.
    """
    differing = []
    for patience in (1, 6):
        found = take(patience)
        first, *others = found
        assert '"event": "done"' in found[first][-1]
        texts = {name: "\n".join([*lines]) for name, lines in found.items()}
        if all(texts[other] == texts[first] for other in others):
            return
        differing.append({other: (texts[other], texts[first]) for other in others if texts[other] != texts[first]})
    for other in differing[0].keys() & differing[1].keys():
        assert differing[1][other][0] == differing[1][other][1], other


@pytest.mark.slow
def test_a_lost_node_is_recorded_alike_over_ssh_and_under_slurm(
    base: Path, sandbox_env: dict[str, str], cluster: Sandbox
) -> None:
    """There is one machine only with transport local."""

    def lose(one: Launched) -> None:
        now = control.find_running_sandbox(cluster.name)  # a host that was switched on again is another process
        if one.is_last and now is not None:
            faults.power_off_host(now, now.nodes[1])

    fault = Fault("time.sleep(1000)\n", 8, act=lose, back_ends=("ssh", "slurm"))

    def take(patience: float) -> dict[str, list[str]]:
        found = outcomes(base, sandbox_env, cluster, fault, nodes=2, patience=patience)
        faults.remove_host_faults(cluster, [cluster.nodes[1]])
        assert '"node": "NODE1"' in found["ssh"][-1]
        return found

    require_alike(take)
