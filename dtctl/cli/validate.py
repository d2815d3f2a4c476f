"""`dtctl validate`: check a spec and show its meaning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.agreement import Settings
from dtctl.errors import DtctlError
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.plan.model import Plan
    from dtctl.spec.model import Spec

NOT_EXAMINED = (
    "the nodes (`dtctl doctor`)",
    "what the program does (`dtctl lint`)",
    "whether model and batch fit into memory (`dtctl advise`)",
    "the contents of data",
)
"""Faults of a launch that a correct spec does not exclude."""


def validate(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The spec.")] = Path(names.SPEC_FILE),
    set_: Settings = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the spec.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Check a spec without touching any node; all problems of the spec itself are listed."""
    if schema:
        from dtctl.spec.schema import build_json_schema

        output.emit_json(build_json_schema())
        return
    try:
        plan, estimate, environment = _plan_checked_spec(spec, set_ or ())
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
    nodes, workers = format_count(len(plan.nodes), "node"), format_count(plan.world_size, "worker")
    output.print_stdout(
        f"{spec} can be planned: {plan.job}, {plan.kind} over {plan.transport}, {nodes}, {workers}", "green"
    )
    if environment:
        output.print_stdout(f"environment: {environment}")
    for note in plan.notes:
        output.print_stdout(f"note: {note}", "cyan")
    if estimate is not None:
        parts = ", ".join(f"{part} {estimate[f'{part}_gib']}" for part in ("states", "activations", "overhead"))
        output.print_stdout(f"estimate: {estimate['total_gib']} GiB of each GPU for {estimate['layout']} ({parts})")
    open_questions = NOT_EXAMINED if estimate is None else NOT_EXAMINED[:-1]
    output.print_stdout(f"not examined: {', '.join(open_questions)}", "dim")


def _plan_checked_spec(spec: Path, changes: Sequence[str]) -> tuple[Plan, dict[str, Any] | None, str]:
    """Return the plan of a launch without contacting a node, its memory if known, and the nodes' environment."""
    from dtctl.launch.cluster import build_first_plan, resolve_cluster
    from dtctl.launch.files.tree import scan_pushed_files
    from dtctl.spec.load import load_spec

    checked = load_spec(spec, changes)
    code = scan_pushed_files(checked)
    plan = build_first_plan(checked, resolve_cluster(checked, start=False), run="validate")
    if checked.job.data:
        from dtctl.launch.files.data import check_places, find_data

        check_places(find_data(checked, is_check=True), code)
    environment = ""
    if checked.job.environment is not None:
        from dtctl.launch.files.environment import describe_environment

        environment = describe_environment(checked)
    return plan, _build_estimate_json(checked), environment


def _build_estimate_json(spec: Spec) -> dict[str, Any] | None:
    """Return the memory of a GPU in GiB by the formulas of `dtctl advise`; None if the spec lacks a value for them."""
    if not spec.settings.get("model"):
        return None
    from dtctl.advise.advice import describe_layout
    from dtctl.advise.gather import estimate_spec_memory
    from dtctl.errors import UsageError
    from dtctl.estimate.memory import GIB

    try:
        estimated = estimate_spec_memory(spec)
    except UsageError:  # the formulas need a `train.model` that dtctl can read
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
    return {"layout": describe_layout(layout)} | {name: round(size / GIB, 2) for name, size in sizes.items()}
