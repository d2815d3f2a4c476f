"""Print how many GPUs this node shows to a job.

Sent as text into a batch script, see `dtctl.render.standalone`; Python 3.8 is enough.
"""

import os

from dtctl.node_facts import count_gpus

print(count_gpus(os.environ))  # noqa: T201
