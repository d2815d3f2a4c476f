"""Workers that dtctl starts itself are told what torchrun would tell them, and it shows where they never meet."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from dtctl import node_facts
from tests.hosts import LIMIT_S, Project
from tests.integration.slurm_hosts import cluster, shared

__all__ = ["cluster", "shared"]

SHOW = """\
import json, os
import torch.distributed as dist
print("SHOW " + json.dumps({**os.environ, "launched": dist.is_torchelastic_launched()}) + " END", flush=True)
"""
KINDS = ("direct", "accelerate", "deepspeed")
SPEC = """\
cluster: {{transport: {transport}, nodes: 2, slots: 2, python: {python}}}
job: {{name: test, script: show.py, kind: {kind}, grace_s: 2{job}}}
"""
OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}
OWN |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""Variables whose values are others, or are decided elsewhere."""


def spec(kind: str, transport: str = "sandbox", job: str = "") -> str:
    return SPEC.format(transport=transport, python=json.dumps(sys.executable), kind=kind, job=job)


def shown(text: str) -> dict[int, dict[str, str]]:
    """Rank -> its environment."""
    rows = [json.loads(part.partition(" END")[0]) for part in text.split("SHOW ")[1:]]
    return {int(row["RANK"]): row for row in rows}


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Rank -> what a worker of torchrun with 2 nodes of 2 workers has beside what torchrun itself was given."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "show.py").write_text(SHOW)
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=static"]
    argv += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = [
        subprocess.Popen(
            [*argv, f"--node-rank={rank}", "show.py"],
            cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [agent.communicate(timeout=LIMIT_S) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    workers = shown("".join(out for out, _ in said))
    return {rank: {name: env[name] for name in env.keys() - given.keys()} for rank, env in workers.items()}


def compare(found: dict[int, dict[str, str]], torchrun: dict[int, dict[str, str]], *, restarts: str = "0") -> None:
    assert found.keys() == torchrun.keys() == {0, 1, 2, 3}
    for rank, env in found.items():
        theirs = torchrun[rank]
        assert theirs.keys() - {"LC_CTYPE"} <= env.keys()
        values = {name: env[name] for name in theirs.keys() - OWN - {"LC_CTYPE"}}
        assert values == {**{name: theirs[name] for name in values}, "TORCHELASTIC_RESTART_COUNT": restarts}
        assert env["NODE_RANK"] == env["GROUP_RANK"]
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert all(env["launched"] for env in found.values())
    assert len({env["TORCHELASTIC_ERROR_FILE"] for env in found.values()}) == 4
    assert len({(env["TORCHELASTIC_RUN_ID"], env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found.values()}) == 1


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("kind", KINDS)
def test_workers_over_ssh_have_each_variable_of_torchrun(
    project: Project, torchrun: dict[int, dict[str, str]], kind: str
) -> None:
    project.write("show.py", SHOW)
    project.write("dtctl.yaml", spec(kind))
    done = project.run("launch")
    assert done.code == 0, done.err
    compare(shown(done.out), torchrun)
    told = {env.get("ACCELERATE_USE_CPU") for env in shown(done.out).values()}
    assert told == {"true" if kind == "accelerate" and not node_facts.count_gpus(os.environ) else None}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_in_a_job_of_slurm_have_each_variable_of_torchrun(
    shared: Project, torchrun: dict[int, dict[str, str]], kind: str
) -> None:
    shared.write("show.py", SHOW)
    shared.write("dtctl.yaml", spec(kind, "slurm"))
    done = shared.run("launch")
    assert done.code == 0, done.err
    compare(shown(done.out), torchrun)
    told = {env.get("ACCELERATE_USE_CPU") for env in shown(done.out).values()}
    assert told == {"true" if kind == "accelerate" and not node_facts.count_gpus(os.environ) else None}
    if kind == "accelerate":
        shared.write("dtctl.yaml", spec(kind, "slurm", ", env: {ACCELERATE_USE_CPU: 'no'}"))
        own = shown(shared.run("launch").out)
        assert {env["ACCELERATE_USE_CPU"] for env in own.values()} == {"no"}


FAILS_ONCE = (
    SHOW
    + """\
from torch.distributed.elastic.multiprocessing.errors import record
path = os.environ["TORCHELASTIC_ERROR_FILE"]
@record
def main():
    if os.environ["DTCTL_ATTEMPT"] == "0":
        if os.environ["RANK"] == "1":
            raise ValueError("the loss is a banana")
        import time
        time.sleep(600)
    if os.environ["RANK"] == "1":
        print("FOUND", json.load(open(path.replace("attempt-1", "attempt-0")))["message"]["message"], flush=True)
main()
"""
)


@pytest.mark.usefixtures("sandbox")
def test_a_restart_is_counted_and_an_exception_has_a_file_of_its_own(
    project: Project, torchrun: dict[int, dict[str, str]]
) -> None:
    project.write("show.py", FAILS_ONCE)
    project.write("dtctl.yaml", spec("direct", job=", max_restarts: 3"))
    done = project.run("launch")
    assert done.code == 0, done.err
    again = "".join(part for part in done.out.split("[node") if '"DTCTL_ATTEMPT": "1"' in part)
    theirs = {rank: {**env, "TORCHELASTIC_MAX_RESTARTS": "3"} for rank, env in torchrun.items()}
    compare(shown(again), theirs, restarts="1")
    assert "FOUND ValueError: the loss is a banana" in done.out


MEETS = """\
import os, sys
import torch.distributed as dist
if sys.argv[1] == "meet":
    dist.init_process_group("gloo")
    dist.barrier()
print("trained alone" if not dist.is_initialized() else "trained together", flush=True)
"""
NOTE = "workers were separate programs"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("cluster_text", "count"), [("transport: sandbox, nodes: 2, slots: 1", 2), ("transport: local, slots: 3", 3)]
)
def test_workers_that_never_meet_are_told_at_the_end(project: Project, cluster_text: str, count: int) -> None:
    project.write("meets.py", MEETS)
    workdir = f", workdir: {project.folder.parent / 'node'}" if "local" in cluster_text else ""
    project.write("dtctl.yaml", f"cluster: {{{cluster_text}{workdir}}}\njob: {{script: meets.py, kind: direct}}\n")
    alone = project.run("launch", "--json", "--", "no")
    assert alone.code == 0, alone.err
    notes = [str(event["text"]) for event in alone.events if event["event"] == "note"]
    assert sum(f"the {count} {NOTE}" in note for note in notes) == 1, notes
    together = project.run("launch", "--json", "--", "meet")
    assert together.code == 0, together.err
    assert together.err.count("trained together") == count
    assert NOTE not in together.out + together.err


@pytest.mark.usefixtures("sandbox")
def test_one_worker_meets_nobody_and_torchrun_sees_to_it_itself(project: Project) -> None:
    project.write("meets.py", MEETS)
    for slots, kind in ((1, "direct"), (2, "torchrun"), (2, "command")):
        what = "script: meets.py" if kind != "command" else "command: 'true'"
        workdir = project.folder.parent / "node"
        project.write(
            "dtctl.yaml",
            f"cluster: {{transport: local, slots: {slots}, workdir: {workdir}}}\njob: {{{what}, kind: {kind}}}\n",
        )
        done = project.run("launch", "--json", *([] if kind == "command" else ["--", "no"]))
        assert done.code == 0, done.err
        assert NOTE not in done.out, kind
