"""Communication variables that follow from facts about a network, each with its reason."""
