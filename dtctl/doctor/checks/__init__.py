"""The checks of a cluster, a module per layer: `RAN` in each names its checks, and `examine.py` calls them in order.

Most only judge what the probes have reported and are pure; `shared_folders` and `collective` ask the probes for more.
What can be said before a job of Slurm has nodes is in `dtctl.slurm.partition_checks`, which a submission asks, too.
"""
