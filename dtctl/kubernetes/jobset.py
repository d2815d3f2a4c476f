"""A plan as a JobSet of Kubernetes (https://jobset.sigs.k8s.io). Pure: the same spec gives the same text.

One indexed job: a pod per node, found by the others through the headless service that JobSet makes. A pod runs a script
that is a part of the pod; its argv and variables are those of a launch over SSH. Facts that are known only in the pod
(its index, the address of the first pod, the number of the start) are determined by the script.
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
from dtctl.kubernetes import patch, pod
from dtctl.kubernetes.pod import WORKERS
from dtctl.plan import environment
from dtctl.plan.build import compute_spec_digest
from dtctl.plan.model import EnvGroup, EnvVar, NodePlan, Plan
from dtctl.render import list_template_folders, render_template
from dtctl.render.inline_node_facts import build_standalone_program
from dtctl.spec.model import Kubernetes, Spec
from dtctl.spec.nodes import resolve_nodes

TEMPLATE: Final = "pod.sh.j2"
API: Final = "jobset.x-k8s.io/v1alpha2"
NAME_LIMIT: Final = 40
"""Characters of a JobSet's name: a pod's name adds a job, two indexes and a random part, and may have 63."""
QUANTITY: Final = re.compile(r"\d+(\.\d+)?([munkMGTPE]|[KMGTPE]i|[eE]\d+)?")
"""An amount of a resource. Source: Kubernetes, API conventions, resource.Quantity."""
LABEL: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
"""The value of a label. Source: Kubernetes, Labels and Selectors."""
SCRIPT_BYTES: Final = 100_000
"""All annotations of an object may have 256 KiB, and `kubectl apply` keeps the whole object in one of them."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
EXCLUSIVE: Final = "alpha.jobset.sigs.k8s.io/exclusive-topology"
SHUTDOWN_MARGIN_S: Final = 5
"""Seconds before the end of a pod in which torchrun kills workers that do not end by themselves."""
LATE_OPTIONS: Final = {
    "--node-rank": shell.ShellExpansion("--node-rank=$JOB_COMPLETION_INDEX"),
    "--master-addr": shell.ShellExpansion("--master-addr=$MASTER_ADDR"),
    "--master-port": shell.ShellExpansion("--master-port=$MASTER_PORT"),
    "--rdzv-id": shell.ShellExpansion(f"--rdzv-id=${names.RUN_ID}.${names.ATTEMPT}"),
}
"""Options of torchrun whose values are known only in the pod."""


def compute_stable_run_id(spec: Spec) -> str:
    """Return a run id that depends only on the spec, so that the same spec gives the same file."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", spec.job.name).strip("-_") or "job"
    return f"{stem[:32]}-{compute_spec_digest(spec)[:8]}"


def render_jobset_file(spec: Spec, plan: Plan) -> str:
    """Return the file with the JobSet.

    Args:
        spec: the spec.
        plan: the plan of the job; its nodes are only counted.

    Raises:
        PlanError: a key of the spec cannot be expressed in Kubernetes.
        RenderError: the template is missing or wrong.
    """
    settings = spec.kubernetes or Kubernetes()
    _check_jobset_spec(spec, plan, settings)
    source = f"the claim {settings.claim}" if settings.claim else f"the image {settings.image}"
    head = (
        f"# Made by dtctl {dtctl.__version__} for run {plan.run}: {len(plan.nodes)} pods with {plan.head.slots} "
        f"workers each, kind {plan.kind}, spec {plan.spec_digest}.\n"
        f"# The job's code is in {source}, in folder {settings.workdir}; dtctl copies nothing there. JobSet has to be\n"
        "# installed in the cluster. Apply it with: kubectl apply --filename FILE\n"
    )
    return head + _dump_yaml(build_patched_jobset(spec, plan, settings))


def build_patched_jobset(spec: Spec, plan: Plan, settings: Kubernetes) -> dict[str, Any]:
    """Return the JobSet, with the spec's patch applied.

    Raises:
        PlanError: the script is too long, or the patch does not fit.
        RenderError: the template is missing or wrong.
    """
    name = format_object_name(plan.run)
    script = _render_pod_script(spec, plan, name)
    if len(script.encode()) > SCRIPT_BYTES:
        raise PlanError(
            f"the script of a pod has {len(script.encode())} bytes, and a pod can carry {SCRIPT_BYTES}",
            where=spec.written_at("job.env"),
            hint="put long values into a file of the image, or of a volume",
        )
    labels, annotations = dict(settings.labels), dict(settings.annotations)
    if settings.queue:
        labels[QUEUE_LABEL] = settings.queue
    if settings.exclusive_topology:
        annotations[EXCLUSIVE] = settings.exclusive_topology
    optional = {"namespace": settings.namespace, "labels": labels, "annotations": annotations}
    document = {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {"name": name, **{key: value for key, value in optional.items() if value}},
        "spec": _build_jobset(plan, settings, name, script),
    }
    return patch.apply_merge_patch(document, settings.extra, at="kubernetes.extra")


def format_object_name(run: str) -> str:
    """Return a run's id as the name of an object: small letters, digits and dashes."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if len(slug) <= NAME_LIMIT:
        return slug
    # Users look at the end of a run's id; two long names with equal ends still have to differ.
    mark = hashlib.blake2b(run.encode(), digest_size=3).hexdigest()
    room = NAME_LIMIT - len(mark) - 2
    return f"j{mark}-{slug[-room:].strip('-')}"


