"""The control loop of a run: sessions with its nodes, attempts, hangs, failures and restarts."""
