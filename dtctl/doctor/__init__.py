"""Whether a cluster can train, and why a job failed."""
