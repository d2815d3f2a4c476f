"""Which samples a worker reads, in which order, and batches of them in time."""
