"""Examination of a cluster before a run, and of the logs after a failure."""
