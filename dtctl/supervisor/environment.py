"""Variables of a worker that only its node can determine. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dtctl import folders
from dtctl.supervisor.messages.attempt import StartAttempt, WorkerSpec

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

STEP = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS")
"""Variables that number the tasks of a step of Slurm."""


def without_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the numbers of the step that this supervisor is the only task of.

    Lightning takes them for the workers' own, and refuses to begin if they do not fit.
    """
    return {name: value for name, value in environ.items() if name not in STEP}


def of_workers(start: StartAttempt, run_dir: str, interface: str) -> dict[str, str]:
    """Return the variables of an attempt, with this node's folders and its interface towards the head node.

    Variables that the message sets stay: an interface that the user names takes precedence over the routing table.
    """
    env = {
        "DTCTL_RUN_DIR": run_dir,
        "DTCTL_METRICS": os.path.join(run_dir, "metrics.jsonl"),
        "DTCTL_SNAPSHOT_DIR": os.path.expanduser(start.snapshots) or os.path.join(run_dir, "snapshots"),
        "DTCTL_MEMORY_DIR": folders.memory_folder(run_dir),
        "DTCTL_PROGRESS": os.path.join(run_dir, f"attempt-{start.attempt}", "progress"),
        "DTCTL_GRACE_S": f"{start.grace_s:g}",
        # Where torchrun puts its own files, which would otherwise stay behind in /tmp.
        "PET_LOG_DIR": os.path.join(run_dir, f"attempt-{start.attempt}", "torchrun"),
    }
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
        env["NCCL_SOCKET_IFNAME"] = "=" + interface  # "=": this one, not all with this prefix
    return {**env, **start.env}


def with_error_file(worker: WorkerSpec, folder: str) -> WorkerSpec:
    """Return the worker with a file for its exception, as torchrun gives each of its workers one.

    torchrun itself, and a command that starts workers by its own means, see to that themselves.
    """
    if "RANK" not in worker.env:
        return worker
    path = os.path.join(folder, f"error-{worker.rank}.json")
    return WorkerSpec(rank=worker.rank, env={**worker.env, ERROR_FILE: path})
