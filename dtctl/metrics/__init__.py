"""Figures of a run while it runs, for Prometheus and OpenTelemetry, and alerts.

A process of its own next to the launcher (metrics_process.py starts it, __main__.py is its loop) reads the run's folder
as `dtctl status` does and sends the figures that the spec's section `metrics` requests. It ends with the launcher. Its
own failure, or one of a receiver, does not affect the run: the launcher waits for it only at its own end, for seconds.
"""
