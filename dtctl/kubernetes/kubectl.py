"""Calls of kubectl, which communicates with the cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from dtctl.errors import LaunchError

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


def apply_argv() -> list[str]:
    """Creates or updates the objects of standard input."""
    return ["kubectl", "apply", "--filename", "-"]


def delete_argv() -> list[str]:
    """Removes the objects of standard input, and with them their pods; an empty list is not an error."""
    return ["kubectl", "delete", "--filename", "-", "--ignore-not-found"]


def build_logs_argv(job: dict[str, Any]) -> list[str]:
    """Follows the output of all pods of a JobSet, each line with its pod's name."""
    metadata = job["metadata"]
    pods = sum(
        replicated.get("replicas", 1) * replicated["template"]["spec"].get("parallelism", 1)
        for replicated in job["spec"]["replicatedJobs"]
    )
    argv = ["kubectl", "logs", "--follow", "--prefix", "--tail=-1", f"--selector={JOBSET_LABEL}={metadata['name']}"]
    argv.append(f"--max-log-requests={pods}")  # without this option it refuses more than five
    return [*argv, f"--namespace={metadata['namespace']}"] if "namespace" in metadata else argv


def run_kubectl(argv: Sequence[str], *, stdin: str | None = None) -> None:
    """Run kubectl to its end, with its output and its messages as they are.

    Args:
        argv: one of those above.
        stdin: for its standard input.

    Raises:
        LaunchError: kubectl is not installed, or has failed.
    """
    try:
        done = subprocess.run(argv, input=stdin, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            "there is no kubectl on this machine",
            where="PATH",
            hint="`dtctl render --out job.yaml` writes the file for a machine that has it",
        ) from None
    if done.returncode:
        raise LaunchError(f"kubectl {argv[1]} exited with code {done.returncode}", where=" ".join(argv))
