"""Reasons for which Slurm lets a job wait or has ended it: Slurm's codes, with explanations and remedies.

Source: "Job reason codes" and "Job state codes" of Slurm's manual (squeue, 24.05). A code that is missing here is shown
without an explanation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_EXPLAINED: Final[Mapping[str, str]] = {
    "AssocMaxJobsLimit": "the account's jobs that run now are as many as it may have; it starts when one of them ends",
    "BadConstraints": "no node has the features that slurm.extra asks for; `sinfo -o '%N %f'` shows all of them",
    "DependencyNeverSatisfied": "its dependency can no longer be fulfilled, so it never starts; submit it "
    "without that dependency (slurm.extra)",
    "InvalidAccount": "slurm.account is not known; `sacctmgr show assoc user=$USER` shows yours",
    "InvalidQOS": "slurm.qos is not known; `sacctmgr show qos` shows those that there are",
    "JobArrayTaskLimit": "as many tasks of the array run as its `%N` allows",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue": "it was requeued as often as the site allows; `scontrol release {job}` releases it",
    "PartitionDown": "the partition starts no jobs now; `sinfo -s` shows the others",
    "PartitionInactive": "the partition starts no jobs now; `sinfo -s` shows the others",
    "PartitionNodeLimit": "the partition does not give a job so many nodes; slurm.partition names another one",
    "PartitionTimeLimit": "slurm.time is more than the partition allows; `scontrol show partition` shows its limit",
    "QOSMaxCpuPerUserLimit": "your jobs have as many processors as the quality of service allows",
    "QOSMaxGRESPerUser": "your jobs have as many GPUs as the quality of service allows",
    "QOSMaxJobsPerUserLimit": "your jobs that run now are as many as the quality of service allows",
    "QOSMaxNodePerUserLimit": "your jobs have as many nodes as the quality of service allows",
    "QOSMaxWallDurationPerJobLimit": "slurm.time is more than the quality of service allows",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved; `sinfo -R` shows the reason",
    "launch_failed_requeued_held": "a node could not start it, usually because the site's prolog has failed there; "
    "`sinfo -R` names the node, and `scontrol release {job}` makes Slurm try again",
    "Reservation": "it waits for its reservation to begin",
}
_ENDS: Final[Mapping[str, str]] = {
    "BOOT_FAIL": "a node could not be booted for it; submit it again, `sinfo -R` names the node",
    "NODE_FAIL": "a node of it has failed; submit it again, `sinfo -R` names the node",
    "OUT_OF_MEMORY": "it has used all the memory that it had on a node; ask for more (`slurm.mem: 200G`; `0` is all of "
    "a node), or use less",
}
NEVER: Final = frozenset({"DependencyNeverSatisfied"})
"""Codes of jobs that Slurm keeps in its queue and never starts, even when all other jobs have ended."""


def explain_wait(job: str, code: str) -> str:
    """Return Slurm's code for the reason why a job waits, with its meaning if that is known."""
    known = _EXPLAINED.get(code.partition(",")[0].partition(" ")[0])
    if known is None and "held" in code.lower():  # such as JobHeldUser, job_requeued_in_held_state
        known = "the job is held; `scontrol release {job}` lets it begin"
    return f"{code}: {known.format(job=job)}" if known else code


def explain_end(state: str) -> str:
    """Return the state in which a job has ended, with its meaning if that is known."""
    return f"{state}: {_ENDS[state]}" if state in _ENDS else state
