"""The doctor's half on a node: sent over the link, run from memory, nothing written. Stdlib only, Python 3.8."""
