"""Variables of a worker that only its node can determine. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dtctl import folders
from dtctl.supervisor.messages.attempt import StartAttempt, WorkerSpec

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

STEP = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_NTASKS", "SLURM_NPROCS")
"""Variables with the numbers of the tasks and nodes of a step of Slurm."""


def drop_step_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the numbers of the step that this supervisor is a task of.

    Lightning uses them as the numbers of the workers, and refuses to start if they do not fit.
    """
    return {name: value for name, value in environ.items() if name not in STEP}


def build_attempt_variables(start: StartAttempt, run_dir: str, interface: str) -> dict[str, str]:
    """Return the variables of an attempt, with this node's folders and its interface towards the head node.

    Variables in the message take precedence, such as an interface that the user names over the routing table.
    """
    env = {
        "DTCTL_RUN_DIR": run_dir,
        "DTCTL_METRICS": os.path.join(run_dir, "metrics.jsonl"),
        "DTCTL_SNAPSHOT_DIR": os.path.expanduser(start.snapshots) or os.path.join(run_dir, "snapshots"),
        "DTCTL_MEMORY_DIR": folders.choose_memory_folder(run_dir),
        "DTCTL_PROGRESS": os.path.join(run_dir, f"attempt-{start.attempt}", "progress"),
        "DTCTL_GRACE_S": f"{start.grace_s:g}",
        # In this folder, torchrun creates its own files, which would otherwise stay in /tmp.
        "PET_LOG_DIR": os.path.join(run_dir, f"attempt-{start.attempt}", "torchrun"),
    }
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
        env["NCCL_SOCKET_IFNAME"] = "=" + interface  # "=" selects exactly this interface, not all with this prefix.
    return {**env, **start.env}


def add_error_file(worker: WorkerSpec, folder: str) -> WorkerSpec:
    """Return the worker with a file for its exception, which torchrun also gives to each of its workers.

    The worker is unchanged if torchrun or a command of the user starts the actual workers.
    """
    if "RANK" not in worker.env:
        return worker
    path = os.path.join(folder, f"error-{worker.rank}.json")
    return WorkerSpec(rank=worker.rank, env={**worker.env, ERROR_FILE: path})
