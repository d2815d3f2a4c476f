"""Estimate of memory by arithmetic: for `dtctl advise`, and for workers that choose their strategy."""
