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
        typer.Argument(
            metavar="SPEC", help=f"The spec whose nodes are cleaned.  [default: {names.SPEC_FILE}]", show_default=False
        ),
    ] = None,
    older: Annotated[
        str, typer.Option(metavar="AGE", help="Only files that are at least this old: 12h, 14d, 8w.")
    ] = "14d",
    larger: Annotated[
        str, typer.Option(metavar="SIZE", help="Only files that are at least this large: 100M, 2G.")
    ] = "0",
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    others: Annotated[
        bool, typer.Option("--others", help="With --yes: also runs that other folders have launched.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Remove old runs of this folder, old runs, code and data on the nodes, and sandboxes that are down.

    Downloaded wheels are removed if no launch has used them for that long. The command first lists what it would
    remove. Runs that other folders have launched on the nodes are listed separately; they are removed only with
    --others, or after a second question. Running runs, and the runs that they continue, are kept.
    """
    from dtctl.launch.clean import CleanRule, plan_removal, remove_items

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
    chosen = _choose_items(plan, yes=yes, others=others, ask=not json_)
    left, failed = remove_items(base_dir, stores, chosen)
    errors = {**plan.errors, **failed}
    if json_:
        items = [_build_item_json(item, plan.foreign, chosen) for item in plan.items]
        output.emit_json({"items": items, "removed": bool(chosen), "left": left})
    elif plan.items:
        _print_removal(plan, chosen)
    for text in left:
        output.print_stderr(f"not removed: {text}", "red")
    for error in errors.values():
        output.print_error_with_hint(error)
    if errors:
        return UNREACHABLE_EXIT
    return LEFT_EXIT if left else 0


def _choose_items(plan: CleanPlan, *, yes: bool, others: bool, ask: bool) -> list[RemovableItem]:
    """Return the items that the user agrees to remove; those of other folders need an agreement of their own."""
    if yes:
        return plan.items if others else plan.own_items
    if not ask:
        return []
    chosen = []
    if plan.own_items and _confirm_removal("remove all of this? [y/N] "):
        chosen += plan.own_items
    if plan.foreign and _confirm_removal("remove what other folders have launched? [y/N] "):
        chosen += plan.foreign
    return chosen


def _print_removal(plan: CleanPlan, chosen: Sequence[RemovableItem]) -> None:
    """Print how much was removed, and the options that remove the rest."""
    own = [item for item in plan.own_items if item not in chosen]
    foreign = [item for item in plan.foreign if item not in chosen]
    words = [f"removed {_format_total_size(chosen)}" if chosen else "nothing was removed"]
    if own:
        words.append(f"`--yes` removes {_format_total_size(own)}")
    if foreign:
        words.append(f"`--yes --others` {'also removes' if own else 'removes'} {_format_total_size(foreign)} of others")
    output.print_stderr("; ".join(words))


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


def _build_item_json(
    item: RemovableItem, foreign: Sequence[RemovableItem], chosen: Sequence[RemovableItem]
) -> dict[str, object]:
    """Return the JSON of an item; `removed` is true if its removal was tried, and `left` names it if that failed."""
    return {
        "node": item.node or None, "kind": item.kind, "name": item.name, "bytes": item.bytes,
        "age_s": round(item.age_s), "has": list(item.has),
        "of_other_folder": item in foreign, "removed": item in chosen,
    }  # fmt: skip


def _print_removal_plan(plan: CleanPlan, rule: CleanRule, older: str, larger: str) -> None:
    """Print what can be removed, or why nothing can. Runs that other folders have launched have their own table."""
    if not plan.items:
        output.print_stderr(_explain_no_removal(plan.below_limits, rule, older, larger))
        return
    if plan.own_items:
        _print_items(plan.own_items)
    if plan.own_items and plan.foreign:
        output.print_stdout("")
    if plan.foreign:
        output.print_stdout(
            "runs that other folders have launched, or that have no record here, and sandboxes with such runs:",
            "yellow",
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


def _confirm_removal(question: str) -> bool:
    """Return whether the user at the terminal agrees."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    output.print_stderr(question)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
