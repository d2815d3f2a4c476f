"""Rule about names that were removed or are deprecated: DT025."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.flow import find_value_origins
from dtctl.lint.model import Edit, Problem
from dtctl.lint.source_file import find_keyword_value, read_constant_value, read_node_position


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyName:
    """Legacy name and its replacement; legacy.yaml documents the fields."""

    instead: str
    since: str = ""
    removed: str = ""
    rename: str = ""
    call: str = ""
    positional: str = ""


@functools.cache
def load_legacy_names() -> dict[str, LegacyName]:
    """Return all legacy names by dotted name."""
    import yaml

    text = resources.files("dtctl.lint").joinpath("legacy.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: dict[str, dict[str, str]] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, either of them
    return {name: LegacyName(**entry) for name, entry in entries.items()}


@functools.cache
def _list_legacy_roots() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in load_legacy_names())


def check_old_names(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT025: name that is gone or going."""
    module = check.module
    if any(
        root in _list_legacy_roots() for root in {qualified.partition(".")[0] for qualified in module.aliases.values()}
    ):
        yield from _check_legacy_imports(check)
        yield from _spelt_out(check)
    for call in module.calls_of(names.DDP):
        value = find_keyword_value(call, "broadcast_buffers")
        if value is not None:
            yield check.problem(
                "DT025", value, "DDP(broadcast_buffers=) is deprecated since torch 2.13",
                severity="info", fix="forward_sync_buffers= from torch 2.13 on",
            )  # fmt: skip
    yield from _check_pretrained_argument(check)
    for call in module.methods.get("TrainingArguments", ()):
        value = find_keyword_value(call, "evaluation_strategy")
        if value is not None:
            yield check.problem(
                "DT025", value, "TrainingArguments(evaluation_strategy=) is not in transformers 4.46 and later",
                severity="warning", fix="eval_strategy=",
            )  # fmt: skip
    for call in module.methods.get("next", ()):
        owner = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else None
        values = [value.node for value in find_value_origins(module, owner)] if owner is not None else []
        if values and all(re.match(r"iter\(.*load", ast.unparse(value)) for value in values):
            yield check.problem(
                "DT025", call, "the iterators of DataLoader have no next() in torch 1.13 and later",
                severity="warning", fix=f"next({ast.unparse(owner)})" if owner is not None else None,
            )  # fmt: skip
    if "LOCAL_RANK" in module.text:
        return
    for call in module.methods.get("add_argument", ()):
        if (
            any(read_constant_value(argument) in ("--local_rank", "--local-rank") for argument in call.args)
            and module.trains
        ):
            yield check.problem(
                "DT025", call, "torchrun passes no --local_rank, torch.distributed.launch --local-rank since 2.0",
                severity="info", fix='read int(os.environ["LOCAL_RANK"])',
            )  # fmt: skip


def _check_pretrained_argument(check: CheckContext) -> Iterator[Problem]:
    """Yield uses of `pretrained=` of torchvision's models."""
    module = check.module
    for call in (one for calls in module.methods.values() for one in calls) if "torchvision" in module.text else ():
        value = find_keyword_value(call, "pretrained")
        callee = call.func
        while isinstance(callee, ast.Subscript | ast.Attribute) and module.name(callee) is None:
            callee = callee.value
        name = module.name(callee) or ""
        if value is not None and name.startswith("torchvision.models"):
            yield check.problem(
                "DT025", value, "`pretrained=` of torchvision's models is deprecated since torchvision 0.13",
                severity="info", fix='weights="DEFAULT"',
            )  # fmt: skip


def _describe_legacy_name(name: str, entry: LegacyName) -> tuple[str, str]:
    if entry.removed:
        version = entry.removed if " " in entry.removed else f"torch {entry.removed}"
        return f"{name} is not in {version} and later", f"use {entry.instead}"
    if name.startswith(("fairscale", "apex")):
        return f"{name} is no longer maintained", f"use {entry.instead}"
    return f"{name} is deprecated since torch {entry.since}", f"use {entry.instead}"


def _in_try(check: CheckContext, node: ast.AST) -> bool:
    """Return whether a name may be missing without harm, since the program has an alternative."""
    above = check.module.find_enclosing_node(node, (ast.Try,))
    while isinstance(above, ast.Try):
        for handler in above.handlers:
            caught = ast.unparse(handler.type) if handler.type is not None else "Exception"
            if re.search(r"Import|Module|Attribute|\bException\b", caught) and not isinstance(
                handler.body[-1], ast.Raise
            ):
                return True
        above = check.module.find_enclosing_node(above, (ast.Try,))
    return False


