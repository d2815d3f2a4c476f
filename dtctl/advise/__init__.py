"""Memory and throughput of a training before it runs, for every way to divide it over GPUs."""
