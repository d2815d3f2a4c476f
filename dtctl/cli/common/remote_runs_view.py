"""Output of `runs --nodes`, and of `status`, `logs`, `watch` and `stop` for a run of another control machine."""

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
    from dtctl.launch.remote_runs import RemoteRun, RemoteRuns

POLL_S = 0.5
COLOURS = {"succeeded": "green", "running": "green", "failed": "red"}


def find_elsewhere(run: str | None) -> tuple[RemoteRuns, RemoteRun] | None:
    """Return a run on the nodes of its spec that this folder has no record of; None if the folder has one.

    Raises:
        LaunchError: neither this folder nor the nodes have the run.
    """
    folder = Path.cwd()
    if (
        run is None
        or (folder / names.STATE_DIR / names.RUNS_DIR / run).exists()
        or not (folder / names.SPEC_FILE).exists()
    ):
        return None
    from dtctl.launch.records.record import list_array_tasks, list_run_records
    from dtctl.launch.remote_runs import find_run_on_nodes

    if list_array_tasks(folder, run):
        return None
    here = [record.run for record in list_run_records(folder)]
    return find_run_on_nodes(_load_spec_cluster(None), run, here=here)


def _load_spec_cluster(spec: Path | None) -> Any:
    from dtctl.launch.cluster import resolve_cluster
    from dtctl.spec.load import load_spec

    return resolve_cluster(load_spec(spec or Path(names.SPEC_FILE), ()), start=False)


def show_runs(spec: Path | None, *, json_: bool) -> int:
    """List the runs on the nodes of the spec, the newest last."""
    from dtctl.launch.remote_runs import RemoteRuns

    runs, errors = RemoteRuns(_load_spec_cluster(spec)).runs()
    statuses = _read_recorded_ends(runs)
    if json_:
        rows = [_build_found_run_json(run) | {"status": statuses.get(run.run, run.status)} for run in runs.values()]
        output.emit_json({"runs": rows, "errors": {node: str(error) for node, error in errors.items()}})
    elif runs:
        output.print_table(
            [
                [
                    run.run,
                    statuses.get(run.run, run.status),
                    _format_start_time(run),
                    ",".join(run.nodes),
                    run.first.launched_from,
                    run.first.command,
                ]
                for run in runs.values()
            ],
            header=["RUN", "STATUS", "STARTED", "NODES", "LAUNCHED BY", "COMMAND"],
            cut=True,
            spare=["LAUNCHED BY", "STARTED"],
        )
    elif not errors:
        output.print_stderr("the nodes have no record of any run")
    return _print_node_errors(errors)


def _read_recorded_ends(runs: Mapping[str, RemoteRun]) -> dict[str, str]:
    """Return the recorded ends of this folder's runs; a launcher's record is more exact than the nodes' reports."""
    from dtctl.launch.records.record import list_run_records
    from dtctl.launch.records.state import read_run_state

    ends: dict[str, str] = {}
    for record in list_run_records(Path.cwd()):
        run = runs.get(record.run)
        # Another folder may have launched a run of the same name.
        if run is None or run.first.token != record.info().token or run.status == "running":
            continue
        if (end := read_run_state(record).done) is not None:
            ends[record.run] = end.status
    return ends


def _format_start_time(run: RemoteRun) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.first.started)) if run.first.started else "?"


def _build_found_run_json(run: RemoteRun) -> dict[str, Any]:
    nodes = {
        name: {"state": "running" if node.is_running else "ended", "attempt": node.attempt, "exit_code": node.exit_code}
        for name, node in run.nodes.items()
    }
    first = run.first
    facts = {"started": first.started, "launched_from": first.launched_from, "command": first.command}
    return {"run": run.run, "status": run.status, **facts, "detached": first.keep, "nodes": nodes}


def _print_node_errors(errors: Mapping[str, Exception]) -> int:
    for error in errors.values():
        if isinstance(error, DtctlError):
            output.print_error_with_hint(error)
    return 6 if errors else 0


def show_status(run: RemoteRun, *, json_: bool) -> None:
    """Print the state of a run by the reports of its nodes."""
    if json_:
        output.emit_json(_build_found_run_json(run))
        return
    first = run.first
    output.print_stdout(
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
    output.print_table(rows, header=["NODE", "STATE", "EXIT CODE"])
    if first.command:
        output.print_stdout(f"command: {first.command}", "dim")


def show_logs(
    elsewhere: RemoteRuns,
    run: RemoteRun,
    *,
    follow: bool,
    node: str | None = None,
    rank: int | None = None,
    pattern: re.Pattern[str] | None = None,
) -> int:
    """Print the output of a run's newest attempt from its nodes; return exit code 6 if a node does not answer."""
    from dtctl.launch.records.logs import LineSplitter

    partial: dict[tuple[str, int], LineSplitter] = {}

    def print_lines(name: str, of: int, texts: Iterable[str]) -> None:
        for text in texts:
            if node in (None, name) and rank in (None, of) and (pattern is None or pattern.search(text)):
                output.print_worker_line(name, of, text)

    def show(name: str, of: int, data: bytes) -> None:
        print_lines(name, of, partial.setdefault((name, of), LineSplitter()).feed(data))

    def pause() -> bool:
        if follow:
            time.sleep(POLL_S)
        return follow

    answers = elsewhere.follow_run_output(run, show, pause)
    for (name, of), lines in partial.items():
        if text := lines.flush():
            print_lines(name, of, [text])
    for name, answer in answers.items():
        if not isinstance(answer, DtctlError):
            now = {"is_running": answer.is_running, "exit_code": answer.exit_code, "attempt": answer.attempt,
                   "is_stopped": answer.is_stopped}  # fmt: skip
            run.nodes[name] = type(run.nodes[name])(**{**vars(run.nodes[name]), **now})
    return _print_node_errors({name: answer for name, answer in answers.items() if isinstance(answer, DtctlError)})


def watch_run(elsewhere: RemoteRuns, run: RemoteRun) -> int:
    """Follow a run until it ends; return the exit code that a launch of this run would have."""
    output.print_stderr(f"run {run.run}: {run.status}, launched by {run.first.launched_from or 'somebody'}", "bold")
    problem = show_logs(elsewhere, run, follow=True)
    output.print_stderr(run.status, "bold")
    return problem or run.exit_code


def stop_run(elsewhere: RemoteRuns, run: RemoteRun) -> Mapping[str, int | DtctlError]:
    """Stop a run; return for each node the number of remaining processes, or an error."""
    output.print_stderr(
        f"run {run.run} was launched by {run.first.launched_from or 'somebody'}, where a message will appear", "dim"
    )
    return elsewhere.stop(run)
