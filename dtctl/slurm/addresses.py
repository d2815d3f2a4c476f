"""Nodes that Slurm has given to a job, and their addresses. Imports the standard library alone."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from typing import Final

from dtctl.errors import LaunchError, SpecError
from dtctl.spec import nodeset

ANSWER_S: Final = 60.0
"""Longest wait for an answer of Slurm's commands, in seconds."""


def read_addresses(environ: Mapping[str, str], *, asks: bool = True) -> dict[str, str]:
    """Return the nodes that Slurm has given to this process's job, in Slurm's order, with the address of each.

    If scontrol is missing or does not answer, the name of a node stands for its address.

    Args:
        environ: environment with Slurm's variables.
        asks: whether scontrol is installed and answers.

    Raises:
        LaunchError: Slurm's variables do not name the nodes.
    """
    listed = environ.get("SLURM_JOB_NODELIST", "")
    try:
        node_names = nodeset.expand_nodeset(listed)
    except SpecError as exc:
        raise LaunchError(
            f"Slurm does not list the nodes that the job has: {exc.message}", where="SLURM_JOB_NODELIST"
        ) from exc
    addresses = dict(re.findall(r"NodeName=(\S+) .*?NodeAddr=(\S+)", _read_node_records(listed) if asks else ""))
    return {name: addresses.get(name, name) for name in node_names}


def _read_node_records(listed: str) -> str:
    argv = ["scontrol", "show", "node", "-o", listed]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ANSWER_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
