"""The end of a run: its last event, what people are told of it, and the exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtctl import names
from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.launch.job import Result
    from dtctl.launch.records.record import RunRecord


def end_facts(run: str, status: str, exit_code: int, **extra: Any) -> dict[str, Any]:
    """The fields of a run's last event, `more` among them; what is not given is nothing."""
    fields = {
        "run": run,
        "status": status,
        "exit_code": exit_code,
        "attempts": 0,
        "first_failure": None,
        "launch_s": None,
        "duration_s": None,
        "left_behind": 0,
    }
    return {**fields, **extra}


def finish(result: Result, emit: Any, record: RunRecord) -> int:
    """Tell how the run ended, and why if its logs say so; the exit code."""
    note_end(result, emit)
    show_end(result)
    if record.lost_events:
        output.err(
            f"{record.lost_events} events of the run could not be written into {record.folder}: what `dtctl status`, "
            "`runs` and `report` say of it lacks them",
            "red",
        )
    if result.exit_code == names.REQUEUE_EXIT:
        _show_continuation(record)
    logs = record.folder / names.LOGS_DIR
    if result.status == "failed":
        from dtctl.cli.common.doctor_view import show_cause

        show_cause(logs)
    return result.exit_code


def _show_continuation(record: RunRecord) -> None:
    """What continues where a run was stopped."""
    from dtctl.launch.continuation import command, shared_folder

    folder = shared_folder(record)
    if folder is not None:
        output.err(f"the next `dtctl launch` continues from the newest good snapshot in {folder}, if there is one")
    else:
        output.err(
            f"to continue from its newest good snapshot: {command(record.run)}  (without --resume it starts over)"
        )


def note_end(result: Result, emit: Any) -> None:
    """The last event of a run."""
    failure = result.first_failure
    first_failure = None
    if failure is not None:
        first_failure = {
            "node": failure.node,
            "rank": failure.rank,
            "exit_code": failure.exit_code,
            "signal": failure.signal,
            "log": failure.log,
            "summary": failure.summary,
        }
    emit(
        "done",
        **end_facts(
            result.run,
            result.status,
            result.exit_code,
            attempts=result.attempts,
            first_failure=first_failure,
            launch_s=round(result.launch_s, 3) if result.launch_s is not None else None,
            duration_s=round(result.duration_s, 3),
            left_behind=result.left_behind,
            goodput=result.goodput,
            **({"lost_output": dict(result.lost_output)} if result.lost_output else {}),
        ),
    )


def show_end(result: Result) -> None:
    """The last lines for people: how it ended, whose fault it was, and that nothing is left."""
    from dtctl.launch.control.failure import describe

    failure = result.first_failure
    if failure is not None:
        subject = f"rank {failure.rank} on {failure.node}" if failure.rank is not None else f"node {failure.node}"
        output.err(f"first failure: {subject} {describe(failure)}", "red", "bold")
        for line in failure.tail:
            output.err(f"  | {line}")
        if failure.exit_code is None and failure.summary:
            output.err(f"  | {failure.summary}")
        if failure.log:
            output.err(f"  log: {failure.log}")
    colour = {"succeeded": "green", "failed": "red"}.get(result.status, "yellow")
    attempts = f" in {result.attempts} attempts" if result.attempts > 1 else ""
    goodput = f", {result.goodput:.0%} of it useful steps" if result.goodput is not None else ""
    output.err(f"{result.status} after {result.duration_s:.1f} s{attempts}{goodput}", colour, "bold")
    for node, lost in sorted(result.lost_output.items()):
        output.err(
            f"output lost: {lost:,} bytes from {node} could not be stored, neither there nor here", "red", "bold"
        )
    if result.left_behind is None:
        output.err("a node could not be checked for remaining processes; `dtctl stop` checks again", "red")
    else:
        nodes = "1 node" if result.nodes == 1 else f"{result.nodes} nodes"
        output.err(f"{result.left_behind} processes left on {nodes}")
