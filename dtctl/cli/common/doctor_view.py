"""Output of the doctor: findings about a cluster, diagnoses of logs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl.cli import output
from dtctl.errors import UsageError
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.doctor.examine import Examination
    from dtctl.doctor.explain.diagnosis import Diagnosis, Explanation
    from dtctl.doctor.findings import Finding
    from dtctl.launch.control.failure import Failure


def show_examination(examination: Examination, took_s: float) -> None:
    """Print tables of nodes and pairs, then the findings, the primary one first."""
    from dtctl.doctor.tables import build_gpu_table, build_node_table, build_pair_table, link_table

    header, rows = build_node_table(examination)
    output.print_table(rows, header=header, spare=["ADDRESS"])
    matrix = build_pair_table(examination)
    if matrix is not None:
        output.print_stdout("")
        output.print_table(matrix[1], header=matrix[0])
    speeds = link_table(examination)
    if speeds is not None:
        output.print_stdout("")
        output.print_table(speeds[1], header=speeds[0])
    measured = build_gpu_table(examination)
    if measured is not None:
        output.print_stdout("")
        output.print_table(measured[1], header=measured[0])
        output.print_stdout("TFLOPS: products in half precision; the rest in GB/s", "dim")
    show_findings(examination.findings)
    nodes = format_count(len(examination.seen), "node")
    verdict, color = {
        True: (f"{nodes} can train, as far as examined", "green"),
        False: (f"{nodes} {_cannot_train(examination)}", "red"),
        None: (f"nothing wrong was found on {nodes}, but not everything that a launch needs was examined", "yellow"),
    }[examination.can_train]
    output.print_stdout(f"\n{verdict}; {took_s:.1f} s", color, "bold")
    output.print_stdout(f"not examined: {'; '.join(examination.not_examined)}", "dim")


def _cannot_train(examination: Examination) -> str:
    """Return the verdict of failed checks; it names the nodes to fix, unless all nodes are affected."""
    if len(examination.seen) == 1:
        return "cannot train in its present state"
    failed = [one for one in examination.findings if one.status == "fail" and not one.follows]
    named = dict.fromkeys(name for one in failed for name in one.nodes)
    if not named or len(named) == len(examination.seen):
        return "cannot train together in their present state"
    return f"cannot train together until {', '.join(named)} {'is' if len(named) == 1 else 'are'} fixed"


def show_findings(findings: Sequence[Finding]) -> None:
    """Print the findings, the primary cause first, each with its fix and its evidence."""
    for finding in findings:
        if finding.status not in ("fail", "warn"):
            continue
        label = "primary cause" if finding.primary and finding.status == "fail" else finding.status
        follows = f" (follows from {finding.follows})" if finding.follows else ""
        output.print_stdout(f"\n{label}: {finding.check}: {finding.summary}{follows}", "bold")
        output.print_stdout(f"  fix: {finding.fix}")
        for line in finding.evidence:
            output.print_stdout(f"  | {line}")


def show_explanation(explained: Explanation) -> None:
    """Print what is certain, what is likely, and settings for another run; then consequences and other findings."""
    from dtctl.doctor.explain.lines import render_terminal_line

    if explained.verdict == "no-failure":
        output.print_stdout("no failure in these logs", "bold")
        _print_other_diagnoses("also seen:", explained.diagnoses)
        return
    first, *rest = explained.diagnoses
    understood = explained.verdict == "explained"
    lines = [f"  | {render_terminal_line(one.file)}:{one.line}: {one.text}" for one in first.evidence]
    label = "cause" if understood else "failed, not understood"
    told = [f"  {label}: {first.cause}{_ranks_and_nodes(first)}", f"  fix: {first.fix}"]
    told += [f"  see {first.source}"] if first.source else []
    certain = understood and first.confidence == "high"
    _show_part("certain:", [*told, *lines] if certain else lines or ["  the job failed"])
    _show_part(f"likely ({first.confidence} confidence):", [] if certain else told)
    _show_part("run again with:", [f"  {first.again}"] if first.again else [])
    _print_other_diagnoses("consequences:", [one for one in rest if one.follows])
    _print_other_diagnoses("also found:", [one for one in rest if not one.follows])


def _show_part(heading: str, lines: Sequence[str]) -> None:
    if lines:
        output.print_stdout(heading, "bold")
    for line in lines:
        output.print_stdout(line)


def _print_other_diagnoses(heading: str, diagnoses: Sequence[Diagnosis]) -> None:
    if diagnoses:
        output.print_stdout(heading)
    for diagnosis in diagnoses:
        output.print_stdout(f"  {diagnosis.id}: {diagnosis.cause}{_ranks_and_nodes(diagnosis)}")


def show_cause(logs: Path, failure: Failure | None = None, *, known: Collection[str] = ()) -> None:
    """Print the cause of a failed run, if its logs have one, at the end of `dtctl launch`.

    Args:
        logs: folder of the run's logs.
        failure: first failure by the launcher; a cause that concerns other workers or nodes is not printed.
        known: ids of diagnoses that a more exact message has covered already.
    """
    from dtctl.doctor.explain.diagnose import explain_all

    try:
        explained = explain_all([logs])
    except UsageError:  # without any output there is nothing to explain
        return
    # A mere consequence would only distract from the messages above, which include a plain exception.
    if explained.verdict != "explained" or explained.diagnoses[0].id == "exception":
        return
    first = explained.diagnoses[0]
    if first.id in known or (failure is not None and _is_elsewhere(first, failure)):
        return
    output.print_stderr(f"cause: {first.cause}{_ranks_and_nodes(first)}", "bold")
    output.print_stderr(f"  fix: {first.fix}")


def _is_elsewhere(diagnosis: Diagnosis, failure: Failure) -> bool:
    """Return whether a diagnosis concerns other workers or nodes than the failure."""
    if failure.rank is not None and failure.rank >= 0 and diagnosis.ranks:
        return failure.rank not in diagnosis.ranks
    return bool(diagnosis.nodes) and failure.node not in diagnosis.nodes


def _ranks_and_nodes(diagnosis: Diagnosis) -> str:
    """Return ` (rank 3 on node2)`; empty for a diagnosis without ranks and nodes."""
    ranks = ", ".join(str(rank) for rank in diagnosis.ranks)
    ranks_text = f"rank{'s' if len(diagnosis.ranks) > 1 else ''} {ranks}" if ranks else ""
    nodes = ", ".join(diagnosis.nodes)
    text = f"{ranks_text} on {nodes}" if ranks_text and nodes else ranks_text or nodes
    return f" ({text})" if text else ""
