"""Why Slurm lets a job wait: its codes, explained with what to change.

Source: "Job reason codes" of Slurm's manual (squeue, 24.05). A code that is not here is shown as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_EXPLAINED: Final[Mapping[str, str]] = {
    "AssocMaxJobsLimit": "the account's jobs that run now are as many as it may have; it starts when one of them ends",
    "BadConstraints": "no node has the features that slurm.extra asks for; `sinfo -o '%N %f'` shows all of them",
    "DependencyNeverSatisfied": "what it depends on has not ended as it has to, and so it never starts; submit it "
    "without that dependency (slurm.extra)",
    "InvalidAccount": "slurm.account is not known; `sacctmgr show assoc user=$USER` shows yours",
    "InvalidQOS": "slurm.qos is not known; `sacctmgr show qos` shows those that there are",
    "JobArrayTaskLimit": "as many tasks of the array run as its `%N` allows",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionDown": "the partition starts no jobs now; `sinfo -s` shows the others",
    "PartitionInactive": "the partition starts no jobs now; `sinfo -s` shows the others",
    "PartitionNodeLimit": "the partition does not give a job so many nodes; slurm.partition names another one",
    "PartitionTimeLimit": "slurm.time is more than the partition allows; `scontrol show partition` shows its limit",
    "QOSMaxCpuPerUserLimit": "your jobs have as many processors as the quality of service allows",
    "QOSMaxGRESPerUser": "your jobs have as many GPUs as the quality of service allows",
    "QOSMaxJobsPerUserLimit": "your jobs that run now are as many as the quality of service allows",
    "QOSMaxNodePerUserLimit": "your jobs have as many nodes as the quality of service allows",
    "QOSMaxWallDurationPerJobLimit": "slurm.time is more than the quality of service allows",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved; `sinfo -R` says why",
    "Reservation": "it waits for its reservation to begin",
}
NEVER: Final = frozenset({"DependencyNeverSatisfied"})
"""Codes of jobs that Slurm keeps and never starts, whatever others do."""


def explain_wait(job: str, code: str) -> str:
    """Return Slurm's code for why a job waits, with what that means where it is known."""
    if "held" in code.lower() and code != "JobHeldAdmin":  # JobHeldUser, job_requeued_in_held_state
        return f"{code}: somebody holds it; `scontrol release {job}` lets it begin"
    known = _EXPLAINED.get(code.partition(",")[0].partition(" ")[0])
    return f"{code}: {known}" if known else code
