"""Checks for silent damage: gradients that are not finite, lack of memory, differences between workers."""
