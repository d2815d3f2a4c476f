"""The spec: the user's file, read and checked. See `model.py` for the keys and `load.py` for the errors."""
