"""A plan as a JobSet of Kubernetes (https://jobset.sigs.k8s.io). Pure: the same spec gives the same text.

One indexed job: a pod per node, found by the others through the headless service that JobSet makes. What a pod runs is
a script in a ConfigMap; the argv and the variables in it are those of a launch over SSH. What only the pod knows (its
index, the address of the first pod, which start this is) the script finds out there.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Final

import yaml

import dtctl
from dtctl import names, shell
from dtctl.errors import PlanError
from dtctl.plan.model import Plan
from dtctl.render import render, template_folders
from dtctl.render.standalone import standalone
from dtctl.spec.model import Kubernetes, Spec
from dtctl.spec.nodes import resolve_nodes

TEMPLATE: Final = "pod.sh.j2"
API: Final = "jobset.x-k8s.io/v1alpha2"
WORKERS: Final = "workers"
"""Name of the one replicated job, and of its container."""
SCRIPT_FOLDER: Final = "/etc/dtctl"
SCRIPT: Final = "pod.sh"
PLACE: Final = "dtctl: place in the job"
NAME_LIMIT: Final = 40
"""Of a JobSet's name: a pod's has its job's, two indexes and a random part behind it, and may have 63 characters."""
QUANTITY: Final = re.compile(r"\d+(\.\d+)?([munkMGTPE]|[KMGTPE]i|[eE]\d+)?")
"""An amount of a resource. Source: Kubernetes, API conventions, resource.Quantity."""
ATTEMPT_LABEL: Final = "jobset.sigs.k8s.io/restart-attempt"
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
LATE_OPTIONS: Final = {
    "--node-rank": shell.Late("--node-rank=$JOB_COMPLETION_INDEX"),
    "--master-addr": shell.Late("--master-addr=$MASTER_ADDR"),
    "--master-port": shell.Late("--master-port=$MASTER_PORT"),
    "--rdzv-id": shell.Late(f"--rdzv-id=${names.RUN_ID}.${names.ATTEMPT}"),
}
"""Options of torchrun whose values are known only in the pod."""


def text(spec: Spec, plan: Plan) -> str:
    """The file: a ConfigMap with the script, and the JobSet.

    Args:
        spec: the spec.
        plan: what it comes to; its nodes are only counted.

    Raises:
        PlanError: a key of the spec cannot be said to Kubernetes.
        RenderError: the template is missing or wrong.
    """
    settings = spec.kubernetes or Kubernetes()
    _check(spec, plan, settings)
    name = object_name(plan.run)
    source = f"the claim {settings.claim}" if settings.claim else f"the image {settings.image}"
    head = (
        f"# Made by dtctl {dtctl.__version__} for run {plan.run}: {len(plan.nodes)} pods with {plan.head.slots} "
        f"workers each, kind {plan.kind}, spec {plan.spec_digest}.\n"
        f"# The job's code is in {source}, in folder {settings.workdir}; dtctl brings nothing there. JobSet has to be\n"
        "# installed in the cluster. Apply it with: kubectl apply --filename FILE\n"
    )
    metadata = {"name": name, **({"namespace": settings.namespace} if settings.namespace else {})}
    script = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {SCRIPT: _script(spec, plan, name)},
    }
    queue = {"labels": {QUEUE_LABEL: settings.queue}} if settings.queue else {}
    jobset = {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {**metadata, **queue},
        "spec": _jobset(plan, settings, name),
    }
    return head + "---\n".join(_yaml(document) for document in (script, jobset))


