"""The part that runs in the workers: training loop, data order, snapshots. Imports nothing of the control plane."""
