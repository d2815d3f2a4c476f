"""Whole JobSets: compared with what is kept, checked against published schemas, and their scripts run by bash.

`UPDATE_GOLDEN=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dtctl.errors import PlanError
from dtctl.kubernetes import jobset
from dtctl.plan.build import PlanFacts, build
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes

HERE = Path(__file__).parent
NODES = "cluster: {transport: slurm, nodes: 4, slots: 8}\n"
CASES = {
    "plain": NODES
    + "job: {name: gpt, script: train.py, args: [--lr, 1e-3]}\n"
    + "kubernetes: {image: 'registry.example/gpt:1'}",
    "direct": NODES
    + "job: {name: gpt, module: my.train, kind: direct, max_restarts: 3, secrets: [WANDB_API_KEY], setup: [ulimit]}\n"
    + "train: {strategy: fsdp, lr: 0.001}\n"
    + "kubernetes: {image: 'pytorch/pytorch:2', claim: code, workdir: /code, namespace: lab, secret: keys, queue: gpus,"
    + " resources: {cpu: 32, memory: 256Gi, rdma/hca: 8}, node_selector: {gpu: h100}, restarts: 4}",
    "hostile": "cluster: {transport: slurm, nodes: 2, slots: 2}\n"
    + r"""job:
  name: "x $(id) 'a'"
  script: "a b'c.py"
  kind: deepspeed
  args: ["", "$HOME", "$$", "$(MASTER_ADDR)", "a\nb", "é", "---", "\t"]
  env: {A: "PYTHON\nb\n`c`: |"}
"""
    + "train: {strategy: zero1, micro_batch: 2}\nkubernetes: {image: i, gpu: ''}",
}


def made(spec_text: str) -> str:
    spec = parse_spec(spec_text, source="dtctl.yaml", base_dir=HERE)
    plan = build(spec, resolve_nodes(spec), run="Gpt_1121-0930.k7", facts=PlanFacts(environ={}, address="pod-0"))
    return re.sub(r"dtctl [0-9.]+", "dtctl VERSION", jobset.text(spec, plan))


def objects(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    script, job = yaml.safe_load_all(text)
    return script, job


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_as_kept(case: str) -> None:
    found, kept = made(CASES[case]), HERE / "kubernetes" / f"{case}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        kept.write_text(found)
    assert found == kept.read_text()


@pytest.mark.parametrize("case", CASES)
def test_the_schemas_of_kubernetes_and_of_jobset_allow_it(case: str) -> None:
    script, job = objects(made(CASES[case]))
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(script, version, strict=True)
    template = job["spec"]["replicatedJobs"][0]["template"]
    as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": template["spec"]}
    kubernetes_validate.validate(as_job, version, strict=True)
    jsonschema.validate(job, json.loads((HERE / "kubernetes" / "jobset.schema.json").read_text()))


def test_the_checks_can_fail() -> None:
    _, job = objects(made(CASES["plain"]))
    schema = json.loads((HERE / "kubernetes" / "jobset.schema.json").read_text())
    job["spec"]["failurePolicy"]["rules"][0]["action"] = "StartAgain"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, schema)
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": spec},
            kubernetes_validate.latest_version(),
            strict=True,
        )


def test_pods_find_each_other_by_names_that_a_service_can_have() -> None:
    script, job = objects(made(CASES["direct"]))
    name = job["metadata"]["name"]
    assert name == script["metadata"]["name"] == job["spec"]["network"]["subdomain"] == "gpt-1121-0930-k7"
    assert f"{name}-workers-0-0.{name} " in script["data"]["pod.sh"]
    assert len(jobset.object_name("a" * 70 + "-1121-093012-k7")) == jobset.NAME_LIMIT
    assert jobset.object_name("a" * 70 + "-1121-093012-k7").endswith("-1121-093012-k7")
    several = ["gpt_1", "a" * 70, "b" + "a" * 70]
    assert len({jobset.object_name(run) for run in several}) == len(several)
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", jobset.object_name(run)) for run in several)


@pytest.mark.parametrize(
    ("amount", "right"), [("32", True), ("500m", True), ("256Gi", True), ("1.5", True), ("foo", False), ("-1", False)]
)
def test_amounts_of_resources(amount: str, right: bool) -> None:
    assert bool(jobset.QUANTITY.fullmatch(amount)) is right


def test_the_budgets_of_starts() -> None:
    def policy(case: str) -> tuple[int, list[str]]:
        found = objects(made(CASES[case]))[1]["spec"]["failurePolicy"]
        return found["maxRestarts"], [rule["action"] for rule in found["rules"]]

    assert policy("plain") == (10, ["RestartJobSet", "FailJobSet"])  # a worker that fails is not to be started again
    assert policy("direct") == (7, ["RestartJobSet"])


TELL = """\
import json, os, signal, sys, time
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DTCTL_ATTEMPT", "A", "CROSS_RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
said = "SAID " + json.dumps([sys.argv[1:], [os.environ.get(name) for name in names]]) + "\\n"
os.write(1, said.encode())  # in one piece: two workers share the pipe
if "--fail" in sys.argv and os.environ["RANK"] == "3":
    sys.exit(3)
