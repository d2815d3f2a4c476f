"""`dtctl render`: the job of a spec as a file for another system."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.files import write_named

TARGETS = ("kubernetes",)


def render(
    spec: Annotated[Path, typer.Argument(help="The spec; - is standard input.")] = Path(names.SPEC_FILE),
    target: Annotated[str, typer.Option(help="For whom: kubernetes gives a JobSet.")] = "kubernetes",
    out: Annotated[
        Path | None, typer.Option(help="Write the file here.  [default: print it]", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="RUN", help="Name of the run.  [default: a new one]", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the spec.")
    ] = None,
) -> None:
    """Write the job as a file for Kubernetes.

    The nodes of the spec are only counted: one pod each. The code comes from the image, or from a volume.
    """
    from dtctl.errors import UsageError
    from dtctl.kubernetes import jobset
    from dtctl.launch.records.record import check_run_name, new_run_id
    from dtctl.plan.build import PlanFacts, build
    from dtctl.spec.load import load_spec
    from dtctl.spec.nodes import resolve_nodes

    if target not in TARGETS:
        raise UsageError(
            f"there is no target {target}",
            hint="there is kubernetes; for Slurm there is `dtctl sbatch`, for scripts `dtctl launch --dry-run --out`",
        )
    checked = load_spec(spec, set_ or ())
    if name is not None:
        check_run_name(name)
    run = name or new_run_id(checked.job.name, now=time.time())
    # The address is one of a pod, which nobody knows yet.
    plan = build(checked, resolve_nodes(checked), run=run, facts=PlanFacts(environ=os.environ, address="pod-0"))
    text = jobset.text(checked, plan)
    if out is None:
        output.raw(text)
        return
    write_named(out, text, option="--out", private=True)
    output.err(f"wrote {out}; start it with: kubectl apply --filename {out}")
