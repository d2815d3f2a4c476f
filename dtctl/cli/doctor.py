"""`dtctl doctor`: can this cluster train, and why did this job fail?"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import UsageError

if TYPE_CHECKING:
    from dtctl.doctor.examine import Examination
    from dtctl.doctor.explain.diagnose import Diagnosis
    from dtctl.doctor.findings import Finding

Log = Annotated[
    list[Path] | None,
    typer.Option("--log", metavar="PATH", help="Explain this log, or all logs in this folder; needs no cluster."),
]
Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[SPEC]", help="The spec; with --log, more logs.  [default: dtctl.yaml]", show_default=False
    ),
]


def doctor(
    paths: Paths = None,
    log: Log = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only what takes a moment: fewer ports per pair, nothing measured, no torch."),
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER", help="Leave out links (bandwidth, loss) or collective (sums over all nodes)."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Say which node or pair of a cluster is at fault, why, and what to type; or explain the logs of a failed job."""
    if log:
        return explain_logs([*log, *(paths or ())], json_lines=json_)
    if paths and len(paths) > 1:
        raise UsageError("there is more than one spec", hint="logs are named behind --log")
    path = paths[0] if paths else Path(names.SPEC_FILE)
    return examine_cluster(path, skip=("links", "collective") if quick else tuple(skip or ()), json_lines=json_)


def examine_cluster(path: Path, *, skip: Sequence[str], json_lines: bool) -> int:
    """Examine a cluster and print what was found; the exit code."""
    from dtctl.doctor.examine import COSTLY, examine
    from dtctl.doctor.tables import links_of
    from dtctl.errors import DoctorFailed
    from dtctl.launch.cluster import cluster_of
    from dtctl.spec.load import load_spec

    for layer in set(skip) - {*COSTLY}:
        raise UsageError(f"there is no layer {layer!r} to leave out", where="--skip", hint=" or ".join(COSTLY))
    spec = load_spec(path, ())
    if spec.cluster.transport == "slurm":
        if "SLURM_JOB_ID" not in os.environ:
            from dtctl.cli.doctor_slurm import examine_offer

            return examine_offer(spec, json_lines=json_lines)
        from dtctl.slurm.allocation import cluster_of_allocation

        cluster = cluster_of_allocation(spec, os.environ)
    else:
        cluster = cluster_of(spec, start=True)
    begun = time.monotonic()
    done = examine(
        spec,
        cluster,
        skip=[layer for layer in COSTLY if layer in skip],
        progress=lambda text: output.err(f"{text} ...", "dim"),
    )
    took_s = round(time.monotonic() - begun, 2)
    if json_lines:
        findings = [finding.as_json() for finding in done.findings]
        output.emit_json(
            {
                "ok": done.ok,
                "nodes": [seen.name for seen in done.seen],
                "took_s": took_s,
                "findings": findings,
                "not_examined": list(done.not_examined),
                "links": links_of(done.seen),
                "all_reduce": done.sums or None,
            }
        )
    else:
        show_examination(done, took_s)
    return 0 if done.ok else DoctorFailed.exit_code


def show_examination(done: Examination, took_s: float) -> None:
    """Tables of nodes and of pairs, then the findings, the primary one first."""
    from dtctl.doctor.tables import link_table, node_table, pair_table

    header, rows = node_table(done)
    output.table(rows, header=header)
    matrix = pair_table(done)
    if matrix is not None:
        output.out("")
        output.table(matrix[1], header=matrix[0])
    speeds = link_table(done)
    if speeds is not None:
        output.out("")
        output.table(speeds[1], header=speeds[0])
    show_findings(done.findings)
    nodes = "1 node" if len(done.seen) == 1 else f"{len(done.seen)} nodes"
    verdict = "can train, by what was examined" if done.ok else "cannot train as they are"
    output.out(f"\n{nodes} {verdict}; {took_s:.1f} s", "green" if done.ok else "red", "bold")
    output.out(f"not examined: {'; '.join(done.not_examined)}", "dim")


def show_findings(findings: Sequence[Finding]) -> None:
    """What is wrong, the primary cause first, each with its fix and its evidence."""
    for finding in findings:
        if finding.status not in ("fail", "warn"):
            continue
        label = "primary cause" if finding.primary and finding.status == "fail" else finding.status
        follows = f" (follows from {finding.follows})" if finding.follows else ""
        output.out(f"\n{label}: {finding.check}: {finding.summary}{follows}", "bold")
        output.out(f"  fix: {finding.fix}")
        for line in finding.evidence:
            output.out(f"  | {line}")


def explain_logs(paths: Sequence[Path], *, json_lines: bool) -> int:
    """Print what the logs say; the exit code."""
    from dtctl.doctor.explain.diagnose import explain_all
    from dtctl.doctor.explain.lines import shown
    from dtctl.errors import DoctorFailed

    found, unread = explain_all(paths)
    for one in unread:
        output.err(f"warning: {shown(one.file)}: {one.why}", "yellow")
    if json_lines:
        output.emit_json(
            {
                "diagnoses": [diagnosis.as_json() for diagnosis in found],
                "unread": [{"file": one.file, "why": one.why} for one in unread],
            }
        )
    else:
        show(found)
    return 0 if found[0].id == "unknown" else DoctorFailed.exit_code


def show(found: Sequence[Diagnosis]) -> None:
    """The primary cause with its evidence, then what follows from it, a line each."""
    from dtctl.doctor.explain.lines import shown

    first = found[0]
    output.out(f"cause: {first.cause}{who(first)}", "bold")
    if first.confidence in ("low", "medium", "ambiguous"):
        output.out(f"  confidence: {first.confidence}")
    output.out(f"  fix: {first.fix}")
    for evidence in first.evidence:
        output.out(f"  | {shown(evidence.file)}:{evidence.line}: {evidence.text}")
    if first.source:
        output.out(f"  see {first.source}")
    if len(found) > 1:
        follow = first.id != "unknown" and not any(one.survived for one in found[1:])
        output.out("also found, probably because of that:" if follow else "also found:")
    for diagnosis in found[1:]:
        output.out(f"  {diagnosis.id}: {diagnosis.cause}{who(diagnosis)}")


def show_cause(logs: Path) -> None:
    """Tell the cause of a failed run, if its logs have one; for the end of `dtctl launch`."""
    from dtctl.doctor.explain.diagnose import explain

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
