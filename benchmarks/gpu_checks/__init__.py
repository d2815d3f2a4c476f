"""The checks of `make gpu`: what only a GPU can show, and the part of each that a CPU shows as well.

A check is a generator of `Point`s, each an expectation beside what was found. Checks run in a process of their own
(benchmarks/gpu.py starts them); none of them knows of the others.
"""
