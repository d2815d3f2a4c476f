"""Data loading: the samples of a worker, their order, and batches of them in time."""
