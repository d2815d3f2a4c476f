"""Facts about a network turned into communication variables, each with its reason."""
