"""Checks of a cluster, one module per layer: `RAN` lists the checks of a module, and `examine.py` calls them in order.

Most are pure functions of the probes' reports; `shared_folders` and `collective` send further requests to the probes.
Checks that are possible before a Slurm job has nodes are in `dtctl.slurm.partition_checks`; a submission also runs
them.
"""
