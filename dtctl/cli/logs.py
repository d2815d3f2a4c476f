"""`dtctl logs`: the output of a run's workers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output
from dtctl.cli.common.completion import CurrentRun, complete_node_names
from dtctl.cli.common.run_argument import name_run
from dtctl.errors import UsageError

if TYPE_CHECKING:
    from dtctl.cli.common.log_reader import RankLogLine
    from dtctl.launch.records.record import RunRecord

POLL_S = 0.1


def logs(
    run: CurrentRun = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the output until the run ends.")] = False,
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Only this node.", autocompletion=complete_node_names)
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Only this rank.")] = None,
    tail: Annotated[
        int | None, typer.Option("-n", "--tail", metavar="N", min=0, help="Only the last N lines of each worker.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="N", min=-1, help="Only this attempt, from 0; -1: the newest.")
    ] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines that have a match.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only workers that printed within this time: 90s, 10m, 2h.")
    ] = None,
) -> int:
    """Print the output of the workers, one worker after the other, each line with its node and rank."""
    from dtctl.cli.common.log_reader import LogFilter, LogReader
    from dtctl.cli.common.remote_runs_view import find_elsewhere, show_logs
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import read_run_state

    run = name_run(run)
    elsewhere = find_elsewhere(run)
    if elsewhere is not None:
        return show_logs(*elsewhere, follow=follow, node=node, rank=rank, pattern=_compile_grep_pattern(grep))
    record = find_run(Path.cwd(), run)
    if record.info().slurm and not follow:
        _update_job_logs(record)
    _check_log_filters(record, node, rank, attempt)
    chosen = LogFilter(
        node=node, rank=rank, tail=tail, attempt=attempt, pattern=_compile_grep_pattern(grep),
        changed_since=time.time() - _parse_age_seconds(since) if since is not None else None,
    )  # fmt: skip
    if follow:
        from dtctl.cli.take_up import take_up_if_alone

        take_up_if_alone(record)
    reader = LogReader(record, chosen)
    shown = _print_log_lines(reader.read_new())
    while follow:
        over = read_run_state(record).over  # read before the logs, so that no line at the end is missed
        shown += _print_log_lines(reader.read_new())
        if over:
            break
        time.sleep(POLL_S)
    shown += _print_log_lines(reader.read_rest())
    if not shown:
        yet = "" if read_run_state(record).over else " yet"
        output.print_stderr(
            f"no line of run {record.run} is among those asked for{yet}"
            if reader.has_output
            else f"run {record.run} has printed nothing{yet}"
        )
    return 0


def _print_log_lines(lines: Iterable[RankLogLine]) -> int:
    """Print lines as they are read; return their number."""
    shown = 0
    for line in lines:
        output.print_worker_line(*line)
        shown += 1
    return shown


def _update_job_logs(record: RunRecord) -> None:
    """Copy the new output of a Slurm job that has no follower."""
    from dtctl.cli.common.slurm_runs import update_job_record
    from dtctl.errors import LaunchError, TransportError

    try:
        update_job_record(record)
    except (LaunchError, TransportError) as exc:
        output.print_stderr(f"what the job has printed since is not here: {exc}", "yellow")


def _check_log_filters(record: RunRecord, node: str | None, rank: int | None, attempt: int | None) -> None:
    from dtctl.errors import LaunchError
    from dtctl.launch.records.logs import read_attempt_offsets
    from dtctl.launch.records.record import build_node_error
    from dtctl.launch.records.state import read_run_state

    if node is not None and node not in read_run_state(record).nodes:
        raise build_node_error(record.run, node, read_run_state(record).nodes, where="--node")
    size = record.plan().get("world_size")
    if rank is not None and size is not None and not 0 <= rank < int(size):
        raise LaunchError(f"run {record.run} has no rank {rank}", where="--rank", hint=f"its ranks are 0 to {size - 1}")
    attempts = max(1, len(read_attempt_offsets(record.folder)))
    if attempt is not None and attempt >= attempts:
        hint = "it had only attempt 0" if attempts == 1 else f"its attempts are 0 to {attempts - 1}"
        raise LaunchError(f"run {record.run} has no attempt {attempt}", where="--attempt", hint=hint)


def _compile_grep_pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except re.error as exc:
        raise UsageError(f"{grep!r} is not a regular expression: {exc}", where="--grep") from None


def _parse_age_seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", age.strip())
    if not match:
        raise UsageError(f"{age!r} is not a duration", where="--since", hint="write 90s, 10m, 2h or 1d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
