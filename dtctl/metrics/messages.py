"""An alert as others read it: Prometheus Alertmanager's webhooks, Slack, mail. Pure."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from email.message import EmailMessage
from typing import Any, Final

from dtctl.launch.records.events import AlertChanged
from dtctl.printable import printable
from dtctl.spec.model import Mail

NEVER: Final = "0001-01-01T00:00:00Z"
"""How Alertmanager writes the end of what is not over."""
_COLOURS: Final = {"firing": "#c62828", "resolved": "#2e7d32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertMessage:
    """A change of an alert, with what its receivers need beside it."""

    run: str
    job: str
    """`job.name` of the spec."""
    change: AlertChanged
    began: float
    """When the alert began to fire, in seconds since the epoch."""

    @property
    def title(self) -> str:
        """`firing: no-step in run gpt-1122-101500-ab12`."""
        return f"{self.change.state}: {self.change.alert} in run {self.run}"

    @property
    def text(self) -> str:
        """What happened, for people, without control characters."""
        return printable(self.change.text)

    @property
    def fingerprint(self) -> str:
        """The same for all changes of one alert."""
        return hashlib.sha256(f"{self.run}\n{self.change.alert}".encode()).hexdigest()[:16]


def webhook(message: AlertMessage) -> dict[str, Any]:
    """The body of a webhook, version 4 of Alertmanager's format."""
    state, alert = message.change.state, message.change.alert
    labels = {"alertname": alert, "run": message.run, "job": message.job, "severity": _severity(alert)}
    notes = {"summary": message.title, "description": message.text}
    entry = {
        "status": state,
        "labels": labels,
        "annotations": notes,
        "startsAt": _moment(message.began),
        "endsAt": _moment(message.change.time) if state == "resolved" else NEVER,
        "generatorURL": "",
        "fingerprint": message.fingerprint,
    }
    return {
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


def slack(message: AlertMessage) -> dict[str, Any]:
    """The body of an incoming webhook of Slack."""
    title, text = _for_slack(message.title), _for_slack(message.text)
    blocks = [{"type": "section", "text": {"type": "mrkdwn", "text": f"*{title}*\n{text}"[:3000]}}]
    attachment = {"color": _COLOURS[message.change.state], "fallback": f"{title}: {text}", "blocks": blocks}
    return {"text": title, "attachments": [attachment]}


def mail(message: AlertMessage, settings: Mail) -> EmailMessage:
    """A mail; that an alert is over answers the one that told of it, so that programs show them together."""
    made = EmailMessage()
    made["Subject"] = f"[dtctl] {message.title}"
    made["From"] = settings.sender
    made["To"] = ", ".join(settings.to)
    domain = settings.sender.rpartition("@")[2]
    first = f"<{message.fingerprint}.firing@{domain}>"
    made["Message-ID"] = first if message.change.state == "firing" else f"<{message.fingerprint}.resolved@{domain}>"
    if message.change.state == "resolved":
        made["In-Reply-To"] = made["References"] = first
    made["Date"] = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(message.change.time))
    made["Auto-Submitted"] = "auto-generated"
    made.set_content(f"{message.text}\n\nrun {message.run} (job {message.job}), {_moment(message.change.time)}\n")
    return made


def _severity(alert: str) -> str:
    return "critical" if alert in ("failed", "no-step", "loss-not-finite") else "warning"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def _for_slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
