"""Ways to start commands on nodes and exchange bytes with them."""
