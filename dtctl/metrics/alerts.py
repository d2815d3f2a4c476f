"""Alerts of a run by the rules of `metrics.alerts`: each one once, and once when it is over. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dtctl.launch.records.events import AlertChanged, RunEnded
from dtctl.metrics.follow import RunFigures
from dtctl.spec.model import Alerts

FAILED = "failed"
"""The alert of a run that has failed; nothing ends it."""


class AlertRules:
    """Rules, and the alerts that are firing now."""

    def __init__(self, rules: Alerts, *, trains: bool, told: Iterable[AlertChanged] = ()) -> None:
        """Prepare to check.

        Args:
            rules: section `metrics.alerts`.
            trains: True if the job trains with dtctl.runtime, and will take steps.
            told: alerts that another process has sent for this run; they are not sent again.
        """
        self._rules = rules
        self._trains = trains
        self.firing: dict[str, AlertChanged] = {}
        self._restarts = 0
        """The newest that was looked at."""
        for change in told:
            self._apply_alert_changes([change])
            number = change.alert.removeprefix("restart-")
            self._restarts = max(self._restarts, int(number) if number.isdecimal() else 0)

    def evaluate_rules(self, figures: RunFigures, now: float) -> list[AlertChanged]:
        """Return the alerts that have changed since the last call.

        Args:
            figures: the run.
            now: seconds since the epoch.
        """
        changes: list[AlertChanged] = []
        for alert, text in (
            ("no-step", self._no_step(figures, now)),
            ("loss-not-finite", figures.spoilt if self._rules.loss_not_finite else ""),
            ("throughput", self._check_throughput(figures)),
        ):
            if text and alert not in self.firing:
                changes.append(AlertChanged(time=now, alert=alert, state="firing", text=text))
            elif not text and alert in self.firing:
                changes.append(
                    AlertChanged(time=now, alert=alert, state="resolved", text=_describe_resolution(alert, figures))
                )
        changes += self._restart_changes(figures, now)
        self._apply_alert_changes(changes)
        return changes

    def end(self, figures: RunFigures, now: float) -> list[AlertChanged]:
        """Return the alerts to send at the end of the run: all as resolved, and the failure."""
        end = figures.progress.end
        text = _describe_end_in_alert(end)
        spoilt = figures.spoilt if self._rules.loss_not_finite else ""
        over = [alert for alert in self.firing if alert != "loss-not-finite" or not spoilt]
        changes = [AlertChanged(time=now, alert=alert, state="resolved", text=text) for alert in over]
        if spoilt and "loss-not-finite" not in self.firing:
            changes.append(AlertChanged(time=now, alert="loss-not-finite", state="firing", text=spoilt))
        self._apply_alert_changes(changes)
        has_failed = end is None or end.status == "failed"
        if self._rules.failed and has_failed:
            cause = _describe_failure_cause(end) if end is not None else ""
            changes.append(AlertChanged(time=now, alert=FAILED, state="firing", text=text + cause))
        return changes

    def _apply_alert_changes(self, changes: list[AlertChanged]) -> None:
        for change in changes:
            if change.state == "firing":
                self.firing[change.alert] = change
            else:
                self.firing.pop(change.alert, None)

    def _no_step(self, figures: RunFigures, now: float) -> str:
        limit_s = self._rules.no_step_s
        since = figures.stepped if figures.stepped is not None or not self._trains else figures.running_since
        if limit_s == "off" or since is None or figures.progress.status not in ("starting", "running") or figures.ends:
            return ""
        if now - since < limit_s:
            return ""
        return f"no step for {limit_s:g} s" + (f" after step {figures.step}" if figures.step is not None else "")

    def _check_throughput(self, figures: RunFigures) -> str:
        drop, recent, best = self._rules.throughput_drop, figures.speed.recent_median, figures.speed.best
        if drop == "off" or not best:
            return ""
        # The alert ends only when half of the drop has been recovered, so that noise does not trigger it twice.
        limit = (1 - drop / 2 if "throughput" in self.firing else 1 - drop) * best
        if recent is None:  # the first steps of an attempt are not representative
            return self.firing["throughput"].text if "throughput" in self.firing else ""
        if recent >= limit:
            return ""
        unit = "tokens" if figures.row.get("tokens_per_s") else "samples"
        return f"{recent:,.1f} {unit}/s, {1 - recent / best:.0%} less than the best {best:,.1f}"

    def _restart_changes(self, figures: RunFigures, now: float) -> list[AlertChanged]:
        if self._rules.restarts == "off":
            return []
        changes = []
        restarts = figures.progress.restarts
        for restart in restarts:
            if restart.attempt > self._restarts:
                self._restarts = restart.attempt
                if restart.attempt >= self._rules.restarts:
                    text = f"restart {restart.attempt} of {restart.of}: {restart.cause}"
                    changes.append(
                        AlertChanged(time=now, alert=f"restart-{restart.attempt}", state="firing", text=text)
                    )
        began = max((restart.time for restart in restarts), default=now)
        # A program that reports no steps has recovered when its processes exist again.
        back = figures.stepped if figures.step is not None or self._trains else figures.running_since
        if back is not None and back > began:
            over = [alert for alert in self.firing if alert.startswith("restart-")]
            text = _describe_resolution("restart", figures)
            changes += [AlertChanged(time=now, alert=alert, state="resolved", text=text) for alert in over]
        return changes


def _describe_end_in_alert(end: RunEnded | None) -> str:
    if end is None:
        return "its launcher has died"
    return "the run was stopped" if end.status == "stopped" else f"the run has {end.status}"


def _describe_failure_cause(end: RunEnded) -> str:
    """Return the node and the cause of a failure, as the end of a sentence."""
    failure = end.first_failure
    if failure is None:
        return f": {end.error}" if end.error else ""
    where = f" on {failure.node}" if failure.node else ""
    cause = failure.summary or end.error
    return f"{where}: {cause}" if cause else where


def _describe_resolution(alert: str, figures: RunFigures) -> str:
    step = f" at step {figures.step}" if figures.step is not None else ""
    return {
        "no-step": f"training takes steps again{step}",
        "loss-not-finite": f"the loss is finite again{step}",
        "throughput": f"throughput has recovered{step}",
    }.get(alert, f"the workers run again{step}")
