"""Plan of a job: from a checked spec to plain data about every node."""
