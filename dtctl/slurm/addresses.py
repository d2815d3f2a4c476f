"""The nodes that Slurm has given to a job, as scontrol tells them. Standard library alone."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from dtctl.errors import LaunchError


def read_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that Slurm has given to this process's job, in its order, and the address of each.

    Args:
        environ: with Slurm's variables.

    Raises:
        LaunchError: Slurm does not say which nodes they are.
    """
    listed = environ.get("SLURM_JOB_NODELIST", "")
    node_names = _scontrol("show", "hostnames", listed).split()
    node_records = _scontrol("show", "node", "-o", listed)
    addresses = dict(re.findall(r"NodeName=(\S+) .*?NodeAddr=(\S+)", node_records))
    return {name: addresses.get(name, name) for name in node_names}


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        raise LaunchError("there is no scontrol on this machine", where="SLURM_JOB_ID") from None
    if done.returncode:
        raise LaunchError(f"scontrol refused: {done.stderr.strip()}", where="SLURM_JOB_NODELIST")
    return done.stdout
