"""Rules about how data is divided: DT003, DT004, DT027, DT028."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.checks import Check
from dtctl.lint.model import Edit, Problem
from dtctl.lint.module import constant, key
from dtctl.lint.wraps import wraps

_HELD_OUT = re.compile(r"val|test|eval|dev_|infer|predict", re.IGNORECASE)
_STREAM = re.compile(r"iterable|stream|webdataset|wds\.|infinite", re.IGNORECASE)


def _args(call: ast.Call, *order: str) -> dict[str, ast.expr]:
    """Arguments by name, positional ones too."""
    found = dict(zip(order, call.args, strict=False))
    return found | {one.arg: one.value for one in call.keywords if one.arg}


def _loader(call: ast.Call) -> dict[str, ast.expr]:
    return _args(call, "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")


def _open_ended(call: ast.Call) -> bool:
    """Whether more arguments are passed than can be read: *args, **kwargs."""
    return any(one.arg is None for one in call.keywords) or any(isinstance(one, ast.Starred) for one in call.args)


def undivided(check: Check) -> Iterator[Problem]:
    """DT003."""
    module = check.module
    if not wraps(module) or check.project.framework(module):
        return
    for call in module.called(names.LOADER):
        given = _loader(call)
        if _open_ended(call) or "sampler" in given or "batch_sampler" in given or "dataset" not in given:
            continue
        statement = module.statement(call)
        target = key(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
        dataset = " ".join(ast.unparse(one) for one in module.values(given["dataset"]))
        about = f"{target} {key(given['dataset']) or ''}"
        function = getattr(module.scope(call), "name", "")
        if _HELD_OUT.search(about) or _HELD_OUT.search(function) or _STREAM.search(dataset + about):
            continue
        if any(module.within(one, module.scope(call)) for one in module.called(names.SAMPLER)):
            continue
        classes = {getattr(one, "name", ""): one for one in module.each(ast.ClassDef)}
        made = {(key(part.func) or "") for part in module.values(given["dataset"]) if isinstance(part, ast.Call)}
        if any(
            "IterableDataset" in ast.unparse(base) for name in made if name in classes for base in _bases(classes[name])
        ):
            continue
        yield check.problem(
            "DT003", call, "a DataLoader without a DistributedSampler: every rank draws from all samples"
        )


def _bases(node: ast.AST) -> list[ast.expr]:
    return node.bases if isinstance(node, ast.ClassDef) else []


def same_order(check: Check) -> Iterator[Problem]:
    """DT004."""
    module = check.module
    if (
        not module.called(names.SAMPLER)
        or check.project.methods(module, "set_epoch")
        or check.project.framework(module)
    ):
        return
    loops = [one for one in module.each(ast.For) if isinstance(one, ast.For) and _over_epochs(one)]
    for call in module.called(names.SAMPLER) if loops else ():
        given = _args(call, "dataset", "num_replicas", "rank", "shuffle")
        statement = module.statement(call)
        target = key(statement.targets[0]) if isinstance(statement, ast.Assign) else None
        about = f"{target or ''} {key(given['dataset']) or '' if 'dataset' in given else ''}"
        if constant(given.get("shuffle")) is False or _HELD_OUT.search(about) or _open_ended(call):
            continue
        edits: tuple[Edit, ...] = ()
        loop = next((one for one in loops if _reachable(check, statement, one)), None)
        if loop is not None and target and isinstance(loop.target, ast.Name):
            first = loop.body[0]
            if first.lineno > loop.lineno:
                indent = " " * first.col_offset
                at = (first.lineno, first.col_offset)
                edits = (Edit(at, at, f"{target}.set_epoch({loop.target.id})\n{indent}"),)
        yield check.problem(
            "DT004", call, "no set_epoch(): the sampler gives every epoch the same order", edits=edits
        )  # fmt: skip


def _over_epochs(loop: ast.For) -> bool:
    """Whether a loop counts epochs, more than one."""
    if "epoch" not in ast.unparse(loop.target).lower():
        return False
    text = ast.unparse(loop.iter)
    return text not in ("range(1)", "range(0, 1)")


def _reachable(check: Check, statement: ast.AST, loop: ast.For) -> bool:
    """Whether the name that a statement sets can be used in a loop: the same function, before it."""
    return (
        check.module.scope(statement) is check.module.scope(loop)
        and getattr(statement, "lineno", 0) < loop.lineno
        and check.module.dominates(statement, loop)
    )


def contradicting(check: Check) -> Iterator[Problem]:
    """DT027."""
    for call in check.module.called(names.LOADER):
        given = _loader(call)
        if _open_ended(call):
            continue
        sampler = given.get("sampler")
        one_sampler = sampler is not None and _surely_given(sampler)
        if one_sampler and constant(given.get("shuffle")) is True:
            yield check.problem("DT027", call, "shuffle=True beside a sampler: DataLoader raises ValueError")
        if "batch_sampler" in given and _surely_given(given["batch_sampler"]):
            wrong: list[str] = [
                name for name in ("sampler", "shuffle", "drop_last") if name in given and _on(given[name])
            ]
            wrong += ["batch_size"] if constant(given.get("batch_size")) not in (None, 1) else []
            if wrong:
                yield check.problem("DT027", call, f"{wrong[0]} beside batch_sampler: DataLoader raises ValueError")
        workers = constant(given["num_workers"]) if "num_workers" in given else 0
        if workers == 0:
            for name in ("persistent_workers", "prefetch_factor"):
                if name in given and _on(given[name]):
                    yield check.problem("DT027", call, f"{name} without worker processes: DataLoader raises ValueError")


def _surely_given(value: ast.expr) -> bool:
    """Whether an argument is surely not None."""
    return isinstance(value, ast.Call)


def _on(value: ast.expr) -> bool:
    return constant(value) not in (None, False) or isinstance(value, ast.Call)


def stream_not_split(check: Check) -> Iterator[Problem]:
    """DT028."""
    module = check.module
    if "IterableDataset" not in module.text or not check.project.trains(module) or check.project.framework(module):
        return
    for node in module.each(ast.ClassDef):
        if not any("IterableDataset" in (module.name(base) or ast.unparse(base)) for base in node.bases):
            continue
        text = ast.unparse(node)
        if not any(isinstance(one, ast.FunctionDef) and one.name == "__iter__" for one in node.body):
            continue
        if not re.search(
            r"rank|world_size|num_replicas|shard|split|get_worker_info|process_index", text, re.IGNORECASE
        ):
            yield check.problem(
                "DT028", node, f"{node.name} gives every rank and every worker process the same samples"
            )


CHECKS = (undivided, same_order, contradicting, stream_not_split)
