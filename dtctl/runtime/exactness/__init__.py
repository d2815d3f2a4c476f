"""Measurement of exactness: whether a resumed run repeats its steps bit for bit."""
