"""Nodes of the allocation that this process runs in, as a cluster that can be examined."""

from __future__ import annotations

from collections.abc import Mapping

from dtctl.launch.cluster import ResolvedCluster
from dtctl.slurm.addresses import read_addresses
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec
from dtctl.transport.base import Target
from dtctl.transport.srun import SrunTransport


def build_allocation_cluster(spec: Spec, environ: Mapping[str, str]) -> ResolvedCluster:
    """Return the nodes that Slurm has given to this process's job; srun reaches them.

    Args:
        spec: source of the settings for all nodes: slots, python, workdir.
        environ: environment with Slurm's variables.

    Raises:
        LaunchError: Slurm does not name the nodes.
    """
    job, cluster = environ["SLURM_JOB_ID"], spec.cluster
    nodes = tuple(
        NodeSpec(name=name, address=address, slots=cluster.slots, workdir=cluster.workdir, python=cluster.python)
        for name, address in read_addresses(environ).items()
    )
    targets = {node.name: Target(name=node.name, address=node.address) for node in nodes}
    return ResolvedCluster(nodes=nodes, targets=targets, make_transport=lambda: SrunTransport(job))
