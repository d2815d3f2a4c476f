"""Healing: a lost worker is replaced while the others stay. docs/recovery.md describes who decides what."""
