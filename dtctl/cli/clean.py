"""`dtctl clean`: list old runs, code, data, wheels and sandboxes, and remove them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import UsageError
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.launch.clean import CleanPlan, CleanRule, NodeStores, RemovableItem

SPANS = {"": 86400, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604_800}
SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
UNREACHABLE_EXIT = 6
"""Exit code if a node could not list or remove its files."""
LEFT_EXIT = 7
"""Exit code if files could not be removed."""


def clean(
    spec: Annotated[
        Path | None,
        typer.Argument(help=f"The spec whose nodes are cleaned.  [default: {names.SPEC_FILE}]", show_default=False),
    ] = None,
    older: Annotated[
        str, typer.Option(metavar="AGE", help="Only files that are at least this old: 12h, 14d, 8w.")
    ] = "14d",
    larger: Annotated[
        str, typer.Option(metavar="SIZE", help="Only files that are at least this large: 100M, 2G.")
    ] = "0",
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Remove old runs of this folder, old runs, code and data on the nodes, and sandboxes that are down.

    Downloaded wheels are removed if no launch has used them for that long. The command first lists what it would
    remove; runs that other folders have launched on the nodes are listed separately. Running runs, and the runs that
    they continue, are kept.
    """
    from dtctl.launch.clean import CleanRule, plan_removal, remove_planned_items

    rule = CleanRule(
        older_s=_parse_quantity(older, SPANS, "--older"), larger_bytes=int(_parse_quantity(larger, SIZES, "--larger"))
    )
    base_dir = Path.cwd()
    stores = _build_node_stores(spec)
    plan = plan_removal(base_dir, stores, rule)
    if plan.unreachable_runs:
        count = format_count(plan.unreachable_runs, "run stays", "runs stay")
        output.print_stderr(f"{count}: with files on nodes that the spec does not name, or that do not answer")
    if not json_:
        _print_removal_plan(plan, rule, older, larger)
    agreed = bool(plan.items) and (yes or (not json_ and _confirm_removal()))
    left, errors = remove_planned_items(base_dir, stores, plan) if agreed else ([], plan.errors)
    if json_:
        items = [_build_item_json(item, plan.foreign) for item in plan.items]
        output.emit_json({"items": items, "removed": agreed, "left": left})
    elif plan.items:
        total = _format_total_size(plan.items)
        output.print_stderr(f"removed {total}" if agreed else f"nothing was removed; `--yes` removes {total}")
    for text in left:
        output.print_stderr(f"not removed: {text}", "red")
    for error in errors.values():
        output.print_error_with_hint(error)
    if errors:
        return UNREACHABLE_EXIT
    return LEFT_EXIT if left else 0


def _build_node_stores(spec: Path | None) -> NodeStores | None:
    """Return the stores on the nodes of the spec; None without a spec, or if its nodes keep nothing."""
    from dtctl.launch.clean import NodeStores
    from dtctl.launch.cluster import resolve_cluster
    from dtctl.spec.load import load_spec

    if spec is None and not Path(names.SPEC_FILE).exists():
        return None
    loaded = load_spec(spec or Path(names.SPEC_FILE), ())
    if loaded.cluster.transport == "slurm":
        from dtctl.slurm.submit import locate_stores

        return NodeStores(locate_stores(loaded)) if loaded.job.environment is not None else None
    cluster = resolve_cluster(loaded, start=False)
    return NodeStores(cluster) if cluster.targets else None


def _parse_quantity(text: str, units: dict[str, int], option: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]?)(?:i?B)?", text.strip())
    if not match or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise UsageError(f"{text!r} cannot be read", where=option, hint=f"a number and one of {known}")
    return float(match[1]) * units[match[2]]


def _build_item_json(item: RemovableItem, foreign: Sequence[RemovableItem]) -> dict[str, object]:
    return {
        "node": item.node or None, "kind": item.kind, "name": item.name, "bytes": item.bytes,
        "age_s": round(item.age_s), "has": list(item.has),
        "of_other_folder": item in foreign,
    }  # fmt: skip


def _print_removal_plan(plan: CleanPlan, rule: CleanRule, older: str, larger: str) -> None:
    """Print what can be removed, or why nothing can. Runs that other folders have launched have their own table."""
    if not plan.items:
        output.print_stderr(_explain_no_removal(plan.below_limits, rule, older, larger))
        return
    own = [item for item in plan.items if item not in plan.foreign]
    if own:
        _print_items(own)
    if own and plan.foreign:
        output.print_stdout("")
    if plan.foreign:
        output.print_stdout(
            "runs on these nodes that other folders have launched, or that have no record here:", "yellow"
        )
        _print_items(plan.foreign)


def _explain_no_removal(below_limits: Sequence[RemovableItem], rule: CleanRule, older: str, larger: str) -> str:
    """Return the reason why nothing is removed."""
    if not below_limits:
        return "there is nothing to remove"
    limits, arguments = f"{older} old", "--older 0d"
    if rule.larger_bytes:
        limits += f" and {larger} large"
        arguments += " --larger 0"
    total = _format_total_size(below_limits)
    return f"no removable file or folder is at least {limits}; `dtctl clean {arguments}` shows the rest ({total})"


def _format_total_size(items: Sequence[RemovableItem]) -> str:
    return output.format_size(sum(item.bytes for item in items))


def _print_items(items: Sequence[RemovableItem]) -> None:
    rows = [
        [
            item.node or "here",
            item.kind,
            item.name,
            _format_item_age(item.age_s),
            output.format_size(item.bytes),
            ", ".join(item.has),
        ]
        for item in items
    ]
    output.print_table(rows, header=["WHERE", "KIND", "NAME", "AGE", "SIZE", "HAS"])


def _format_item_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 60:.0f} min"


def _confirm_removal() -> bool:
    """Return whether the user at the terminal agrees."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    output.print_stderr("remove all of this? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
