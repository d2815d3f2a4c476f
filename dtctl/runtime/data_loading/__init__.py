"""Data loading: the samples of a worker, their order, and their batches ahead of the loop."""
