"""Replacement of a lost worker while the others stay. docs/recovery.md describes which process decides what."""
