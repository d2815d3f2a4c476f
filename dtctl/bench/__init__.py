"""How fast the nodes of a spec talk to each other when torch does the talking."""
