"""Figures of a run while it runs, for Prometheus and OpenTelemetry, and alerts.

A process of its own beside the launcher (beside.py starts it, __main__.py is its loop) reads the run's folder as
`dtctl status` does and sends what the spec's section `metrics` asks for. It ends with the launcher, and whatever
happens to it or to those it sends to, the run goes on: the launcher waits for it nowhere but at its own end, and there
for seconds.
"""