def object_name(run: str) -> str:
    """A run's id as the name of an object: small letters, digits and dashes."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if len(slug) <= NAME_LIMIT:
        return slug
    # The end of a run's id is what people look at; two long names that end alike are still two.
    mark = hashlib.blake2b(run.encode(), digest_size=3).hexdigest()
    room = NAME_LIMIT - len(mark) - 2
    return f"j{mark}-{slug[-room:].strip('-')}"


def _jobset(plan: Plan, settings: Kubernetes, name: str) -> dict[str, Any]:
    rules = [{"name": "stopped", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    if plan.max_restarts == 0:
        rules.append({"name": "failed", "action": "FailJobSet"})
    job = {
        "parallelism": len(plan.nodes),
        "completions": len(plan.nodes),
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one pod that fails fails the job, and JobSet decides whether all start again
        "podFailurePolicy": {
            "rules": [
                # Stopped, and to be gone on with; or taken off its node.
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": WORKERS, "operator": "In", "values": [names.REQUEUE_EXIT]},
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod(plan, settings, name)},
    }
    return {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": settings.restarts + plan.max_restarts, "rules": rules},
        "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": job}}],
    }


def _pod(plan: Plan, settings: Kubernetes, name: str) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "script", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}},  # of data loaders and NCCL
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "script", "mountPath": SCRIPT_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where programs look for it
    ]
    if settings.claim:
        volumes.append({"name": "code", "persistentVolumeClaim": {"claimName": settings.claim}})
        mounts.append({"name": "code", "mountPath": settings.workdir})
    amounts = dict(settings.resources)
    if settings.gpu:
        amounts[settings.gpu] = str(plan.head.slots)
    attempt = {"fieldRef": {"fieldPath": f"metadata.labels['{ATTEMPT_LABEL}']"}}
    env = [{"name": names.ATTEMPT, "valueFrom": attempt}]
    for secret in plan.secrets:
        reference = {"name": settings.secret, "key": secret}
        env.append({"name": secret, "valueFrom": {"secretKeyRef": reference}})
    container: dict[str, Any] = {
        "name": WORKERS,
        "image": settings.image,
        "command": ["bash", f"{SCRIPT_FOLDER}/{SCRIPT}"],
        "workingDir": settings.workdir,
        "env": env,
        **({"resources": {"limits": amounts, "requests": amounts}} if amounts else {}),
        "volumeMounts": mounts,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(plan.grace_s) + 30,
        "containers": [container],
        "volumes": volumes,
    }
    if settings.node_selector:
        pod["nodeSelector"] = dict(settings.node_selector)
    return pod


def _script(spec: Spec, plan: Plan, name: str) -> str:
    node = plan.head
    values = {
        "version": dtctl.__version__,
        "names": names,
        "plan": plan,
        "node": node,
        "groups": [group for group in node.env_by_origin if group.origin != PLACE],
        "python": node.python or "python3",
        "head": f"{name}-{WORKERS}-0-0.{name}",
        "port": plan.rendezvous.port,
        "meeting": standalone(Path(__file__).with_name("pick_endpoint.py")),
        "argv": _with_late_values(node.argv) if plan.kind == "torchrun" else node.argv,
        "grace_s": plan.grace_s,
    }
    return render(TEMPLATE, values, folders=template_folders(spec.base_dir))


def _with_late_values(argv: tuple[str, ...]) -> list[str]:
    """The argv of torchrun with what only the pod knows; nothing behind torchrun's own options is touched."""
    start = 3 if argv[1:3] == ("-m", "torch.distributed.run") else 1
    end = next((at for at in range(start, len(argv)) if not argv[at].startswith("--")), len(argv))
    return [*(LATE_OPTIONS.get(argument.partition("=")[0], argument) for argument in argv[:end]), *argv[end:]]


def _check(spec: Spec, plan: Plan, settings: Kubernetes) -> None:
    if not settings.image:
        raise PlanError(
            "a pod needs an image",
            where=spec.written_at("kubernetes"),
            hint="for example `kubernetes: {image: my.registry/gpt:1}`, with the job's code or a claim that has it",
        )
    if any(not isinstance(node.slots, int) for node in resolve_nodes(spec)):
        raise PlanError(
            "pods ask for a number of GPUs, which `slots: auto` leaves open",
            where=spec.written_at("cluster.slots"),
            hint="give it as a number: `slots: 8`",
        )
    if len({node.slots for node in plan.nodes}) > 1:
        raise PlanError(
            "all pods of a job are alike, and these nodes have different slots",
            where=spec.written_at("cluster.nodes"),
            hint="give all nodes the same slots",
        )
    for resource, amount in settings.resources.items():
        if not QUANTITY.fullmatch(amount):
            raise PlanError(
                f"{amount!r} is not an amount of {resource}",
                where=spec.written_at("kubernetes.resources"),
                hint="as Kubernetes writes it: 32, 500m, 256Gi",
            )
    if plan.secrets and not settings.secret:
        raise PlanError(
            f"{', '.join(plan.secrets)} must come from a Secret of the cluster",
            where=spec.written_at("job.secrets"),
            hint="name it: `kubernetes: {secret: my-secret}`, with a key for each variable",
        )


class _Dumper(yaml.SafeDumper):
    """Long text as a block, so that a person can read it."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the name is yaml's
        """Everything is written where it stands; references are for machines."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
