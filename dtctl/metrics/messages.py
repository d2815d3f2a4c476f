"""Alerts in the formats of receivers: Prometheus Alertmanager's webhooks, and chats. Pure."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any, Final

from dtctl.launch.records.events import AlertChanged
from dtctl.printable import make_printable

NEVER: Final = "0001-01-01T00:00:00Z"
"""End time that Alertmanager writes for an alert that is not over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertMessage:
    """A change of an alert, with further fields for its receivers."""

    run: str
    job: str
    """`job.name` of the spec."""
    change: AlertChanged
    began: float
    """Time when the alert began to fire, in seconds since the epoch."""

    @property
    def title(self) -> str:
        """`firing: no-step in run gpt-1122-101500-ab12`."""
        return f"{self.change.state}: {self.change.alert} in run {self.run}"

    @property
    def text(self) -> str:
        """Return a human-readable text without control characters."""
        return make_printable(self.change.text)

    @property
    def fingerprint(self) -> str:
        """Identifier that all changes of one alert have in common."""
        return hashlib.sha256(f"{self.run}\n{self.change.alert}".encode()).hexdigest()[:16]


def build_webhook_body(message: AlertMessage) -> dict[str, Any]:
    """Return the body of a webhook: version 4 of Alertmanager's format, and the text that chats read."""
    state, alert = message.change.state, message.change.alert
    labels = {"alertname": alert, "run": message.run, "job": message.job, "severity": _choose_severity(alert)}
    notes = {"summary": message.title, "description": message.text}
    entry = {
        "status": state,
        "labels": labels,
        "annotations": notes,
        "startsAt": _format_utc_time(message.began),
        "endsAt": _format_utc_time(message.change.time) if state == "resolved" else NEVER,
        "generatorURL": "",
        "fingerprint": message.fingerprint,
    }
    return {
        "text": f"{message.title}: {message.text}",
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{alert}", run="{message.run}"}}',
        "truncatedAlerts": 0,
        "status": state,
        "receiver": "dtctl",
        "groupLabels": {"alertname": alert, "run": message.run},
        "commonLabels": labels,
        "commonAnnotations": notes,
        "externalURL": "",
        "alerts": [entry],
    }


def _choose_severity(alert: str) -> str:
    return "critical" if alert in ("failed", "no-step", "loss-not-finite") else "warning"


def _format_utc_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
