"""Facts of Slurm about this process: time that is left, requeueing, tasks and nodes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping

from dtctl.doctor.findings import Finding

RAN = ("time-left", "tasks", "requeue")
SHORT_S = 900.0
NO_TIME_S = 60.0
LIMIT_S = 5.0
"""Seconds to wait for the answer of a controller, which is late if it is busy."""


def scheduler(
    environ: Mapping[str, str],
    job: Mapping[str, str],
    *,
    node: str,
    nodes: int,
    kind: str | None,
    now: float,
    fixed_port: int | None,
) -> Iterator[Finding]:
    """Yield findings inside a Slurm job; none outside.

    Args:
        environ: of this process.
        job: Slurm's facts about the job, by its own names; empty if it does not answer.
        node: the head node, which findings are about.
        nodes: how many the spec has.
        kind: `job.kind`.
        now: seconds since the epoch.
        fixed_port: the rendezvous port, where the spec demands one.
    """
    number = environ.get("SLURM_JOB_ID")
    if not number:
        return

    def finding(check: str, summary: str, fix: str, *names: str, fail: bool = False) -> Finding:
        evidence = tuple(f"{name}={environ.get(name) or job[name]}" for name in names)
        status = "fail" if fail else "warn"
        return Finding(check=check, status=status, nodes=(node,), summary=summary, fix=fix, evidence=evidence)  # type: ignore[arg-type]

    ends = environ.get("SLURM_JOB_END_TIME", "")
    if ends.isdigit() and (left := int(ends) - now) < SHORT_S:
        yield finding(
            "time-left",
            f"job {number} ends in {max(0.0, left) / 60:.0f} minutes",
            "ask for more (sbatch --time), or let it go on from a snapshot: sbatch --requeue --signal=B:TERM@120",
            "SLURM_JOB_END_TIME",
            fail=left < NO_TIME_S,
        )
    # An interactive allocation (salloc) has nothing that could be started again.
    if job.get("BatchFlag") == "1" and job.get("Requeue") == "0":
        yield finding(
            "requeue",
            f"job {number} is not started again when a node is lost or another job takes its place",
            f"#SBATCH --requeue; for this job: scontrol update JobId={number} Requeue=1",
            "Requeue",
        )
    tasks = environ.get("SLURM_NTASKS_PER_NODE", "1")
    if tasks != "1" and kind in (None, "torchrun"):
        yield finding(
            "tasks",
            f"Slurm starts {tasks} tasks on a node, and each would start a torchrun of its own",
            "#SBATCH --ntasks-per-node=1; torchrun starts the workers",
            "SLURM_NTASKS_PER_NODE",
        )
    given = environ.get("SLURM_JOB_NUM_NODES", "")
    if given.isdigit() and int(given) < nodes:
        yield finding(
            "tasks",
            f"the spec has {nodes} nodes and job {number} has {given}",
            f"#SBATCH --nodes={nodes}, or fewer nodes in the spec",
            "SLURM_JOB_NUM_NODES",
            fail=True,
        )
    if fixed_port is not None and environ.get("SLURM_OVERSUBSCRIBE", "").upper() in ("YES", "OK", "FORCE"):
        yield finding(
            "tasks",
            f"nodes may be shared with other jobs, and every job of this spec wants port {fixed_port}",
            "network.rendezvous_port: auto",
            "SLURM_OVERSUBSCRIBE",
        )


def job_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The fields of `scontrol show job`, by Slurm's names; none outside a job, or if Slurm does not answer in time."""
    number = environ.get("SLURM_JOB_ID")
    if not number:
        return {}
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", "-o", number], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    first = done.stdout.splitlines()[:1]
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", first[0])) if first and done.returncode == 0 else {}
