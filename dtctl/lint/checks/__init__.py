"""Checkers, one module per family; each function checks one rule and yields problems. The engine lists the families."""
