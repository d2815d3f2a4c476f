"""Checks of the Slurm job that this process is part of: remaining time, requeueing, tasks and nodes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping

from dtctl.doctor.findings import Finding
from dtctl.printable import format_count

RAN = ("time-left", "tasks", "requeue")
SHORT_S = 900.0
NO_TIME_S = 60.0
LIMIT_S = 5.0
"""Longest wait for an answer of Slurm's controller in seconds, which is slow if it is busy."""


def check_slurm_job(
    environ: Mapping[str, str],
    job: Mapping[str, str],
    *,
    node: str,
    nodes: int,
    kind: str | None,
    now: float,
    fixed_port: int | None,
) -> Iterator[Finding]:
    """Yield findings about the Slurm job of this process; none outside of a job.

    Args:
        environ: environment of this process.
        job: Slurm's facts about the job, by Slurm's names; empty if Slurm does not answer.
        node: name of the head node, for the findings.
        nodes: number of nodes in the spec.
        kind: value of `job.kind`.
        now: current time in seconds since the epoch.
        fixed_port: rendezvous port that the spec requires; None if it requires none.
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
            f"job {number} ends in {format_count(round(max(0.0, left) / 60), 'minute')}",
            "request more time (sbatch --time), or let it continue from a snapshot: sbatch --requeue "
            "--signal=B:TERM@120",
            "SLURM_JOB_END_TIME",
            fail=left < NO_TIME_S,
        )
    # An interactive allocation (salloc) has no batch script that could be restarted.
    if job.get("BatchFlag") == "1" and job.get("Requeue") == "0":
        yield finding(
            "requeue",
            f"job {number} is not requeued when a node is lost or another job preempts it",
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
            f"the spec has {format_count(nodes, 'node')} and job {number} has {given}",
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


def read_slurm_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of `scontrol show job` by Slurm's names; empty outside a job, or if Slurm does not answer."""
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
