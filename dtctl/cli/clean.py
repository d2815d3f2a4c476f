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

if TYPE_CHECKING:
    from dtctl.launch.clean import CleanRule, NodeStores, RemovableItem

SPANS = {"": 86400, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604_800}
SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


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
    from dtctl.launch.clean import HERE, CleanRule, items_here, needed_runs, remove_here, runs_elsewhere
    from dtctl.launch.records.record import list_run_records

    rule = CleanRule(
        older_s=_parse_quantity(older, SPANS, "--older"), larger_bytes=int(_parse_quantity(larger, SIZES, "--larger"))
    )
    here = Path.cwd()
    stores = _build_node_stores(spec)
    on_nodes, errors = stores.items() if stores is not None else ([], {})
    every = [*items_here(here), *on_nodes]
    items = [item for item in every if rule.covers(item)]
    needed = needed_runs(here, (item.name for item in items if item.kind == "run" and item.node == HERE))
    asked = stores.names - errors.keys() if stores is not None else set()
    far = runs_elsewhere(here, asked)
    elsewhere = far & {item.name for item in items if item.node == HERE} - needed
    items = [item for item in items if item.kind != "run" or item.name not in needed | elsewhere]
    if elsewhere:
        count = f"{len(elsewhere)} run{'s stay' if len(elsewhere) > 1 else ' stays'}"
        output.print_stderr(f"{count}: with files on nodes that the spec does not name, or that do not answer")
    launched = {record.run for record in list_run_records(here)}
    foreign = [item for item in items if item.kind == "run" and item.node != HERE and item.name not in launched]
    if not json_ and items:
        _print_item_table([item for item in items if item not in foreign], foreign)
    elif not json_:
        output.print_stderr(_explain_no_removal([item for item in every if item.name not in far], rule, older, larger))
    agreed = bool(items) and (yes or (not json_ and _confirm_removal()))
    left: list[str] = []
    if agreed:
        left += remove_here(here, [item for item in items if item.node == HERE])
        answers = stores.remove([item for item in items if item.node != HERE]) if stores is not None else {}
        for node, answer in answers.items():
            if isinstance(answer, list):
                left += [f"{node}: {name}" for name in answer]
            else:
                errors[node] = answer
    if json_:
        output.emit_json(
            {"items": [_build_item_json(item, foreign) for item in items], "removed": agreed, "left": left}
        )
    elif items:
        total = output.format_size(sum(item.bytes for item in items))
        output.print_stderr(f"removed {total}" if agreed else f"nothing was removed; `--yes` removes {total}")
    for text in left:
        output.print_stderr(f"not removed: {text}", "red")
    for error in errors.values():
        output.print_error_with_hint(error)
    return 6 if errors else 7 if left else 0


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


def _explain_no_removal(every: list[RemovableItem], rule: CleanRule, older: str, larger: str) -> str:
    """Return the reason why nothing is removed."""
    rest = [item for item in every if not rule.covers(item)]
    if not rest:
        return "there is nothing to remove"
    limits = f"{older} old" + (f" and {larger} large" if rule.larger_bytes else "")
    shown = "--older 0d" + (" --larger 0" if rule.larger_bytes else "")
    total = output.format_size(sum(item.bytes for item in rest))
    return f"no removable file or folder is at least {limits}; `dtctl clean {shown}` shows the rest ({total})"


def _print_item_table(items: Sequence[RemovableItem], foreign: Sequence[RemovableItem]) -> None:
    """Print what can be removed, with a separate table for runs on the nodes that other folders have launched."""
    if items:
        _print_items(items)
    if items and foreign:
        output.print_stdout("")
    if foreign:
        output.print_stdout(
            "runs on these nodes that other folders have launched, or that have no record here:", "yellow"
        )
        _print_items(foreign)


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
