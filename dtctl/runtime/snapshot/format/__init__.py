"""Format of snapshots: layout of the folder, headers, and the encoding of state as tensors."""
