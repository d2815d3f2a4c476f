"""The nodes of the allocation that this process is in, as a cluster that can be examined."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from dtctl.errors import LaunchError
from dtctl.launch.cluster import ResolvedCluster
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec
from dtctl.transport.base import Target
from dtctl.transport.srun import SrunTransport


def cluster_of_allocation(spec: Spec, environ: Mapping[str, str]) -> ResolvedCluster:
    """The nodes that Slurm has given to this process's job, reached by srun.

    Args:
        spec: for what it says of all nodes: slots, python, workdir.
        environ: with Slurm's variables.

    Raises:
        LaunchError: Slurm does not say which nodes they are.
    """
    job, listed = environ["SLURM_JOB_ID"], environ.get("SLURM_JOB_NODELIST", "")
    node_names = _scontrol("show", "hostnames", listed).split()
    node_records = _scontrol("show", "node", "-o", listed)
    addresses = dict(re.findall(r"NodeName=(\S+) .*?NodeAddr=(\S+)", node_records))
    slots = spec.cluster.slots
    nodes = tuple(
        NodeSpec(
            name=name,
            address=addresses.get(name, name),
            slots=slots,
            workdir=spec.cluster.workdir,
            python=spec.cluster.python,
        )
        for name in node_names
    )
    targets = {node.name: Target(name=node.name, address=node.address) for node in nodes}
    return ResolvedCluster(nodes=nodes, targets=targets, make_transport=lambda: SrunTransport(job))


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        raise LaunchError("there is no scontrol on this machine", where="SLURM_JOB_ID") from None
    if done.returncode:
        raise LaunchError(f"scontrol refused: {done.stderr.strip()}", where="SLURM_JOB_NODELIST")
    return done.stdout
