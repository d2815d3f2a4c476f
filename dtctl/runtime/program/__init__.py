"""What a program keeps of its own, found, marked and put back: `state.py` is the one entrance."""
