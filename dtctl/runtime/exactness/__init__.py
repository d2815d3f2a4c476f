"""What decides whether a resumed training ends with the same bits, and what is said if it does not."""
