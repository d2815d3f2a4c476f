"""The spec: what the user wrote, read and checked. See `model.py` for the keys and `load.py` for the errors."""
