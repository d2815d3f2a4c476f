"""The bytes of a snapshot: layout of the folder, headers, and the encoding of state as tensors."""
