"""Jobs of Slurm: the batch file and its submission. Task, step and allocation have Slurm's meaning here."""
