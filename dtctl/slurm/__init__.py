"""Jobs of Slurm: the text that is submitted, and submitting it. task, step and allocation in its own sense."""
