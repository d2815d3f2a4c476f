"""Healing: a lost worker is replaced while the others stay. docs/recovery.md describes how decisions are divided."""
