"""The command line: one file a command; only `output.py` prints, only `main.py` exits."""