def _check_legacy_imports(check: CheckContext) -> Iterator[Problem]:
    """Yield imports of legacy names."""
    module = check.module
    statements: list[ast.Import | ast.ImportFrom] = [*module.nodes_of(ast.Import), *module.nodes_of(ast.ImportFrom)]
    for node in statements:
        if _in_try(check, node) or (isinstance(node, ast.ImportFrom) and node.level):
            continue
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = base + alias.name
            entry = load_legacy_names().get(name) or load_legacy_names().get(base.rstrip("."))
            if entry is None or alias.name == "*":
                continue
            old_name = name if name in load_legacy_names() else base.rstrip(".")
            message, fix = _describe_legacy_name(old_name, entry)
            yield check.problem(
                "DT025", alias, message, severity="warning" if entry.removed else "info", fix=fix,
                edits=_renamed_import(check, node),
            )  # fmt: skip


def _renamed_import(check: CheckContext, node: ast.Import | ast.ImportFrom) -> tuple[Edit, ...]:
    """Return edits for `from OLD import a, b`, if all names move to the same module and their calls can be changed.

    All names of the statement share the edits, so that either all of them are made or none.
    """
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return ()
    moved = [load_legacy_names().get(f"{node.module}.{imported_name.name}") for imported_name in node.names]
    targets = {imported_name.rename.rpartition(".")[0] for imported_name in moved if imported_name is not None}
    if len(targets) != 1 or not all(targets):
        return ()
    start = (node.lineno, node.col_offset + len("from "))
    end = (start[0], start[1] + len(node.module))
    if check.module.lines[start[0] - 1].encode()[start[1] : end[1]] != node.module.encode():
        return ()
    edits = [Edit(start, end, targets.pop())]
    for alias, entry in zip(node.names, moved, strict=True):
        if entry is None or not entry.rename.endswith(f".{alias.name}"):
            return ()
        call_edits = _calls_changed(check, alias.asname or alias.name, entry) if entry.call else []
        if call_edits is None:
            return ()
        edits += call_edits
    return tuple(edits)


def _calls_changed(check: CheckContext, name: str, entry: LegacyName) -> list[Edit] | None:
    """Return the edits of all calls of an imported name; None if one cannot be changed, or for other uses."""
    calls = [candidate for candidate in check.module.methods.get(name, ()) if isinstance(candidate.func, ast.Name)]
    callees = {id(call.func) for call in calls}
    uses = [part for part in ast.walk(check.module.tree) if isinstance(part, ast.Name) and part.id == name]
    if any(id(candidate) not in callees for candidate in uses):
        return None
    edits: list[Edit] = []
    for call in calls:
        change = _call_changed(check, call, entry)
        if change is None:
            return None
        edits += change
    return edits


def _call_changed(check: CheckContext, call: ast.Call, entry: LegacyName) -> list[Edit] | None:
    """Return edits that add a first argument to a call, and names to arguments whose position changes."""
    func, lines = call.func, check.module.lines
    if func.end_lineno is None or func.end_col_offset is None:
        return None
    if lines[func.end_lineno - 1].encode()[func.end_col_offset : func.end_col_offset + 1] != b"(":
        return None
    edits = []
    if entry.positional:
        order = entry.positional.split()
        if len(call.args) > len(order) or any(isinstance(passed, ast.Starred) for passed in call.args):
            return None
        for name, argument in zip(order, call.args, strict=False):
            begin = read_node_position(argument)
            line = lines[begin[0] - 1].encode()[: begin[1]].rstrip()
            if line.endswith(b"(") and begin != (func.end_lineno, func.end_col_offset + 1):
                return None  # the argument is in brackets of its own
            if begin != (func.end_lineno, func.end_col_offset + 1):
                edits.append(Edit(begin, begin, f"{name}="))
    at = (func.end_lineno, func.end_col_offset + 1)
    rest = ", " if call.args or call.keywords else ""
    first = (
        entry.positional.split()[0] + "="
        if entry.positional and call.args and read_node_position(call.args[0]) == at
        else ""
    )
    return [Edit(at, at, entry.call + rest + first), *edits]


def _spelt_out(check: CheckContext) -> Iterator[Problem]:
    """Yield uses of legacy names in the code, such as `torch.cuda.amp.autocast`."""
    module = check.module
    for node in module.nodes_of(ast.Attribute):
        if node.attr not in _last_parts():
            continue
        above = module.parents.get(node)
        name = module.name(node)
        if isinstance(above, ast.Attribute) and (module.name(above) or "") in load_legacy_names():
            continue
        entry = load_legacy_names().get(name or "")
        if entry is None or name is None or _in_try(check, node):
            continue
        message, fix = _describe_legacy_name(name, entry)
        edits: list[Edit] = []
        if entry.rename and ast.unparse(node) == name and node.end_lineno and node.end_col_offset:
            edits = [Edit(read_node_position(node), (node.end_lineno, node.end_col_offset), entry.rename)]
            above = module.parents.get(node)
            if entry.call:
                changed = (
                    _call_changed(check, above, entry) if isinstance(above, ast.Call) and above.func is node else None
                )
                edits = edits + changed if changed is not None else []
        yield check.problem(
            "DT025", node, message, severity="warning" if entry.removed else "info", fix=fix, edits=tuple(edits)
        )


@functools.cache
def _last_parts() -> frozenset[str]:
    return frozenset(name.rpartition(".")[2] for name in load_legacy_names())


CHECKS = (check_old_names,)
