"""Print how many threads each worker has: its share of the cores that the job has on the node with the fewest for each.

Sent as text into a batch script, see `dtctl.render.standalone`; Python 3.8 is enough. An argument per component of the
job: workers of a node, `=`, and SLURM_JOB_CPUS_PER_NODE (`72(x2),36`). This runs on the first node, where Slurm may
count processors of which two are one core.
"""

import sys

from dtctl.node_facts import bound_cores

shares: list = []  # type: ignore[type-arg]
for component in sys.argv[1:]:
    slots, _, groups = component.partition("=")
    cores = [int(group.partition("(")[0]) for group in groups.split(",")]
    shares.append(min(cores if shares else [*cores, bound_cores()]) // int(slots))
print(max(1, min(shares)))  # noqa: T201
