"""Telemetry of a run: metrics, progress, profiles, the last collectives."""
