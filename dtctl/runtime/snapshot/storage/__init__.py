"""Storage of snapshots: folders and object stores, durability, retention, and the lease of the writer."""
