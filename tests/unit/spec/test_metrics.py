"""The section `metrics`: what it takes, and that no secret can stand in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.errors import SpecError
from dtctl.spec.load import dump_spec, parse_spec
from dtctl.spec.model import Spec
from dtctl.spec.problems import REMOVED


def parse(text: str) -> Spec:
    return parse_spec(f"job: {{script: t.py}}\nmetrics: {text}\n", source="dtctl.yaml", base_dir=Path())


def test_nothing_listens_and_nobody_is_told_unless_asked() -> None:
    assert parse_spec("job: {script: t.py}", source="dtctl.yaml", base_dir=Path()).metrics is None
    metrics = parse("{}").metrics
    assert metrics is not None
    assert (metrics.port, metrics.alerts) == (None, None)
    assert metrics.address == "127.0.0.1"


def test_rules_have_defaults_and_can_be_switched_off() -> None:
    metrics = parse("{alerts: {no_step_s: off, restarts: 3}}").metrics
    assert metrics is not None
    assert metrics.alerts is not None
    rules = metrics.alerts
    assert (rules.no_step_s, rules.restarts, rules.throughput_drop, rules.failed) == ("off", 3, 0.2, True)


def test_the_copy_of_a_run_says_the_same() -> None:
    spec = parse("{port: auto, alerts: {webhook: {env: HOOK}, restarts: 2}}")
    assert parse_spec(dump_spec(spec), source="copy", base_dir=Path()).metrics == spec.metrics


def test_secrets_are_named_by_key() -> None:
    metrics = parse("{alerts: {webhook: {file: ~/w}}}").metrics
    assert metrics is not None
    named = {key: secret.env or str(secret.file) for key, secret in metrics.secrets.items()}
    assert named == {"metrics.alerts.webhook": "~/w"}


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_names_what_serves_instead(key: str) -> None:
    section, _, name = key.removeprefix("metrics.").rpartition(".")
    text = f"{{{section}: {{{name}: 1}}}}" if section else f"{{{name}: 1}}"
    with pytest.raises(SpecError, match="this key was removed") as caught:
        parse(text)
    assert caught.value.key == key
    assert REMOVED[key] in caught.value.message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{port: 0}", "metrics.port"),
        ("{alerts: {webhook: 'https://example.org/secret'}}", "metrics.alerts.webhook"),
        ("{alerts: {webhook: {env: A, file: b}}}", "metrics.alerts.webhook"),
        ("{alerts: {throughput_drop: 1}}", "metrics.alerts.throughput_drop"),
    ],
)
def test_what_is_refused(text: str, key: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert caught.value.key == key
    assert caught.value.where == "dtctl.yaml:2"
