"""What the doctor says of a job for Slurm: before it is submitted, and in its allocation."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

from tests.hosts import Project
from tests.integration.slurm_hosts import ask, cluster, shared

__all__ = ["cluster", "shared"]


def spec(more: str = "") -> str:
    return (
        f"cluster: {{transport: slurm, nodes: 2, slots: 2, python: {json.dumps(sys.executable)}}}\n"
        f"job: {{name: test, script: train.py, kind: direct}}\nslurm: {{requeues: 2{more}}}\n"
    )


def test_the_doctor_looks_at_what_the_cluster_offers(shared: Project) -> None:
    shared.write("train.py", "")
    shared.write("dtctl.yaml", spec())
    done = shared.run("doctor", "--json")
    assert done.code == 0, done.err
    assert "in partition main" in json.loads(done.out)["slurm"]
    shared.write("dtctl.yaml", spec(", partition: main, extra: {constraint: h100}"))
    done = shared.run("doctor", "--json")
    assert done.code == 9
    (first, *_) = json.loads(done.out)["findings"]
    assert (first["check"], first["status"], first["primary"]) == ("features", "fail", True)
    assert "slurm.extra.constraint" in first["fix"]


def test_the_doctor_examines_the_nodes_of_an_allocation(shared: Project) -> None:
    shared.write("train.py", "")
    shared.write("dtctl.yaml", spec())
    argv = ["salloc", "--quiet", "--nodes=2", sys.executable, "-m", "dtctl", "doctor", "--json"]
    done = subprocess.run(
        [*argv, "--skip", "collective"], cwd=shared.folder, env=shared.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["ok"], said["nodes"]) == (True, ["node1", "node2"])
    assert {"data-ports", "bandwidth", "disk"} <= {one["check"] for one in said["findings"]}


def test_the_doctor_sees_that_a_preempted_job_would_be_lost(shared: Project) -> None:
    shared.write("train.py", "")
    shared.write("dtctl.yaml", spec())
    change = ["scontrol", "update", "PartitionName=main"]
    ask(shared, *change, "PreemptMode=CANCEL")
    try:
        done = shared.run("doctor", "--json")
    finally:
        ask(shared, *change, "PreemptMode=REQUEUE")
    assert done.code == 0, "it can be submitted all the same"
    (first, *_) = json.loads(done.out)["findings"]
    assert (first["check"], first["status"]) == ("requeue", "warn")
    assert "PreemptMode=CANCEL" in first["evidence"]


def test_the_doctor_sees_that_its_job_is_not_started_again(shared: Project) -> None:
    shared.write("train.py", "")
    shared.write("dtctl.yaml", spec())
    argv = ["sbatch", "--quiet", "--wait", "--no-requeue", "--nodes=2", "--output=said.json", "--error=said.err"]
    command = f"{shlex.quote(sys.executable)} -m dtctl doctor --json --quick"
    subprocess.run([*argv, "--wrap", command], cwd=shared.folder, env=shared.env, check=True)
    found = json.loads((shared.folder / "said.json").read_text())["findings"]
    warned = [(one["check"], one["evidence"]) for one in found if one["status"] in ("warn", "fail")]
    assert warned == [("requeue", ["Requeue=0"])]
