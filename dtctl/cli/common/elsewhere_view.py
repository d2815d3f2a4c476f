"""`runs --nodes`, and `status`, `logs`, `watch` and `stop` of a run that another control machine has launched."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtctl import names
from dtctl.cli import output
from dtctl.errors import DtctlError

if TYPE_CHECKING:
    from dtctl.launch.elsewhere import FoundRun, RunElsewhere

POLL_S = 0.5
COLOURS = {"succeeded": "green", "running": "green", "failed": "red"}


def find_elsewhere(run: str | None) -> tuple[RunElsewhere, FoundRun] | None:
    """Return a run that this folder has no record of, on the nodes of its spec; None for one that it has a record of.

    Raises:
        LaunchError: the run is unknown here and on the nodes.
    """
    folder = Path.cwd()
    if (
        run is None
        or (folder / names.STATE_DIR / names.RUNS_DIR / run).exists()
        or not (folder / names.SPEC_FILE).exists()
    ):
        return None
    from dtctl.launch.elsewhere import find
    from dtctl.launch.records.record import tasks_of

    return None if tasks_of(folder, run) else find(_cluster(None), run)


def _cluster(spec: Path | None) -> Any:
    from dtctl.launch.cluster import cluster_of
    from dtctl.spec.load import load_spec

    return cluster_of(load_spec(spec or Path(names.SPEC_FILE), ()), start=False)


def show_runs(spec: Path | None, *, json_: bool) -> int:
    """List the runs that the nodes of the spec have, the newest last."""
    from dtctl.launch.elsewhere import RunElsewhere

    runs, errors = RunElsewhere(_cluster(spec)).runs()
    if json_:
        rows = [_facts(run) for run in runs.values()]
        output.emit_json({"runs": rows, "errors": {node: str(error) for node, error in errors.items()}})
    elif runs:
        output.table(
            [
                [run.run, run.status, _started(run), ",".join(run.nodes), run.first.launched_from, run.first.command]
                for run in runs.values()
            ],
            header=["RUN", "STATUS", "STARTED", "NODES", "LAUNCHED BY", "COMMAND"],
            cut=True,
            spare=["LAUNCHED BY", "STARTED"],
        )
    elif not errors:
        output.err("the nodes have no record of any run")
    return _complain(errors)


def _started(run: FoundRun) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.first.started)) if run.first.started else "?"


def _facts(run: FoundRun) -> dict[str, Any]:
    nodes = {
        name: {"state": "running" if node.is_running else "ended", "attempt": node.attempt, "exit_code": node.exit_code}
        for name, node in run.nodes.items()
    }
    first = run.first
    facts = {"started": first.started, "launched_from": first.launched_from, "command": first.command}
    return {"run": run.run, "status": run.status, **facts, "detached": first.keep, "nodes": nodes}


def _complain(errors: Mapping[str, Exception]) -> int:
    for error in errors.values():
        if isinstance(error, DtctlError):
            output.error(error)
    return 6 if errors else 0


def show_status(run: FoundRun, *, json_: bool) -> None:
    """Print the state of a run, as its nodes report it."""
    if json_:
        output.emit_json(_facts(run))
        return
    first = run.first
    output.out(
        f"run {run.run}: {run.status}, attempt {first.attempt}, launched by {first.launched_from or 'somebody'}",
        COLOURS.get(run.status, "yellow"),
        "bold",
    )
    rows = [
        [
            name,
            "running" if node.is_running else "ended",
            "" if node.exit_code is None else str(node.exit_code),
        ]
        for name, node in run.nodes.items()
    ]
    output.table(rows, header=["NODE", "STATE", "EXIT CODE"])
    if first.command:
        output.out(f"command: {first.command}", "dim")


def show_logs(
    elsewhere: RunElsewhere,
    run: FoundRun,
    *,
    follow: bool,
    node: str | None = None,
    rank: int | None = None,
    pattern: re.Pattern[str] | None = None,
) -> int:
    """Print the output of a run's newest attempt, from its nodes; 6 where a node could not be asked."""
    from dtctl.launch.records.logs import Lines

    partial: dict[tuple[str, int], Lines] = {}

    def print_lines(name: str, of: int, texts: Iterable[str]) -> None:
        for text in texts:
            if node in (None, name) and rank in (None, of) and (pattern is None or pattern.search(text)):
                output.out(f"[{name}:{of if of >= 0 else 'agent'}] {text}")

    def show(name: str, of: int, data: bytes) -> None:
        print_lines(name, of, partial.setdefault((name, of), Lines()).feed(data))

    def pause() -> bool:
        if follow:
            time.sleep(POLL_S)
        return follow

    answers = elsewhere.follow(run, show, pause)
    for (name, of), lines in partial.items():
        if text := lines.flush():
            print_lines(name, of, [text])
    for name, answer in answers.items():
        if not isinstance(answer, DtctlError):
            now = {"is_running": answer.is_running, "exit_code": answer.exit_code, "attempt": answer.attempt}
            run.nodes[name] = type(run.nodes[name])(**{**vars(run.nodes[name]), **now})
    return _complain({name: answer for name, answer in answers.items() if isinstance(answer, DtctlError)})


def watch_run(elsewhere: RunElsewhere, run: FoundRun) -> int:
    """Follow a run until it ends; its exit code as a launch would end with it."""
    output.err(f"run {run.run}: {run.status}, launched by {run.first.launched_from or 'somebody'}", "bold")
    problem = show_logs(elsewhere, run, follow=True)
    output.err(run.status, "bold")
    return problem or run.exit_code


def stop_run(elsewhere: RunElsewhere, run: FoundRun) -> Mapping[str, int | DtctlError]:
    """End a run; node -> processes left there."""
    output.err(f"run {run.run} was launched by {run.first.launched_from or 'somebody'}, who will be told", "dim")
    return elsewhere.stop(run)
