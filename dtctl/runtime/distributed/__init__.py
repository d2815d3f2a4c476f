"""One worker among many: its rank and device, its process groups, decisions that all take together."""
