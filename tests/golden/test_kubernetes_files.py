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
import pytest
import yaml

from dtctl.errors import PlanError
from dtctl.kubernetes import jobset
from dtctl.plan.build import PlanFacts, build
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes
from tests.facts import raises

kubernetes_validate = pytest.importorskip("kubernetes_validate")

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
    "restricted": NODES
    + "job: {name: gpt, script: train.py, kind: direct, grace_s: 300}\n"
    + """kubernetes:
  image: registry.example/gpt:1
  image_pull_policy: Always
  image_pull_secrets: [registry]
  labels: {team: nlp}
  annotations: {owner: "a@b.c"}
  pod_security: restricted
  run_as_user: 1000
  run_as_group: 1000
  fs_group: 1000
  service_account: trainer
  priority_class: high
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
    {matchExpressions: [{key: gpu, operator: In, values: [h100]}]}]}}}
  ttl_s: 3600
  exclusive_topology: cloud.google.com/gke-nodepool
  extra: {spec: {suspend: true, replicatedJobs: [{name: workers, template: {spec: {template: {spec: {
    schedulerName: other, containers: [{name: workers, env: [{name: EXTRA, value: "1"}]}]}}}}}]}}
""",
    "rdma": NODES
    + "job: {name: gpt, script: train.py, kind: direct}\n"
    + "kubernetes: {image: i, capabilities: [IPC_LOCK], host_network: true, networks: [lab/rdma0, rdma1],"
    + " resources: {rdma/hca: 8}, termination_s: 600, runtime_class: nvidia, env_secrets: [store, tracker],"
    + " active_deadline_s: 86400, volumes: [{mount: /data, claim: datasets, read_only: true},"
    + " {mount: /local, source: {hostPath: {path: /mnt/nvme}}}]}",
}
VERSIONS = sorted(
    {
        tuple(map(int, match[1].split(".")[:2]))
        for path in (Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema").iterdir()
        if (match := re.match(r"v([\d.]+)-local-strict", path.name))
    }
)[-4:]
"""The newest four minor versions of Kubernetes that there are schemas of."""


def made(spec_text: str) -> str:
    spec = parse_spec(spec_text, source="dtctl.yaml", base_dir=HERE)
    plan = build(spec, resolve_nodes(spec), run="Gpt_1121-0930.k7", facts=PlanFacts(environ={}, address="pod-0"))
    return re.sub(r"dtctl [0-9.]+", "dtctl VERSION", jobset.render_jobset_file(spec, plan))


def jobset_of(text: str) -> dict[str, Any]:
    (job,) = yaml.safe_load_all(text)
    return dict(job)


def template_of(job: dict[str, Any]) -> dict[str, Any]:
    """The template of the pods."""
    return dict(job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])


def script_of(job: dict[str, Any]) -> str:
    return str(template_of(job)["metadata"]["annotations"]["dtctl/pod.sh"])


def as_job(job: dict[str, Any]) -> dict[str, Any]:
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": spec}


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_as_kept(case: str) -> None:
    found, kept = made(CASES[case]), HERE / "kubernetes" / f"{case}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        kept.write_text(found)
    assert found == kept.read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_schemas_of_kubernetes_and_of_jobset_allow_it(case: str, version: tuple[int, int]) -> None:
    assert len(VERSIONS) == 4
    job = jobset_of(made(CASES[case]))
    kubernetes_validate.validate(as_job(job), "{}.{}".format(*version), strict=True)
    jsonschema.validate(job, json.loads((HERE / "kubernetes" / "jobset.schema.json").read_text()))


