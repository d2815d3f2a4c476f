"""A worker among others: its rank and device, its process groups, and the decisions that all workers take together."""