if {"--fail", "--wait"} & set(sys.argv):
    time.sleep(60)
"""
RUN = "cluster: {transport: slurm, nodes: 2, slots: 2}\n" + (
    "job: {name: x, script: tell.py, kind: deepspeed, add_args: [], args: [ARGS], env: {A: \"$(id) 'x'\\n$$\"}}\n"
    "kubernetes: {image: i}"
)


def pod(tmp_path: Path, argument: str, index: int) -> subprocess.Popen[str]:
    """Pod `index` of two, on this machine: the script as its container would run it."""
    script = objects(made(RUN.replace("ARGS", argument)))[0]["data"]["pod.sh"]
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "pod.sh").write_text(re.sub(r"\S+-workers-0-0\.\S+", "localhost", script))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": "pod", "DTCTL_ATTEMPT": "2"}
    return subprocess.Popen(
        ["bash", str(tmp_path / "pod.sh")], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    )


def test_a_pod_starts_its_workers_with_their_ranks(tmp_path: Path) -> None:
    process = pod(tmp_path, "'a,b'", 1)
    out, _ = process.communicate(timeout=600)
    said = sorted(json.loads(line.removeprefix("SAID ")) for line in out.splitlines())
    local = socket.getaddrinfo("localhost", 9, type=socket.SOCK_DGRAM)[0][4][0]
    assert process.returncode == 0
    assert [(argv, env[:4]) for argv, env in said] == [
        (["a,b"], ["2", "0", "4", local]),
        (["a,b"], ["3", "1", "4", local]),
    ]
    assert {tuple(env[5:]) for _, env in said} == {("2", "$(id) 'x'\n$$", "1")}


def test_a_worker_that_fails_ends_its_pod_with_its_exit_code(tmp_path: Path) -> None:
    process = pod(tmp_path, "--fail", 1)
    process.communicate(timeout=600)
    assert process.returncode == 3


def test_a_pod_that_is_stopped_ends_as_one_to_be_gone_on_with(tmp_path: Path) -> None:
    process = pod(tmp_path, "--wait", 0)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().startswith("SAID ")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NODES + "job: {script: a.py}", "a pod needs an image"),
        (
            "cluster: {transport: slurm, nodes: 2}\njob: {script: a.py}\nkubernetes: {image: i}",
            "`slots: auto` leaves open",
        ),
        (NODES + "job: {script: a.py, secrets: [K]}\nkubernetes: {image: i}", "K must come from a Secret"),
        (
            "cluster: {transport: ssh, nodes: [{name: a, slots: 1}, {name: b, slots: 2}]}\n"
            "job: {script: a.py, kind: direct}\nkubernetes: {image: i}",
            "these nodes have different slots",
        ),
    ],
)
def test_what_cannot_be_a_jobset(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        made(text)
