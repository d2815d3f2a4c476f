"""A run's folder on the control machine, written while the run goes on and read by every other command."""
