"""The pods of a JobSet: one container with the workers of a node, and settings for the cluster's policies. Pure."""

from __future__ import annotations

import math
from typing import Any, Final

from dtctl import names
from dtctl.errors import PlanError
from dtctl.plan.model import Plan
from dtctl.spec.model import Kubernetes, Spec

WORKERS: Final = "workers"
"""Name of the one replicated job, and of its container."""
SCRIPT_FOLDER: Final = "/etc/dtctl"
SCRIPT: Final = "pod.sh"
SCRIPT_ANNOTATION: Final = "dtctl/pod.sh"
"""Annotation with the script; as part of the pod it is removed with it, and a restarted pod has the same script."""
ATTEMPT_LABEL: Final = "jobset.sigs.k8s.io/restart-attempt"
NETWORKS: Final = "k8s.v1.cni.cncf.io/networks"
BASELINE_CAPABILITIES: Final = frozenset(
    {
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
        "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    }
)  # fmt: skip
ALLOWED_CAPABILITIES: Final = {"baseline": BASELINE_CAPABILITIES, "restricted": frozenset({"NET_BIND_SERVICE"})}
"""Capabilities by level. Source: Kubernetes, Pod Security Standards."""
TERMINATION_MARGIN_S: Final = 30


def build_pod_template(plan: Plan, settings: Kubernetes, script: str) -> dict[str, Any]:
    """Return the template of the pods.

    Args:
        plan: what they run.
        settings: the section of the spec.
        script: script that each of them runs.
    """
    annotations = {**settings.annotations, SCRIPT_ANNOTATION: script}
    if settings.networks:
        annotations[NETWORKS] = ", ".join(settings.networks)
    metadata: dict[str, Any] = {"annotations": annotations}
    if settings.labels:
        metadata["labels"] = dict(settings.labels)
    return {"metadata": metadata, "spec": _build_pod_spec(plan, settings)}


def compute_termination_s(plan: Plan, settings: Kubernetes) -> int:
    """Return seconds between the request to stop and the end of a pod."""
    return settings.termination_s or math.ceil(plan.grace_s) + TERMINATION_MARGIN_S


def check_pod_security(spec: Spec, settings: Kubernetes) -> None:
    """Refuse what the namespace's Pod Security Standard would refuse.

    Raises:
        PlanError: names the key.
    """
    level = settings.pod_security
    if level == "privileged":
        return
    if settings.host_network:
        raise PlanError(
            f"the Pod Security Standard {level} does not allow the network of the nodes",
            where=spec.written_at("kubernetes.host_network"),
            hint="use a namespace with the level privileged, or secondary networks: kubernetes.networks",
        )
    refused = sorted({*settings.capabilities} - ALLOWED_CAPABILITIES[level])
    if refused:
        raise PlanError(
            f"the Pod Security Standard {level} does not allow the capability {', '.join(refused)}",
            where=spec.written_at("kubernetes.capabilities"),
            hint="use a namespace with the level privileged; for IPC_LOCK: nodes whose runtime lifts the memlock limit",
        )
    if level == "restricted" and settings.run_as_user == 0:
        raise PlanError(
            "the Pod Security Standard restricted does not allow root",
            where=spec.written_at("kubernetes.run_as_user"),
            hint="use another number, whose user can read the code and write the snapshots",
        )


def _build_pod_spec(plan: Plan, settings: Kubernetes) -> dict[str, Any]:
    script = {"path": SCRIPT, "fieldRef": {"fieldPath": f"metadata.annotations['{SCRIPT_ANNOTATION}']"}}
    volumes: list[dict[str, Any]] = [
        {"name": "script", "downwardAPI": {"items": [script]}},
        # Shared memory of data loaders and NCCL.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}},
    ]
    if settings.claim:
        volumes.append({"name": "code", "persistentVolumeClaim": {"claimName": settings.claim}})
    for number, volume in enumerate(settings.volumes):
        source = volume.source or {"persistentVolumeClaim": {"claimName": volume.claim}}
        volumes.append({"name": f"volume-{number}", **source})
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": compute_termination_s(plan, settings),
        "containers": [_build_pod_container(plan, settings)],
        "volumes": volumes,
    }
    security = _pod_security(settings)
    optional: dict[str, Any] = {
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": secret} for secret in settings.image_pull_secrets],
        "priorityClassName": settings.priority_class,
        "runtimeClassName": settings.runtime_class,
        "securityContext": security,
        "nodeSelector": dict(settings.node_selector),
        "affinity": settings.affinity,
        "tolerations": [toleration.model_dump(exclude_none=True) for toleration in settings.tolerations],
    }
    if settings.host_network:
        # Only the cluster's DNS can resolve the names of the other pods.
        optional |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {**pod, **{key: value for key, value in optional.items() if value}}


def _build_pod_container(plan: Plan, settings: Kubernetes) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "script", "mountPath": SCRIPT_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where programs look for it
    ]
    if settings.claim:
        mounts.append({"name": "code", "mountPath": settings.workdir})
    for number, volume in enumerate(settings.volumes):
        read_only = {"readOnly": True} if volume.read_only else {}
        mounts.append({"name": f"volume-{number}", "mountPath": volume.mount, **read_only})
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
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["bash", f"{SCRIPT_FOLDER}/{SCRIPT}"],
        "workingDir": settings.workdir,
        "env": env,
        "envFrom": [{"secretRef": {"name": secret}} for secret in settings.env_secrets],
        "resources": {"limits": amounts, "requests": amounts} if amounts else None,
        "volumeMounts": mounts,
        "securityContext": _container_security(settings),
    }
    return {key: value for key, value in container.items() if value}


def _pod_security(settings: Kubernetes) -> dict[str, Any]:
    context: dict[str, Any] = {}
    if settings.pod_security == "restricted":
        context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    numbers = {
        "runAsUser": settings.run_as_user,
        "runAsGroup": settings.run_as_group,
        "fsGroup": settings.fs_group,
    }
    return {**context, **{key: number for key, number in numbers.items() if number is not None}}


def _container_security(settings: Kubernetes) -> dict[str, Any]:
    capabilities: dict[str, Any] = {"add": list(settings.capabilities)} if settings.capabilities else {}
    if settings.pod_security == "restricted":
        return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **capabilities}}
    return {"capabilities": capabilities} if capabilities else {}
