"""The nodes that Slurm has given to a job, and their addresses. Standard library alone."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from typing import Final

from dtctl.errors import LaunchError, SpecError
from dtctl.spec import nodeset

ANSWER_S: Final = 60.0
"""Seconds that an answer of Slurm's commands is waited for."""


def read_addresses(environ: Mapping[str, str], *, asks: bool = True) -> dict[str, str]:
    """Return the nodes that Slurm has given to this process's job, in its order, and the address of each.

    Where scontrol is missing or silent, the name of a node stands for its address.

    Args:
        environ: with Slurm's variables.
        asks: whether scontrol is there and answers.

    Raises:
        LaunchError: they do not name the nodes.
    """
    listed = environ.get("SLURM_JOB_NODELIST", "")
    try:
        node_names = nodeset.expand(listed)
    except SpecError as exc:
        raise LaunchError(
            f"Slurm does not say which nodes the job has: {exc.message}", where="SLURM_JOB_NODELIST"
        ) from exc
    addresses = dict(re.findall(r"NodeName=(\S+) .*?NodeAddr=(\S+)", _describe(listed) if asks else ""))
    return {name: addresses.get(name, name) for name in node_names}


def _describe(listed: str) -> str:
    argv = ["scontrol", "show", "node", "-o", listed]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ANSWER_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
