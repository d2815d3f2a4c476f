"""The checks of a cluster, by layer. Pure: from what was seen to findings."""
