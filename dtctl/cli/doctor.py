"""`dtctl doctor`: check if a cluster can train, and explain why a job failed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.agreement import Settings, Yes, require_spec_agreement
from dtctl.errors import UsageError

Log = Annotated[
    list[Path] | None,
    typer.Option("--log", metavar="PATH", help="Explain this log, or all logs in this folder; needs no cluster."),
]
Paths = Annotated[
    list[Path] | None,
    typer.Argument(metavar="SPEC", help="The spec; with --log, more logs.  [default: dtctl.yaml]", show_default=False),
]


def doctor(
    paths: Paths = None,
    log: Log = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Quick checks only: fewer ports per pair, no measurements, no torch."),
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER", help="Skip links (bandwidth, loss) or collective (sums over all nodes)."),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Measure each GPU, its copies and NCCL, and compare with its usual values."),
    ] = False,
    set_: Settings = None,
    yes: Yes = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Find the faulty node or pair of a cluster, the cause and the fix; or explain the logs of a failed job."""
    if log:
        if set_:
            raise UsageError("logs are explained without a spec", where="--set", hint="leave out --set or --log")
        return explain_logs([*log, *(paths or ())], json_lines=json_)
    if paths and len(paths) > 1:
        raise UsageError("there is more than one spec", hint="name logs after --log")
    path = paths[0] if paths else Path(names.SPEC_FILE)
    return examine_cluster(
        path,
        overrides=tuple(set_ or ()),
        skip=("links", "collective") if quick else tuple(skip or ()),
        gpu=gpu,
        yes=yes,
        json_lines=json_,
    )


def examine_cluster(
    path: Path, *, overrides: Sequence[str], skip: Sequence[str], gpu: bool, yes: bool, json_lines: bool
) -> int:
    """Examine the cluster of a spec with these values overridden and print the findings; return the exit code."""
    from dtctl.cli.common import doctor_view
    from dtctl.doctor.examine import COSTLY, examine_spec_nodes
    from dtctl.doctor.tables import list_link_measurements
    from dtctl.errors import DoctorFailed, Interrupted
    from dtctl.launch.cluster import resolve_cluster
    from dtctl.spec.load import load_spec

    for layer in set(skip) - {*COSTLY}:
        raise UsageError(f"there is no layer {layer!r} to skip", where="--skip", hint=" or ".join(COSTLY))
    spec = load_spec(path, overrides)
    require_spec_agreement(spec, yes=yes)
    if spec.cluster.transport == "slurm":
        if "SLURM_JOB_ID" not in os.environ:
            from dtctl.cli.common.doctor_slurm import examine_offer

            return examine_offer(spec, json_lines=json_lines)
        from dtctl.slurm.allocation import build_allocation_cluster

        cluster = build_allocation_cluster(spec, os.environ)
    else:
        cluster = resolve_cluster(spec, start=True)
    begun = time.monotonic()
    try:
        examination = examine_spec_nodes(
            spec,
            cluster,
            skip=[layer for layer in COSTLY if layer in skip],
            gpu=gpu,
            progress=lambda text: output.print_stderr(f"{text} ...", "dim"),
        )
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped before the examination was complete; these nodes have no result",
            signal=signal.SIGINT,
            hint="its processes on the nodes end when their connections close",
        ) from None
    took_s = round(time.monotonic() - begun, 2)
    if json_lines:
        findings = [finding.as_json() for finding in examination.findings]
        output.emit_json(
            {
                "ok": examination.ok,
                "can_train": examination.can_train,
                "nodes": [node.name for node in examination.seen],
                "took_s": took_s,
                "findings": findings,
                "not_examined": list(examination.not_examined),
                "links": list_link_measurements(examination.seen),
                "all_reduce": examination.sums or None,
                "gpus": list(examination.gpus),
            }
        )
    else:
        doctor_view.show_examination(examination, took_s)
    return 0 if examination.ok else DoctorFailed.exit_code


def explain_logs(paths: Sequence[Path], *, json_lines: bool) -> int:
    """Print the findings in the logs; return the exit code."""
    from dtctl.cli.common import doctor_view
    from dtctl.doctor.explain.diagnose import explain_all
    from dtctl.doctor.explain.lines import render_terminal_line
    from dtctl.errors import DoctorFailed

    explained = explain_all(paths)
    for path in explained.unread:
        output.print_stderr(f"warning: {render_terminal_line(path.file)}: {path.why}", "yellow")
    if json_lines:
        output.emit_json(
            {
                "verdict": explained.verdict,
                "diagnoses": [diagnosis.as_json() for diagnosis in explained.diagnoses],
                "unread": [{"file": path.file, "why": path.why} for path in explained.unread],
            }
        )
    else:
        doctor_view.show_explanation(explained)
    return 0 if explained.verdict == "no-failure" else DoctorFailed.exit_code
