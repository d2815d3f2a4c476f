"""A run's folder, read for its report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtctl import folders, names
from dtctl.errors import SpecError, UsageError
from dtctl.launch.records.record import RunInfo, RunRecord
from dtctl.launch.records.state import RunState, read_run_state
from dtctl.report.history import RunHistory, build_run_history
from dtctl.report.metrics import MetricsTable, read_metrics_table, read_printed_table
from dtctl.spec import positions
from dtctl.spec.load import MAX_BYTES

SECRET = re.compile(r"(?i)(key|token|secret|pass(w|_|$)|pwd|credential|auth|private)")
"""Names of variables whose values are not shown, since users share a page, but not the folder of a run."""
LOGIN = re.compile(r"://[^/@\s]*:[^/@\s]+@")
"""Name and password in a URL."""
HIDDEN = "(not shown)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedVariable:
    """A variable of the workers' environment, and its origin."""

    name: str
    value: str
    origin: str
    nodes: tuple[str, ...]
    """Nodes with this value; empty if all have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Contents of the report of one run."""

    info: RunInfo
    state: RunState
    plan: Mapping[str, Any]
    spec: str
    """Text of the spec, without values that look like secrets."""
    settings: Mapping[str, str]
    """Keys of the spec and their values, `train.lr: 0.001`."""
    environment: tuple[ReportedVariable, ...]
    history: RunHistory
    metrics: MetricsTable | None


def collect_run_facts(record: RunRecord) -> RunFacts:
    """Return the contents of the report of a run.

    Raises:
        LaunchError: the folder is not that of a run, or its metrics cannot be read.
    """
    state, plan = read_run_state(record), record.plan()
    text = _read_optional_text(record.folder / names.RUN_SPEC_FILE)
    settings = flatten_spec_text(text)
    hidden = {key: value for key, value in settings.items() if value and (_is_secret(key) or LOGIN.search(value))}
    for value in hidden.values():
        text = text.replace(value, HIDDEN)
    text = LOGIN.sub(f"://{HIDDEN}@", text)  # logins in URLs are hidden everywhere, also within a list or a comment
    return RunFacts(
        info=record.info(),
        state=state,
        plan=plan,
        spec=text,
        settings={key: HIDDEN if key in hidden else value for key, value in settings.items()},
        environment=list_reported_variables(plan),
        history=build_run_history(record.events(), began=state.started, length_s=state.duration_s),
        metrics=read_metrics_table(record.folder / names.METRICS_FILE)
        or read_printed_table(record.folder / names.LOGS_DIR, settings.get("job.progress")),
    )


def _is_secret(key: str) -> bool:
    """Return whether a key of the spec holds a secret: a variable of `env` by its name."""
    above, _, name = key.rpartition(".")
    return above.rpartition(".")[2] == "env" and SECRET.search(name) is not None


def _read_optional_text(path: Path) -> str:
    try:
        return folders.read_regular(str(path), MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def flatten_spec_text(text: str) -> dict[str, str]:
    """Return the spec as dotted keys; none when it is not YAML."""
    try:
        document = positions.parse_yaml_document(text, source="")
    except SpecError:
        return {}
    flattened: dict[str, str] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), below)
        elif prefix:
            flattened[prefix] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    walk("", document.data)
    return flattened


def list_reported_variables(plan: Mapping[str, Any]) -> tuple[ReportedVariable, ...]:
    """Return every variable of every node, those with the same value together."""
    nodes = plan.get("nodes", [])
    nodes_by_setting: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        for variable in node.get("env", []):
            secret = SECRET.search(variable["name"]) or LOGIN.search(variable["value"])
            value = HIDDEN if secret else variable["value"]
            nodes_by_setting.setdefault((variable["name"], value, variable["origin"]), []).append(node["name"])
    return tuple(
        ReportedVariable(name=name, value=value, origin=origin, nodes=() if len(where) == len(nodes) else tuple(where))
        for (name, value, origin), where in nodes_by_setting.items()
    )


def check_out(path: Path, *, option: str = "-o") -> Path:
    """Return the file to write for `path`, which may be a link to it.

    Raises:
        UsageError: it is a folder, or in none.
    """
    file = path.resolve()
    if file.is_dir():
        raise UsageError(f"{path} is a folder", where=option, hint=f"name the file: {option} {path / 'report.html'}")
    if not file.parent.is_dir():
        raise UsageError(
            f"there is no folder {file.parent if path.is_symlink() else path.parent}",
            where=option,
            hint="make it first, or name another",
        )
    return file
