"""The working tree that a run executes: which files belong to it, their digests, and the push to the nodes."""
