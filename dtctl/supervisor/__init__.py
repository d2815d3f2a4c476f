"""The program that runs on nodes; stdlib only, Python 3.8 or newer."""
