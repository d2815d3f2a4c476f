"""What goes where: the figures of one run to the page, a Pushgateway, a collector, and alerts to their receivers."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote

from dtctl.errors import DtctlError, LaunchError
from dtctl.launch.records.events import AlertChanged, Event, Note
from dtctl.launch.records.record import RunRecord, state_folder, write_private
from dtctl.metrics import messages, send
from dtctl.metrics.alerts import AlertRules
from dtctl.metrics.families import families, page
from dtctl.metrics.follow import FigureCollector
from dtctl.metrics.messages import AlertMessage
from dtctl.metrics.otlp import Trace
from dtctl.metrics.page import CONTENT_TYPE, Page
from dtctl.metrics.secrets import read
from dtctl.metrics.send import Outlet
from dtctl.spec.model import Metrics, Spec

LOOK_S: Final = 1.0
"""Between two looks at the run's folder."""
TARGETS_DIR: Final = "prometheus"
"""Below .dtctl: a file per run whose page is at a port of its own choice, for Prometheus' file_sd_configs."""


_telling = threading.Lock()


def tell(event: Event) -> None:
    """Pass an event to the launcher; there may be none any more."""
    with _telling, contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(event.to_json()) + "\n")
        sys.stdout.flush()


class Service:
    """Everything that the section `metrics` of a run asks for."""

    def __init__(self, record: RunRecord, spec: Spec) -> None:
        """Read what is there, listen, and send from now on.

        Raises:
            LaunchError: the folder is not that of a run.
        """
        self._record, self._spec = record, spec
        self._metrics = spec.metrics or Metrics()
        self._info = record.info()
        self._follower = FigureCollector(record)
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._target: Path | None = None
        self._trace = Trace(record.run, token=self._info.token, job=spec.job.name)
        headers = send.parse_headers(self._secret("metrics.headers") or "")
        self._gateway = self._pushgateway(headers)
        self._collector = self._collectors(headers)
        self._receivers = self._alert_receivers()
        self._pushed = -float("inf")
        backlog = self._read()
        told = [event for event in backlog if isinstance(event, AlertChanged)]
        self._began = {change.alert: change.time for change in told if change.state == "firing"}
        """Alert -> when it began to fire."""
        rules = self._metrics.alerts
        self._rules = AlertRules(rules, trains=spec.train is not None, told=told) if rules is not None else None
        if self._metrics.port is not None:
            self._listen(self._metrics.port)

    def _secret(self, key: str) -> str | None:
        """The value of a secret; None if none is asked for, or if it cannot be had here, which is told."""
        secret = self._metrics.secrets.get(key)
        if secret is None:
            return None
        try:
            return read(self._spec, key, secret)
        except DtctlError as exc:
            tell(Note(text=f"metrics: {exc}"))
            return None

    # -- where it goes ----------------------------------------------------------------------------------------------

    def _listen(self, port: int | str) -> None:
        address = self._metrics.address
        try:
            self._page = Page(address, port if isinstance(port, int) else 0, self._text)
        except OSError as exc:
            tell(Note(text=f"metrics: no page at {address} port {port}: {exc.strerror}"))
            return
        place = f"[{address}]:{self._page.port}" if ":" in address else f"{address}:{self._page.port}"
        tell(Note(text=f"metrics: http://{place}/metrics"))
        if port == "auto":
            with contextlib.suppress(LaunchError):
                self._target = state_folder(self._record.base_dir, TARGETS_DIR) / f"{self._record.run}.json"
                write_private(self._target, json.dumps([{"targets": [place], "labels": {}}]) + "\n")

    def _outlet(self, name: str, deliver: Callable[..., None], *, newest: bool = False) -> Outlet:
        return Outlet(name, deliver, lambda text: tell(Note(text=text)), keep="newest" if newest else "all")

    def _pushgateway(self, headers: dict[str, str]) -> Outlet | None:
        if self._metrics.pushgateway is None:
            return None
        url = f"{self._metrics.pushgateway}/metrics/job/dtctl/run/{quote(self._record.run, safe='')}"
        put = partial(send.request, url, content_type=CONTENT_TYPE, method="PUT", headers=headers)
        return self._outlet("metrics.pushgateway", put, newest=True)

    def _collectors(self, headers: dict[str, str]) -> tuple[Outlet, Outlet] | None:
        """Of figures and of spans."""
        url = self._metrics.otlp
        if url is None:
            return None
        figures = partial(send.to_json, f"{url}/v1/metrics", headers=headers)
        spans = partial(send.to_json, f"{url}/v1/traces", headers=headers)
        return (
            self._outlet("metrics.otlp (figures)", figures, newest=True),
            self._outlet("metrics.otlp (spans)", spans),
        )

    def _alert_receivers(self) -> list[Outlet]:
        alerts, outlets = self._metrics.alerts, list[Outlet]()
        if alerts is None:
            return outlets
        for name, body in (("webhook", messages.webhook), ("slack", messages.slack)):
            url = self._secret(f"metrics.alerts.{name}")
            if url is not None:
                outlets.append(self._outlet(f"metrics.alerts.{name}", partial(_post, url, body)))
        if alerts.mail is not None:
            password = self._secret("metrics.alerts.mail.password")
            if alerts.mail.password is None or password is not None:
                settings = alerts.mail
                outlets.append(
                    self._outlet(
                        "metrics.alerts.mail",
                        lambda message: send.send_mail(settings, password, messages.mail(message, settings)),
                    )
                )
        return outlets

    # -- what goes there --------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._follower.figures.progress.end is not None

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read at once."""
        return self._follower.is_behind

    def _read(self) -> list[Event]:
        with self._lock:
            events = self._follower.look()
        self._trace.note(events)
        return events

    def _text(self) -> str:
        with self._lock:
            return page(families(self._follower.figures), self._record.run)

    def look(self) -> None:
        """Read what is new, judge it, and send what is due."""
        self._read()
        if self._rules is not None and not self.is_over:
            for change in self._rules.judge(self._follower.figures, time.time()):
                tell(change)
                self._alert(change)
        if time.monotonic() - self._pushed >= self._metrics.interval_s:
            self._push(over=False)

    def _alert(self, change: AlertChanged) -> None:
        if change.state == "firing":
            self._began[change.alert] = change.time
        began = self._began.get(change.alert, change.time)
        message = AlertMessage(run=self._record.run, job=self._spec.job.name, change=change, began=began)
        for receiver in self._receivers:
            receiver.put(message)

    def _push(self, *, over: bool) -> None:
        self._pushed = time.monotonic()
        figures = self._follower.figures
        if self._gateway is not None:
            self._gateway.put(self._text().encode())
        if self._collector is not None:
            to_metrics, to_traces = self._collector
            with self._lock:
                found = list(families(figures))
            to_metrics.put(self._trace.metrics(found, started=figures.started, now=time.time()))
            spans = self._trace.spans(figures, over=over)
            if spans:
                to_traces.put(self._trace.traces(spans))

    def finish(self, deadline: float) -> None:
        """Tell how the run has ended, and wait until all was taken, or until `deadline` on the monotonic clock."""
        self._read()
        leaves_job = not self.is_over and self._info.slurm  # the job goes on, and may be followed again
        if self._rules is not None and not leaves_job:
            for change in self._rules.end(self._follower.figures, time.time()):
                self._alert(change)
        self._push(over=not leaves_job)
        for outlet in [*self._receivers, *(self._collector or ()), *([self._gateway] if self._gateway else [])]:
            outlet.flush(deadline)
        if self._target is not None:
            self._target.unlink(missing_ok=True)
        if self._page is not None:
            self._page.close()


def _post(url: str, body: Callable[[AlertMessage], dict[str, object]], message: AlertMessage) -> None:
    send.to_json(url, body(message))
