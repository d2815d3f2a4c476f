"""`dtctl clean`: remove old runs, code, data and sandboxes, after showing them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import UsageError

if TYPE_CHECKING:
    from dtctl.launch.clean import CleanRule, Item, NodeStores

SPANS = {"": 86400, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604_800}
SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def clean(
    spec: Annotated[
        Path | None,
        typer.Argument(help=f"The spec whose nodes are cleaned.  [default: {names.SPEC_FILE}]", show_default=False),
    ] = None,
    older: Annotated[str, typer.Option(metavar="AGE", help="Only what is at least this old: 12h, 14d, 8w.")] = "14d",
    larger: Annotated[str, typer.Option(metavar="SIZE", help="Only what is at least this large: 100M, 2G.")] = "0",
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without a question.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Remove old runs of this folder, old runs, code and data on the nodes, and sandboxes that are down.

    Shows them first. What runs, and what such a run continues from, stays.
    """
    from dtctl.launch.clean import HERE, CleanRule, items_here, needed_runs, remove_here, runs_elsewhere

    rule = CleanRule(older_s=_number(older, SPANS, "--older"), larger_bytes=int(_number(larger, SIZES, "--larger")))
    here = Path.cwd()
    stores = _stores(spec)
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
        output.err(f"{count}: with files on nodes that the spec does not name, or that do not answer")
    if not json_ and items:
        _show(items)
    elif not json_:
        output.err(_nothing([item for item in every if item.name not in far], rule, older, larger))
    agreed = bool(items) and (yes or (not json_ and _asked()))
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
        output.emit_json({"items": [_row(item) for item in items], "removed": agreed, "left": left})
    elif items:
        total = output.size(sum(item.bytes for item in items))
        output.err(f"removed {total}" if agreed else f"nothing was removed; `--yes` removes {total}")
    for text in left:
        output.err(f"not removed: {text}", "red")
    for error in errors.values():
        output.error(error)
    return 6 if errors else 7 if left else 0


def _stores(spec: Path | None) -> NodeStores | None:
    """Return the nodes of the spec, if there is a spec and its nodes keep anything."""
    from dtctl.launch.clean import NodeStores
    from dtctl.launch.cluster import cluster_of
    from dtctl.spec.load import load_spec

    if spec is None and not Path(names.SPEC_FILE).exists():
        return None
    loaded = load_spec(spec or Path(names.SPEC_FILE), ())
    if loaded.cluster.transport == "slurm":
        return None
    cluster = cluster_of(loaded, start=False)
    return NodeStores(cluster) if cluster.targets else None


def _number(text: str, units: dict[str, int], option: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]?)(?:i?B)?", text.strip())
    if not match or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise UsageError(f"{text!r} cannot be read", where=option, hint=f"a number and one of {known}")
    return float(match[1]) * units[match[2]]


def _row(item: Item) -> dict[str, object]:
    return {
        "node": item.node or None, "kind": item.kind, "name": item.name, "bytes": item.bytes,
        "age_s": round(item.age_s), "has": list(item.has),
    }  # fmt: skip


def _nothing(every: list[Item], rule: CleanRule, older: str, larger: str) -> str:
    """Return why nothing is removed."""
    rest = [item for item in every if not rule.covers(item)]
    if not rest:
        return "there is nothing to remove"
    limits = f"{older} old" + (f" and {larger} large" if rule.larger_bytes else "")
    shown = "--older 0d" + (" --larger 0" if rule.larger_bytes else "")
    total = output.size(sum(item.bytes for item in rest))
    return f"nothing that may go is at least {limits}; `dtctl clean {shown}` shows the rest ({total})"


def _show(items: list[Item]) -> None:
    rows = [
        [item.node or "here", item.kind, item.name, _age(item.age_s), output.size(item.bytes), ", ".join(item.has)]
        for item in items
    ]
    output.table(rows, header=["WHERE", "KIND", "NAME", "AGE", "SIZE", "HAS"])


def _age(seconds: float) -> str:
    return f"{seconds / 86400:.0f} d" if seconds >= 86400 else f"{seconds / 3600:.1f} h"


def _asked() -> bool:
    """Return whether the user at the terminal agrees."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    output.err("remove all of this? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
