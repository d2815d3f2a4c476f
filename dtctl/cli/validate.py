"""`dtctl validate`: is the spec right, and what does it mean?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import DtctlError

if TYPE_CHECKING:
    from dtctl.plan.model import Plan
    from dtctl.spec.model import Spec

NOT_EXAMINED = (
    "the nodes (`dtctl doctor`)",
    "what the program does (`dtctl lint`)",
    "whether model and batch fit into memory (`dtctl advise`)",
    "data",
)
"""Faults that a launch can have although the spec is right."""


def validate(
    spec: Annotated[Path, typer.Argument(help="The spec.")] = Path(names.SPEC_FILE),
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the spec.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the spec.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Check a spec without touching any node; all problems of the spec itself are listed."""
    if schema:
        from dtctl.spec.schema import json_schema

        output.emit_json(json_schema())
        return
    try:
        plan, estimate, environment = _planned(spec, set_ or ())
    except DtctlError as exc:
        if json_:
            facts = {"message": exc.message, "where": exc.where, "hint": exc.hint, "exit_code": exc.exit_code}
            output.emit_json({"ok": False, "spec": str(spec), "error": facts})
        raise
    if json_:
        output.emit_json(
            {
                "ok": True,
                "spec": str(spec),
                "nodes": [node.name for node in plan.nodes],
                "world_size": plan.world_size,
                "estimate": estimate,
                "environment": environment or None,
                "not_examined": list(NOT_EXAMINED),
            }
        )
        return
    nodes = "1 node" if len(plan.nodes) == 1 else f"{len(plan.nodes)} nodes"
    workers = "1 worker" if plan.world_size == 1 else f"{plan.world_size} workers"
    output.out(f"{spec} can be planned: {plan.job}, {plan.kind} over {plan.transport}, {nodes}, {workers}", "green")
    if environment:
        output.out(f"environment: {environment}")
    for note in plan.notes:
        output.out(f"note: {note}", "cyan", fold=True)
    if estimate is not None:
        parts = ", ".join(f"{part} {estimate[f'{part}_gib']}" for part in ("states", "activations", "overhead"))
        output.out(f"estimate: {estimate['total_gib']} GiB of each GPU for {estimate['layout']} ({parts})")
    open_questions = NOT_EXAMINED if estimate is None else NOT_EXAMINED[:-1]
    output.out(f"not examined: {', '.join(open_questions)}", "dim")


def _planned(spec: Path, changes: Sequence[str]) -> tuple[Plan, dict[str, Any] | None, str]:
    """Return the first plan of a launch, as far as no node is asked; its memory, if known; what nodes would install."""
    from dtctl.launch.cluster import cluster_of, first_plan
    from dtctl.launch.files.tree import check_program_files, scan
    from dtctl.spec.load import load_spec

    checked = load_spec(spec, changes)
    root = checked.base_dir / checked.job.files.root
    check_program_files(checked, scan(root, include=checked.job.files.include, exclude=checked.job.files.exclude))
    plan = first_plan(checked, cluster_of(checked, start=False), run="validate")
    environment = ""
    if checked.job.environment is not None:
        from dtctl.launch.files.environment import describe_environment

        environment = describe_environment(checked)
    return plan, _estimate(checked), environment


def _estimate(spec: Spec) -> dict[str, Any] | None:
    """Memory of a GPU by the formulas of `dtctl advise`, in GiB; None where the spec leaves open what it depends on."""
    if not spec.settings.get("model"):
        return None
    from dtctl.advise.advice import described
    from dtctl.advise.gather import estimate
    from dtctl.errors import UsageError
    from dtctl.estimate.memory import GIB

    try:
        estimated = estimate(spec)
    except UsageError:  # a `train.model` of the program's own, which the formulas cannot use
        return None
    if estimated is None:
        return None
    layout, need = estimated
    sizes = {
        "total_gib": need.total,
        "states_gib": need.states,
        "activations_gib": need.activations + need.logits + need.temporary,
        "overhead_gib": need.overhead,
        "host_gib": need.host,
    }
    return {"layout": described(layout)} | {name: round(size / GIB, 2) for name, size in sizes.items()}
