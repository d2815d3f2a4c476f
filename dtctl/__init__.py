"""dtctl: check a cluster, launch PyTorch training on it, and end with the same bits after any failure."""

__version__ = "0.1.0"
