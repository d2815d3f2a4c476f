"""`dtctl status`: show the state of a run."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.completion import CurrentRun
from dtctl.cli.common.run_argument import name_run

if TYPE_CHECKING:
    from dtctl.launch.records.events import RunEnded
    from dtctl.launch.records.record import RunInfo, RunRecord
    from dtctl.launch.records.state import RunState

SHOWN_HEALS = 5
"""Largest number of replacements of workers that are listed, the newest ones; a long run may have hundreds."""


def status(
    run: CurrentRun = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Show the state of a run and of its nodes."""
    from dtctl.cli.common.progress_line import read_newest_metrics, read_training_steps
    from dtctl.cli.common.remote_runs_view import find_elsewhere, show_status
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import read_run_state, summarize_time_shares

    run = name_run(run)
    elsewhere = find_elsewhere(run)
    if elsewhere is not None:
        show_status(elsewhere[1], json_=json_)
        return
    record = find_run(Path.cwd(), run)
    if record.info().slurm:
        from dtctl.cli.common.slurm_runs import update_job_record

        update_job_record(record)
    state = read_run_state(record)
    if state.status == "unattended":
        state = _as_nodes_tell(record, state)
    rows, steps, info = read_newest_metrics(record), read_training_steps(record), record.info()
    if json_:
        progress = _build_progress_json(rows[-1], steps) if rows else None
        facts = {"progress": progress, "launcher_pid": info.pid, "command": info.command}
        output.emit_json({**asdict(state), "done": state.done and state.done.to_json(), **facts})
        return
    colour = {"succeeded": "green", "running": "green", "failed": "red"}.get(state.status, "yellow")
    output.print_stdout(
        f"run {state.run}: {state.status} after {state.duration_s:.0f} s, attempt {state.attempt}", colour, "bold"
    )
    _show_training(info, state, rows, steps)
    if state.waits is not None:
        from dtctl.cli.common.run_display import describe_job_wait

        output.print_stdout(f"job {state.job} waits: {describe_job_wait(state.waits)}")
    output.print_table([[node, condition] for node, condition in state.nodes.items()], header=["NODE", "STATE"])
    if state.ledger is not None:
        output.print_stdout(f"time: {summarize_time_shares(state.ledger)}")
    _show_recoveries(state)
    for alert, text in state.alerts.items():
        output.print_stdout(f"alert {alert}: {text}", "red")
    if state.done is not None:
        _print_end_summary(state.done, record)
    _show_left(record)


def _print_end_summary(end: RunEnded, record: RunRecord) -> None:
    """Print the end of a run, with the lost work and the files that it has written."""
    from dtctl.cli.common.followed_run import format_failure_lines, format_outputs_line

    for line in format_failure_lines(end):
        output.print_stdout(line, "red")
    for node, lost in end.lost_output.items():
        output.print_stdout(f"output lost: {lost:,} bytes from {node} could not be stored on this machine", "red")
    for node, cut in end.cut_output.items():
        output.print_stdout(f"output of {node} was cut (job.log_mib): {cut:,} bytes are left out", "yellow")
    if end.outputs:
        is_local = record.plan().get("transport") == "local"
        fetched = record.folder / names.OUTPUTS_DIR
        removed = record.info().removed
        there = {node: outputs for node, outputs in end.outputs.items() if node not in removed}
        if line := format_outputs_line(record.run, there, is_local=is_local, fetched=fetched):
            output.print_stdout(line)
        if gone := [node for node, outputs in end.outputs.items() if node in removed and outputs.files]:
            output.print_stdout(f"outputs: `dtctl clean` has removed those on {', '.join(gone)}")
    if end.left_behind is None:
        output.print_stdout(
            "not every node could be checked for remaining processes; `dtctl stop` checks again", "yellow"
        )


def _build_progress_json(row: dict[str, Any], steps: int | None) -> dict[str, Any]:
    """Return step, loss and source of a row of metrics, and its figures of experts if the model has any."""
    from dtctl.cli.common.progress_line import PRINTED

    experts = ("expert_load", "expert_tokens", "expert_tokens_max", "experts_idle", "tokens_dropped")
    facts = {"step": int(row["step"]), "steps": steps or (int(row.get("steps") or 0) or None), "loss": row.get("loss")}
    facts["source"] = "output" if row.get(PRINTED) else "metrics"
    return facts | {key: row[key] for key in experts if key in row}


def _as_nodes_tell(record: RunRecord, state: RunState) -> RunState:
    """Return the state of a run that continues without a launcher, as its nodes report it if they can be reached."""
    from dataclasses import replace

    from dtctl.errors import DtctlError
    from dtctl.launch.cluster import build_run_cluster
    from dtctl.launch.remote_runs import RemoteRuns

    try:
        runs, _ = RemoteRuns(build_run_cluster(record)).runs()
    except DtctlError:
        return state
    if state.run not in runs:
        return state
    run = runs[state.run]
    states = {name: "running" if node.is_running else "ended" for name, node in run.nodes.items()}
    attempt = max(node.attempt for node in run.nodes.values())
    duration_s = time.time() - state.started if run.status == "running" else state.duration_s
    return replace(state, status=run.status, nodes={**state.nodes, **states}, attempt=attempt, duration_s=duration_s)


def _show_left(record: RunRecord) -> None:
    """Print the next step for a run that has no launcher."""
    from dtctl.launch.records.state import LEFT, read_run_state

    if read_run_state(record).status not in LEFT:
        return
    if record.info().detached:
        output.print_stdout("no launcher follows it: `dtctl watch` starts one, `dtctl stop` ends it", "yellow")
    else:
        output.print_stdout("its launcher ended unexpectedly; `dtctl stop` ends the remaining processes")


def _show_recoveries(state: RunState) -> None:
    for number, reason in enumerate(state.restarts, 1):
        output.print_stdout(f"restart {number}: {reason}", "yellow")
    if state.resume is not None:
        output.print_stdout(state.resume.event_text)
    shown = state.heals[-SHOWN_HEALS:]
    for number, text in enumerate(shown, len(state.heals) - len(shown) + 1):
        output.print_stdout(f"heal {number}: {text}", "yellow")


def _show_training(info: RunInfo, state: RunState, rows: list[dict[str, Any]], steps: int | None) -> None:
    """Print the progress of the run, and its launcher."""
    from dtctl.cli.common.progress_line import (
        format_experts_line,
        format_figure_source,
        format_loss,
        format_progress_line,
    )

    if info.resumed_run:
        output.print_stdout(f"continues run {info.resumed_run}")
    if rows:
        loss = format_loss(rows[-1])
        line = format_progress_line(rows[-1], steps=steps, runs=state.status == "running")
        output.print_stdout((f"{line}  loss {loss}" if loss else line) + format_figure_source(rows[-1]))
        if experts := format_experts_line(rows[-1]):
            output.print_stdout(experts)
    if not state.over:
        output.print_stdout(f"launched by process {info.pid}: {info.command_line}", "dim")
