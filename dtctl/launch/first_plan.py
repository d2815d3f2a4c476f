"""The plan of a spec before any node was asked, from what this machine knows; what a dry run shows."""

from __future__ import annotations

import os
from pathlib import Path

from dtctl import folders
from dtctl.launch.cluster import ResolvedCluster
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.environment import Share
from dtctl.plan.model import Plan
from dtctl.spec.model import Spec
from dtctl.spec.nodes import resolve_nodes

SOURCE_BYTES = 32 << 20
"""Of a script."""
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


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
    """Text of the job's script, if it is here."""
    if spec.job.script is None or spec.job.kind != "direct":
        return ""
    try:
        path = spec.base_dir / spec.job.files.root / spec.job.script
        return folders.read_regular(str(path), SOURCE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Cores that this process may use: those it is bound to, and no more than its control groups grant it, at least 1.

    A container with `--cpus 2` on a machine of 64 cores still sees 64; torch starts 64 threads there.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *_granted(cgroups, membership)]))


def _granted(cgroups: Path, membership: Path) -> list[int]:
    """The limit of every control group that this process is in, whole cores; version 1 and version 2."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, group_path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        group = root / group_path.lstrip("/")
        # A group inside of a container may be named as the host sees it, and then only the root is there to read.
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                limits += _limit(folder)
    return limits


def _limit(folder: Path) -> list[int]:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return []
    return [max(1, int(quota) // int(period))] if quota.isdigit() and period.isdigit() and int(period) else []
