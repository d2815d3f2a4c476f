"""Check of resumed runs by their repeated steps, which must have the same bits."""
