"""A run's folder on the control machine, written during the run and read by every other command."""
