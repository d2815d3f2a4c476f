"""The plan of a spec before any node was asked, from what this machine knows; what a dry run shows."""

from __future__ import annotations

import os

from dtctl import folders
from dtctl.launch.cluster import ResolvedCluster
from dtctl.node_facts import usable_cores
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.environment import Share
from dtctl.plan.model import Plan
from dtctl.spec.model import Spec
from dtctl.spec.nodes import resolve_nodes

SOURCE_BYTES = 32 << 20
"""Of a script."""


def first_plan(spec: Spec, cluster: ResolvedCluster, *, run: str) -> Plan:
    """The plan as it is known before any node was asked; what a dry run shows.

    Raises:
        PlanError: no job can be made of the spec.
    """
    return build(
        spec, cluster.nodes, run=run, facts=PlanFacts(environ=os.environ, share=share(spec), source=source(spec))
    )


def share(spec: Spec) -> Share | None:
    """What each node has of this machine, if they all lie on it."""
    if spec.cluster.transport == "local":
        return Share(cores=usable_cores(), nodes=1, threads=os.environ.get("OMP_NUM_THREADS"))
    if spec.cluster.transport == "sandbox":
        return Share(cores=usable_cores(), nodes=len(resolve_nodes(spec)))
    return None


def source(spec: Spec) -> str:
    """Text of the job's script, if it is here and the plan depends on it: on its first line, or on its imports."""
    script = spec.job.script
    if script is None or (script.endswith(".py") and spec.job.kind != "direct"):
        return ""
    try:
        path = spec.base_dir / spec.job.files.root / script
        return folders.read_regular(str(path), SOURCE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
