"""Static analysis of distributed training code: Python, shell and sbatch files."""