def _build_jobset(plan: Plan, settings: Kubernetes, name: str, script: str) -> dict[str, Any]:
    rules = [{"name": "stopped", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    if plan.max_restarts == 0:
        rules.append({"name": "failed", "action": "FailJobSet"})
    job = {
        "parallelism": len(plan.nodes),
        "completions": len(plan.nodes),
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a failed pod fails the job, and JobSet decides whether all pods start again
        "podFailurePolicy": {
            "rules": [
                # The pod was stopped and is to continue, or was evicted from its node.
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": WORKERS, "operator": "In", "values": [names.REQUEUE_EXIT]},
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod.build_pod_template(plan, settings, script),
    }
    if settings.active_deadline_s is not None:
        job["activeDeadlineSeconds"] = settings.active_deadline_s
    ttl = {} if settings.ttl_s is None else {"ttlSecondsAfterFinished": settings.ttl_s}
    return {
        **ttl,
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": settings.restarts + plan.max_restarts, "rules": rules},
        "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": job}}],
    }


def _choose_image_python(spec: Spec, node: NodePlan) -> str:
    """Return the image's Python: that of the spec, never the default that a transport takes from this machine."""
    return (node.python if spec.cluster.python else "") or "python3"


def _render_pod_script(spec: Spec, plan: Plan, name: str) -> str:
    node = plan.head
    attempt = shell.ShellExpansion(f"${names.ATTEMPT}")
    values = {
        "version": dtctl.__version__,
        "names": names,
        "plan": plan,
        "node": node,
        "place": environment.build_node_variables(
            plan.kind,
            node_rank=shell.ShellExpansion("$JOB_COMPLETION_INDEX"),
            nodes=str(len(plan.nodes)),
            slots=str(node.slots),
            world_size=str(plan.world_size),
            rendezvous_id=shell.ShellExpansion(f"${names.RUN_ID}.{attempt}"),
            attempt=attempt,
            max_restarts=str(plan.max_restarts),
        ),
        "worker": environment.build_worker_variables(
            plan.kind, rank=shell.ShellExpansion("$rank"), local_rank=shell.ShellExpansion("$local_rank")
        ),
        "groups": [
            *_build_thread_variables(node),
            *(group for group in node.env_by_origin if group.origin != environment.PLACE),
        ],
        "python": _choose_image_python(spec, node),
        "head": f"{name}-{WORKERS}-0-0.{name}",
        "port": plan.rendezvous.port,
        "meeting": build_standalone_program(Path(__file__).with_name("pick_endpoint.py")),
        "argv": _with_late_values(node.argv) if plan.kind == "torchrun" else node.argv,
        "grace_s": plan.grace_s,
        # The default of torchrun is 30 s. It also reads its options from the environment; older versions ignore this
        # one.
        "shutdown_s": max(1, pod.compute_termination_s(plan, spec.kubernetes or Kubernetes()) - SHUTDOWN_MARGIN_S),
    }
    return render_template(TEMPLATE, values, folders=list_template_folders(spec.base_dir))


def _build_thread_variables(node: NodePlan) -> list[EnvGroup]:
    """Return the threads of each worker: its share of the cores of the pod, unless the image sets them."""
    if any(variable.name == environment.THREADS for variable in node.env):
        return []
    workers = "1 worker has" if node.slots == 1 else f"{node.slots} workers share"
    origin = f"dtctl: {workers} the pod's cores"
    share = f"$((cores < {node.slots} ? 1 : cores / {node.slots}))"
    value = shell.ShellExpansion(f"${{{environment.THREADS}:-{share}}}")
    return [EnvGroup(origin=origin, variables=(EnvVar(name=environment.THREADS, value=value, origin=origin),))]


def _with_late_values(argv: tuple[str, ...]) -> list[str]:
    """Return the argv of torchrun with values that are known in the pod; later arguments stay unchanged."""
    start = 3 if argv[1:3] == ("-m", "torch.distributed.run") else 1
    end = next((at for at in range(start, len(argv)) if not argv[at].startswith("--")), len(argv))
    return [*(LATE_OPTIONS.get(argument.partition("=")[0], argument) for argument in argv[:end]), *argv[end:]]


def _check_jobset_spec(spec: Spec, plan: Plan, settings: Kubernetes) -> None:
    if not settings.image:
        raise PlanError(
            "a pod needs an image",
            where=spec.written_at("kubernetes"),
            hint="for example `kubernetes: {image: my.registry/gpt:1}`, with the job's code or a claim that has it",
        )
    if any(not isinstance(node.slots, int) for node in resolve_nodes(spec)):
        raise PlanError(
            "pods ask for a number of GPUs, which `slots: auto` does not determine",
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
                hint="write it as Kubernetes does: 32, 500m, 256Gi",
            )
    for key, labels in (("labels", settings.labels), ("node_selector", settings.node_selector)):
        for label, value in labels.items():
            if not LABEL.fullmatch(value):
                raise PlanError(
                    f"{value!r} cannot be the value of the label {label}",
                    where=spec.written_at(f"kubernetes.{key}"),
                    hint="use at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends",
                )
    pod.check_pod_security(spec, settings)
    if spec.job.environment is not None:
        raise PlanError(
            "no environment is made in pods, which have that of their image",
            where=spec.written_at("job.environment"),
            hint="install the packages in the image",
        )
    if plan.secrets and not settings.secret:
        raise PlanError(
            f"{', '.join(plan.secrets)} must come from a Secret of the cluster",
            where=spec.written_at("job.secrets"),
            hint="name it: `kubernetes: {secret: my-secret}`, with a key for each variable",
        )


class _BlockTextDumper(yaml.SafeDumper):
    """Write long text as a block, which is readable."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the name is yaml's
        """Write every value in place, without YAML references."""
        return True


def _represent_yaml_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_BlockTextDumper.add_representer(str, _represent_yaml_text)


def _dump_yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_BlockTextDumper, sort_keys=False, allow_unicode=True, width=10_000)
