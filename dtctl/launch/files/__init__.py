"""The working tree that a run executes: the choice of its files, their digests, and the push to the nodes."""
