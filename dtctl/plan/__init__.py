"""From a checked spec to plain data that says what will run where."""
