"""Benchmark of the collectives of torch between the nodes of a spec."""
