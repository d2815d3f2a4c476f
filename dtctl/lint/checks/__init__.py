"""The checkers, one module per family; each function is one rule and yields problems. The engine names the families."""
