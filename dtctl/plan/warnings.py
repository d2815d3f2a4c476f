"""Warnings about a valid spec that may not have the intended effect; shown before and at a launch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from dtctl.plan.commands import choose_interpreter
from dtctl.spec.model import NodeEntry, Spec
from dtctl.spec.nodes import NodeSpec, count_gres_gpus

_LOGIN: Final = (
    "cluster.user", "cluster.port", "cluster.identity_file", "cluster.known_hosts", "cluster.ssh_config",
)  # fmt: skip
_AT_LOGIN: Final = ("cluster.ssh", "cluster.connect_timeout_s", "cluster.workdir")
"""Keys that a job of Slurm uses on its login node alone."""
_LOST_NODES: Final = ("cluster.spares", "cluster.min_nodes", "cluster.return_s")
UNUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "local": (*_LOGIN, *_LOST_NODES, "cluster.ssh", "cluster.login", "cluster.connect_timeout_s"),
    "ssh": ("cluster.login",),
    "sandbox": (*_LOGIN, "cluster.login"),
    "slurm": ("job.shared",),  # the working folder lies on a disk that the nodes share
}
"""Transport -> keys that no job uses there."""
UNUSED_OF_NODES: Final[Mapping[str, tuple[str, ...]]] = {
    "local": ("port", "user", "gres"),
    "ssh": ("gres",),
    "sandbox": ("port", "user", "gres"),
    "slurm": ("address", "port", "user", "rack", "workdir"),
}
"""Transport -> keys of an entry of `cluster.nodes` that no job uses there."""
UNUSED_IN_PLAIN_MODE: Final = (
    *_LOST_NODES, "cluster.link_timeout_s", "job.grace_s", "job.hang_s", "job.hang_start_s", "job.hang_output_s",
    "job.heal_s",
    "job.log_mib", "job.max_restarts", "job.preload", "job.recovery", "job.time_s", "network.rendezvous_address",
)  # fmt: skip
"""Keys that a job of Slurm without dtctl's launcher inside does not use: its nodes run no supervisor of dtctl."""

_ACTIVATION: Final = r"(?:^|[\s/;&|'\"])activate(?:\.\w+)?(?:$|[\s;&|'\"])"
"""Pattern of the script or subcommand `activate` of venv, conda, mamba and pyenv."""


def list_warnings(spec: Spec, nodes: Sequence[NodeSpec], *, per_worker: bool) -> list[str]:
    """Return the warnings about a spec, one sentence each.

    Args:
        spec: the checked spec.
        nodes: its nodes.
        per_worker: True if each worker is started separately, not all of a node by one program.
    """
    warnings = []
    transport = spec.cluster.transport
    if spec.is_plain:
        warnings.append(
            f"{spec.plain_reason}: nothing in the job detects a hang, restarts failed workers or replaces lost ones"
        )
    if keys := find_unused_keys(spec):
        verb = "has" if len(keys) == 1 else "have"
        where = "without dtctl's launcher in the job" if spec.is_plain else f"with transport {transport}"
        warnings.append(f"{', '.join(keys)} {verb} no effect {where}")
    if note := _useless_activation(spec, nodes):
        warnings.append(note)
    if transport == "slurm" and _names_nodes(spec):
        warnings.append(
            "Slurm chooses the nodes; those of cluster.nodes are only counted, slurm.nodelist asks for some by name"
        )
    if transport == "slurm" and len({node.gres for node in nodes}) > 1:
        warnings.append(
            "Slurm gives each node of a job the same resources: the largest number of each resource that an entry of "
            "cluster.nodes asks for"
        )
    if transport == "slurm" and (scarce := _scarce_cores(spec, nodes, per_worker=per_worker)):
        warnings.append(scarce)
    return warnings


def _useless_activation(spec: Spec, nodes: Sequence[NodeSpec]) -> str:
    """Return a sentence if a line of `job.setup` activates an environment and no worker runs its Python."""
    is_python = spec.job.command is None and not choose_interpreter(spec.job.script or "", "")
    line = next((line for line in spec.job.setup if re.search(_ACTIVATION, line)), None)
    # A name without a folder is searched in the PATH that the setup lines have set.
    fixed = next((node.python for node in nodes if node.python is not None and "/" in node.python), None)
    if line is None or fixed is None or not is_python:
        return ""
    is_default = spec.cluster.transport in ("local", "sandbox") and not _is_set(spec, "cluster.python")
    origin = "the one that runs dtctl" if is_default else "as the spec says"
    return (
        f"`{line.strip()}` in job.setup has no effect on the Python of the workers, which is {fixed}, {origin}: "
        "give the Python of that environment as cluster.python"
    )


def find_unused_keys(spec: Spec) -> list[str]:
    """Return the keys that a spec sets and its launch does not use, sorted."""
    unused = {*UNUSED[spec.cluster.transport]}
    if spec.cluster.transport == "slurm":
        unused |= {*UNUSED_IN_PLAIN_MODE} if spec.is_plain else set()
        unused |= set() if spec.cluster.login else {*_LOGIN, *_AT_LOGIN}
    sections = [name for name in _unused_sections(spec) if getattr(spec, name) is not None]
    return sorted([*(key for key in unused if _is_set(spec, key)), *_unused_of_nodes(spec), *sections])


def _is_set(spec: Spec, key: str) -> bool:
    section, name = key.split(".")
    return name in getattr(spec, section).model_fields_set


def _unused_of_nodes(spec: Spec) -> set[str]:
    """Return the keys of entries of `cluster.nodes` that no job uses."""
    nodes, unused = spec.cluster.nodes, UNUSED_OF_NODES[spec.cluster.transport]
    entries = [] if isinstance(nodes, int) else [entry for entry in nodes if isinstance(entry, NodeEntry)]
    return {f"cluster.nodes.{name}" for entry in entries for name in unused if name in entry.model_fields_set}


def _unused_sections(spec: Spec) -> tuple[str, ...]:
    """Return the sections that no launch on this transport reads, as `dtctl sbatch` and `dtctl render` do."""
    return ("kubernetes",) if spec.cluster.transport == "slurm" else ("kubernetes", "slurm")


def _names_nodes(spec: Spec) -> bool:
    """Return whether the spec names nodes that it does not request from Slurm."""
    slurm = spec.slurm
    is_asked = slurm is not None and bool(slurm.nodelist or "nodelist" in slurm.extra)
    return bool(spec.cluster.nodes) and not isinstance(spec.cluster.nodes, int) and not is_asked


def _scarce_cores(spec: Spec, nodes: Sequence[NodeSpec], *, per_worker: bool) -> str:
    """Return a sentence if a job of Slurm requests GPUs and no cores: most sites then give each task one core."""
    slurm = spec.slurm
    said = ("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus")
    if slurm is None or slurm.cpus_per_task or slurm.exclusive or any(key in slurm.extra for key in said):
        return ""
    gpus = max((count_gres_gpus(node.gres or "") for node in nodes), default=0)
    if gpus < 1:
        return ""
    tasks = gpus if per_worker else 1
    shared = f"{gpus} workers of a node share one" if tasks == 1 and gpus > 1 else "each worker gets one"
    return (
        f"slurm.cpus_per_task is not set: unless the site's default is higher, {shared} core, and the memory of "
        f"that core; for 64 cores on a node: `slurm: {{cpus_per_task: {64 // tasks}}}`"
    )
