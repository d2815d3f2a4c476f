"""The command line: one file for each command; only `output.py` prints, and only `main.py` exits."""
