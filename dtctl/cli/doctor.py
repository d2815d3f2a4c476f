"""`dtctl doctor`: can this cluster train, and why did this job fail?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.doctor.explain.diagnose import Diagnosis

Log = Annotated[
    list[Path] | None,
    typer.Option("--log", metavar="PATH", help="Explain this log, or all logs in this folder; needs no cluster."),
]


def doctor(
    log: Log = None,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[SPEC]", help="The spec; with --log, more logs.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Explain why a job failed: the first cause, the ranks and nodes to look at, and what to do."""
    return explain_logs([*(log or ()), *(more or ())], json_lines=json_)


def explain_logs(paths: Sequence[Path], *, json_lines: bool) -> int:
    """Print what the logs say; the exit code."""
    from dtctl.doctor.explain.diagnose import explain
    from dtctl.errors import DoctorFailed

    found = explain(paths)
    if json_lines:
        output.emit_json({"diagnoses": [diagnosis.as_json() for diagnosis in found]})
    else:
        show(found)
    return 0 if found[0].id == "unknown" else DoctorFailed.exit_code


def show(found: Sequence[Diagnosis]) -> None:
    """The primary cause with its evidence, then what follows from it, a line each."""
    first = found[0]
    output.out(f"cause: {first.cause}{who(first)}", "bold")
    if first.confidence in ("low", "medium", "ambiguous"):
        output.out(f"  confidence: {first.confidence}")
    output.out(f"  fix: {first.fix}")
    for evidence in first.evidence:
        output.out(f"  | {evidence.file}:{evidence.line}: {evidence.text}")
    if first.source:
        output.out(f"  see {first.source}")
    if len(found) > 1:
        output.out("also found, probably because of that:" if first.id != "unknown" else "also found:")
    for diagnosis in found[1:]:
        output.out(f"  {diagnosis.id}: {diagnosis.cause}{who(diagnosis)}")


def show_cause(logs: Path) -> None:
    """Tell the cause of a failed run, if its logs have one; for the end of `dtctl launch`."""
    from dtctl.doctor.explain.diagnose import explain
    from dtctl.errors import UsageError

    try:
        first = explain([logs])[0]
    except UsageError:  # nothing was printed, so nothing can be said
        return
    # A plain exception was shown already, and a mere consequence would only distract from what was.
    if first.id in ("unknown", "exception") or first.confidence == "low":
        return
    output.err(f"cause: {first.cause}{who(first)}", "bold")
    output.err(f"  fix: {first.fix}")


def who(diagnosis: Diagnosis) -> str:
    """` (rank 3 on node2)`; empty when nobody in particular is meant."""
    ranks = ", ".join(str(rank) for rank in diagnosis.ranks)
    named = f"rank{'s' if len(diagnosis.ranks) > 1 else ''} {ranks}" if ranks else ""
    nodes = ", ".join(diagnosis.nodes)
    told = f"{named} on {nodes}" if named and nodes else named or nodes
    return f" ({told})" if told else ""
