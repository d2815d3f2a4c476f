"""The one file that runs on every node of a job; stdlib only, Python 3.8 or newer."""
