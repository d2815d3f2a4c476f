"""Starting, watching, restarting and stopping a run on all its nodes."""