def test_the_checks_can_fail() -> None:
    job = jobset_of(made(CASES["plain"]))
    schema = json.loads((HERE / "kubernetes" / "jobset.schema.json").read_text())
    job["spec"]["failurePolicy"]["rules"][0]["action"] = "StartAgain"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, schema)
    template_of(job)["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(as_job(job), kubernetes_validate.latest_version(), strict=True)


def test_a_restricted_namespace_takes_the_pods() -> None:
    """The rules of the Pod Security Standard `restricted` (Kubernetes 1.25 and newer), field by field."""
    pod = template_of(jobset_of(made(CASES["restricted"])))["spec"]
    (container,) = pod["containers"]
    context, own = pod["securityContext"], container["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] != 0
    assert context["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"]["drop"] == ["ALL"]
    assert {*own["capabilities"].get("add", [])} <= {"NET_BIND_SERVICE"}
    kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
    assert kinds <= {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & {*pod}


def test_what_a_cluster_asks_for_is_in_the_jobset() -> None:
    job = jobset_of(made(CASES["restricted"]))
    template = template_of(job)
    pod = template["spec"]
    assert job["spec"]["ttlSecondsAfterFinished"] == 3600
    assert job["spec"]["suspend"] is True
    assert (
        job["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"] == "cloud.google.com/gke-nodepool"
    )
    assert job["metadata"]["labels"] == template["metadata"]["labels"] == {"team": "nlp"}
    assert pod["terminationGracePeriodSeconds"] == 330
    assert (pod["priorityClassName"], pod["serviceAccountName"], pod["schedulerName"]) == ("high", "trainer", "other")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert [variable["name"] for variable in pod["containers"][0]["env"]] == ["DTCTL_ATTEMPT", "EXTRA"]
    rdma = template_of(jobset_of(made(CASES["rdma"])))
    assert rdma["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "lab/rdma0, rdma1"
    assert (rdma["spec"]["hostNetwork"], rdma["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert rdma["spec"]["containers"][0]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert rdma["spec"]["terminationGracePeriodSeconds"] == 600


def test_names_are_those_of_the_spec() -> None:
    """What compares files (GitOps) sees the same objects as long as the spec says the same."""
    specs = [
        parse_spec(CASES["plain"] + more, source="dtctl.yaml", base_dir=HERE) for more in ("", "", "\ntrain: {lr: 1}")
    ]
    first, same, other = (jobset.compute_stable_run_id(spec) for spec in specs)
    assert first == same != other


def test_pods_find_each_other_by_names_that_a_service_can_have() -> None:
    job = jobset_of(made(CASES["direct"]))
    name = job["metadata"]["name"]
    assert name == job["spec"]["network"]["subdomain"] == "gpt-1121-0930-k7"
    assert f"{name}-workers-0-0.{name} " in script_of(job)
    assert len(jobset.format_object_name("a" * 70 + "-1121-093012-k7")) == jobset.NAME_LIMIT
    assert jobset.format_object_name("a" * 70 + "-1121-093012-k7").endswith("-1121-093012-k7")
    several = ["gpt_1", "a" * 70, "b" + "a" * 70]
    assert len({jobset.format_object_name(run) for run in several}) == len(several)
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", jobset.format_object_name(run)) for run in several)


@pytest.mark.parametrize(
    ("amount", "right"), [("32", True), ("500m", True), ("256Gi", True), ("1.5", True), ("foo", False), ("-1", False)]
)
def test_amounts_of_resources(amount: str, right: bool) -> None:
    assert bool(jobset.QUANTITY.fullmatch(amount)) is right


def test_the_budgets_of_starts() -> None:
    def policy(case: str) -> tuple[int, list[str]]:
        found = jobset_of(made(CASES[case]))["spec"]["failurePolicy"]
        return found["maxRestarts"], [rule["action"] for rule in found["rules"]]

    assert policy("plain") == (10, ["RestartJobSet", "FailJobSet"])  # a worker that fails is not to be started again
    assert policy("direct") == (7, ["RestartJobSet"])


TELL = """\
import json, os, signal, sys, time
def stop(*_):
    if "--save" in sys.argv:
        time.sleep(2)
    sys.exit(75)
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DTCTL_ATTEMPT", "A", "CROSS_RANK"]
signal.signal(signal.SIGTERM, stop)
said = "SAID " + json.dumps([sys.argv[1:], [os.environ.get(name) for name in names]]) + "\\n"
os.write(1, said.encode())  # in one piece: two workers share the pipe
if "--fail" in sys.argv and os.environ["RANK"] == "3":
    sys.exit(3)
if {"--fail", "--wait", "--save"} & set(sys.argv):
    time.sleep(60)
"""
RUN = "cluster: {transport: slurm, nodes: 2, slots: 2}\n" + (
    "job: {name: x, script: tell.py, kind: deepspeed, add_args: [], args: [ARGS]MORE, env: {A: \"$(id) 'x'\\n$$\"}}\n"
    "kubernetes: {image: i}"
)


def pod(tmp_path: Path, argument: str, index: int, more: str = "") -> subprocess.Popen[str]:
    """Pod `index` of two, on this machine: the script as its container would run it."""
    script = script_of(jobset_of(made(RUN.replace("ARGS", argument).replace("MORE", more))))
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


@pytest.mark.slow
def test_a_worker_that_saves_has_the_whole_time_of_its_pod(tmp_path: Path) -> None:
    """Longer than job.grace_s, which is for those whose peer has failed; the end of a pod is Kubernetes' own."""
    process = pod(tmp_path, "--save", 0, more=", grace_s: 0.1")
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().startswith("SAID ")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 75


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("pod_security: restricted, capabilities: [IPC_LOCK]", "kubernetes.capabilities"),
        ("pod_security: baseline, capabilities: [IPC_LOCK]", "kubernetes.capabilities"),
        ("pod_security: baseline, host_network: true", "kubernetes.host_network"),
        ("pod_security: restricted, run_as_user: 0", "kubernetes.run_as_user"),
        ("labels: {a: 'b c'}", "kubernetes.labels"),
        ("extra: {spec: {network: {$other: 1}}}", "kubernetes.extra.spec.network.$other"),
        ("extra: {spec: {replicatedJobs: [{replicas: 2}]}}", "kubernetes.extra.spec.replicatedJobs"),
    ],
)
def test_what_the_cluster_would_refuse(more: str, key: str) -> None:
    spec = parse_spec(
        NODES + f"job: {{script: a.py}}\nkubernetes: {{image: i, {more}}}", source="d.yaml", base_dir=HERE
    )
    plan = build(spec, resolve_nodes(spec), run="r", facts=PlanFacts(environ={}, address="pod-0"))
    with pytest.raises(PlanError) as raised:
        jobset.render_jobset_file(spec, plan)
    assert raised.value.where in (key, "d.yaml:3")


def test_a_script_that_no_pod_can_carry() -> None:
    with pytest.raises(PlanError):
        made(NODES + f"job: {{script: a.py, env: {{A: {'x' * jobset.SCRIPT_BYTES}}}}}\nkubernetes: {{image: i}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NODES + "job: {script: a.py}", "pod image"),
        (
            "cluster: {transport: slurm, nodes: 2}\njob: {script: a.py}\nkubernetes: {image: i}",
            "slots auto",
        ),
        (NODES + "job: {script: a.py, secrets: [K]}\nkubernetes: {image: i}", "K Secret"),
        (
            "cluster: {transport: ssh, nodes: [{name: a, slots: 1}, {name: b, slots: 2}]}\n"
            "job: {script: a.py, kind: direct}\nkubernetes: {image: i}",
            "slots different",
        ),
    ],
)
def test_what_cannot_be_a_jobset(text: str, message: str) -> None:
    with raises(PlanError, message):
        made(text)
