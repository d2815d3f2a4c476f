"""The launcher: it starts, watches, restarts and stops a run on all its nodes."""
