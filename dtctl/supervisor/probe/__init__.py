"""The doctor's program on a node, which is sent over the link and runs from memory. Stdlib only, Python 3.8."""
