"""The checks of a cluster, a module per layer: `RAN` in each names its checks, and `examine.py` calls them in order.

Most only judge what the probes have reported and are pure; `shared_folders` and `collective` ask the probes for more.
Checks that are possible before a Slurm job has nodes are in `dtctl.slurm.partition_checks`; a submission runs them too.
"""
