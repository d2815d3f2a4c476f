"""`dtctl render`: write the job of a spec as a file for another system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.agreement import Settings
from dtctl.cli.common.batch_job_view import tell_unmeasured
from dtctl.cli.common.files import write_named

if TYPE_CHECKING:
    from dtctl.spec.model import Spec

TARGETS = ("kubernetes",)


def render(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The spec; - is standard input.")] = Path(
        names.SPEC_FILE
    ),
    target: Annotated[
        str, typer.Option(metavar="KIND", help="Kind of output: kubernetes writes a JobSet.")
    ] = "kubernetes",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the file here.  [default: print it]", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Name of the run.  [default: by the spec's content]", show_default=False),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Hand it over to `kubectl apply`.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Hand it over to `kubectl delete`.")] = False,
    logs: Annotated[bool, typer.Option("--logs", help="Follow the output of its pods with `kubectl logs`.")] = False,
    set_: Settings = None,
) -> None:
    """Write the job as a file for Kubernetes, or hand it over to kubectl.

    The nodes of the spec are only counted: one pod each. The code comes from the image, or from a volume. The same spec
    gives the same file.
    """
    from dtctl.errors import UsageError
    from dtctl.kubernetes import jobset
    from dtctl.launch.cluster import read_job_source
    from dtctl.launch.records.record import check_run_name
    from dtctl.plan.build import PlanFacts, build
    from dtctl.spec.load import load_spec
    from dtctl.spec.nodes import resolve_nodes

    if target not in TARGETS:
        raise UsageError(
            f"there is no target {target}",
            hint="there is kubernetes; for Slurm there is `dtctl sbatch`, for scripts `dtctl launch --dry-run --out`",
        )
    if apply + delete + logs > 1 or (out is not None and (apply or delete or logs)):
        raise UsageError("only one of --out, --apply, --delete and --logs may be given")
    checked = load_spec(spec, set_ or ())
    tell_unmeasured(checked)
    if name is not None:
        check_run_name(name)
    run = name or jobset.compute_stable_run_id(checked)
    nodes, settings = resolve_nodes(checked), checked.kubernetes
    has_devices = settings is None or settings.gpu or any("/" in resource for resource in settings.resources)
    gpus = {} if has_devices else {node.name: 0 for node in nodes}
    # The address is that of a pod, which is not known yet.
    facts = PlanFacts(environ=os.environ, address="pod-0", source=read_job_source(checked), gpus=gpus)
    plan = build(checked, nodes, run=run, facts=facts)
    text = jobset.render_jobset_file(checked, plan)
    if apply or delete or logs:
        _run_kubectl_action(checked, text, apply=apply, delete=delete)
        return
    if out is None:
        output.print_raw_text(text)
        return
    write_named(out, text, option="--out", private=True)
    output.print_stderr(f"wrote {out}; start it with: kubectl apply --filename {out}")


def _run_kubectl_action(spec: Spec, text: str, *, apply: bool, delete: bool) -> None:
    """Pass the objects, or their names, to kubectl."""
    import yaml

    from dtctl.kubernetes import kubectl
    from dtctl.launch import trust

    if apply or delete:
        if apply:
            for item in trust.list_sent_items(spec):
                output.print_stderr(item, "yellow")
        kubectl.run_kubectl(kubectl.apply_argv() if apply else kubectl.delete_argv(), stdin=text)
    else:
        kubectl.run_kubectl(kubectl.build_logs_argv(yaml.safe_load(text)))
