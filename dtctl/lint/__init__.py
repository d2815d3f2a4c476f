"""Mistakes in distributed training code, found by reading it: Python, shell and sbatch files."""
