"""Service of one run: its figures on the page, and its alerts to the webhook."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

from dtctl.errors import DtctlError, LaunchError
from dtctl.launch.records.events import AlertChanged, Event, Note
from dtctl.launch.records.record import RunRecord
from dtctl.launch.records.run_writer import prepare_state_folder, write_private
from dtctl.metrics import messages, send
from dtctl.metrics.alerts import AlertRules
from dtctl.metrics.families import build_metric_families, format_prometheus_text
from dtctl.metrics.follow import FigureCollector
from dtctl.metrics.messages import AlertMessage
from dtctl.metrics.page import MetricsServer
from dtctl.metrics.secrets import read_secret_value
from dtctl.metrics.send import MessageSender
from dtctl.spec.model import Metrics, Spec

LOOK_S: Final = 1.0
"""Seconds between two reads of the run's folder."""
TARGETS_DIR: Final = "prometheus"
"""Folder below .dtctl: a file per run that has chosen the port of its page itself, for Prometheus' file_sd_configs."""


_telling = threading.Lock()


def send_launcher_event(event: Event) -> None:
    """Send an event to the launcher, which may have ended."""
    with _telling, contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(event.to_json()) + "\n")
        sys.stdout.flush()


class MetricsService:
    """Everything that the section `metrics` of a run requests."""

    def __init__(self, record: RunRecord, spec: Spec) -> None:
        """Read the existing records, listen, and begin to send.

        Raises:
            LaunchError: the folder is not that of a run.
        """
        self._record, self._spec = record, spec
        self._metrics = spec.metrics or Metrics()
        self._info = record.info()
        self._follower = FigureCollector(record)
        self._lock = threading.Lock()
        self._page: MetricsServer | None = None
        self._target: Path | None = None
        self._receiver = self._alert_receiver()
        backlog = self._read_new_events()
        told = [event for event in backlog if isinstance(event, AlertChanged)]
        self._began = {change.alert: change.time for change in told if change.state == "firing"}
        """Alert -> time when it began to fire."""
        rules = self._metrics.alerts
        self._rules = AlertRules(rules, trains=spec.train is not None, told=told) if rules is not None else None
        if self._metrics.port is not None:
            self._open_metrics_page(self._metrics.port)

    def _read_available_secret(self, key: str) -> str | None:
        """Return the value of a secret; None if none is requested, or, with a report, if it is not available here."""
        secret = self._metrics.secrets.get(key)
        if secret is None:
            return None
        try:
            return read_secret_value(self._spec, key, secret)
        except DtctlError as exc:
            send_launcher_event(Note(text=f"metrics: {exc}"))
            return None

    # -- where it goes ----------------------------------------------------------------------------------------------

    def _open_metrics_page(self, port: int | str) -> None:
        address = self._metrics.address
        try:
            self._page = MetricsServer(address, port if isinstance(port, int) else 0, self._render_metrics_text)
        except OSError as exc:
            send_launcher_event(Note(text=f"metrics: no page at {address} port {port}: {exc.strerror}"))
            return
        place = f"[{address}]:{self._page.port}" if ":" in address else f"{address}:{self._page.port}"
        send_launcher_event(Note(text=f"metrics: http://{place}/metrics"))
        if port == "auto":
            with contextlib.suppress(LaunchError):
                self._target = prepare_state_folder(self._record.base_dir, TARGETS_DIR) / f"{self._record.run}.json"
                write_private(self._target, json.dumps([{"targets": [place], "labels": {}}]) + "\n")

    def _alert_receiver(self) -> MessageSender | None:
        url = self._read_available_secret("metrics.alerts.webhook")
        if url is None:
            return None
        return MessageSender(
            "metrics.alerts.webhook", partial(_post_webhook, url), lambda text: send_launcher_event(Note(text=text))
        )

    # -- what goes there --------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended."""
        return self._follower.figures.progress.end is not None

    @property
    def is_behind(self) -> bool:
        """Return whether more data can be read immediately."""
        return self._follower.is_behind

    def _read_new_events(self) -> list[Event]:
        with self._lock:
            return self._follower.collect_new_events()

    def _render_metrics_text(self) -> str:
        with self._lock:
            return format_prometheus_text(build_metric_families(self._follower.figures), self._record.run)

    def evaluate_new_figures(self) -> None:
        """Read new records, and check the alerts."""
        self._read_new_events()
        if self._rules is not None and not self.is_over:
            for change in self._rules.evaluate_rules(self._follower.figures, time.time()):
                send_launcher_event(change)
                self._queue_alert_message(change)

    def _queue_alert_message(self, change: AlertChanged) -> None:
        if change.state == "firing":
            self._began[change.alert] = change.time
        began = self._began.get(change.alert, change.time)
        message = AlertMessage(run=self._record.run, job=self._spec.job.name, change=change, began=began)
        if self._receiver is not None:
            self._receiver.put(message)

    def finish(self, deadline: float) -> None:
        """Send the result of the run, and wait until all is delivered, or until `deadline` (monotonic clock)."""
        self._read_new_events()
        leaves_job = not self.is_over and self._info.slurm  # the job continues, and may be followed again
        if self._rules is not None and not leaves_job:
            for change in self._rules.end(self._follower.figures, time.time()):
                self._queue_alert_message(change)
        if self._receiver is not None:
            self._receiver.flush(deadline)
        if self._target is not None:
            self._target.unlink(missing_ok=True)
        if self._page is not None:
            self._page.close()


def _post_webhook(url: str, message: AlertMessage) -> None:
    send.post_json(url, messages.build_webhook_body(message))
