"""Rules about the division of data between ranks: DT003, DT004, DT027, DT028."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.edits import find_statement_indent
from dtctl.lint.flow import find_called_function, find_value_origins
from dtctl.lint.model import Edit, Problem
from dtctl.lint.source_file import (
    SourceFile,
    format_dotted_name,
    read_assigned_name,
    read_constant_value,
    read_last_name,
)
from dtctl.lint.wraps import list_model_wraps

_HELD_OUT = re.compile(r"val|test|eval|dev_|infer|predict", re.IGNORECASE)
_ONLY_ITERATES = ("torch.", "torch_", "builtins", "tqdm", "rich.", "itertools.", "progressbar", "alive_progress")
"""Prefixes of functions that do not call set_epoch() on a sampler which they get, such as progress bars around a
loader."""
_STREAM = re.compile(r"iterable|stream|webdataset|wds\.|infinite", re.IGNORECASE)


def _collect_call_arguments(call: ast.Call, *order: str) -> dict[str, ast.expr]:
    """Return the arguments of a call by name, including positional ones."""
    arguments = dict(zip(order, call.args, strict=False))
    return arguments | {argument.arg: argument.value for argument in call.keywords if argument.arg}


def _collect_loader_arguments(call: ast.Call) -> dict[str, ast.expr]:
    return _collect_call_arguments(call, "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")


def _open_ended(call: ast.Call) -> bool:
    """Return whether a call has *args or **kwargs, whose content is unknown."""
    return any(argument.arg is None for argument in call.keywords) or any(
        isinstance(argument, ast.Starred) for argument in call.args
    )


def check_undivided_data(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT003: DataLoader without a sampler."""
    module = check.module
    # Without these arguments DeepSpeed leaves the loader to the program.
    engine = any(
        not any(one.arg in ("training_data", None) for one in call.keywords)
        for call in module.calls_of("deepspeed.initialize")
    )
    if not (list_model_wraps(module) or engine) or (check.project.uses_framework(module) and not engine):
        return
    for call in module.calls_of(names.LOADER):
        arguments = _collect_loader_arguments(call)
        if _open_ended(call) or "sampler" in arguments or "batch_sampler" in arguments or "dataset" not in arguments:
            continue
        if any(module.is_node_within(sampler, module.scope(call)) for sampler in module.calls_of(names.SAMPLER)):
            continue
        if not _is_held_out_or_stream(module, call, arguments["dataset"]):
            yield check.problem(
                "DT003", call, "a DataLoader without a DistributedSampler: every rank draws from all samples"
            )


def _is_held_out_or_stream(module: SourceFile, loader: ast.Call, dataset: ast.expr) -> bool:
    """Return whether a loader reads data for evaluation or a stream, by names and by the class of the dataset."""
    values = module.values(dataset)
    description = f"{read_assigned_name(module, loader) or ''} {format_dotted_name(dataset) or ''}"
    if _HELD_OUT.search(description) or _HELD_OUT.search(getattr(module.scope(loader), "name", "")):
        return True
    if _STREAM.search(" ".join(map(ast.unparse, values)) + description):
        return True
    made_by = [format_dotted_name(value.func) or "" for value in values if isinstance(value, ast.Call)]
    bases = [base for name in made_by if name in module.classes for base in module.classes[name].bases]
    return any("IterableDataset" in ast.unparse(base) for base in bases)


def check_same_order(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT004: set_epoch is not called."""
    module = check.module
    if check.project.uses_framework(module):
        return
    importers = check.project.importers(module) if module.calls_of(names.SAMPLER) else ()
    if any(
        source.methods.get("set_epoch")
        for importer in importers
        for source in check.project.find_modules_with_words(importer, "set_epoch")
        if source is not module
    ):
        return
    loops = [candidate for candidate in module.nodes_of(ast.For) if _over_epochs(candidate)]
    around = [*loops, *_list_data_repetitions(module)]
    repeated = bool(around) or _has_another_data_loop(check, importers)
    for call in module.calls_of(names.SAMPLER) if repeated else ():
        if not _is_shuffling_sampler(check, call) or _epoch_set(check, call) or _given_away(check, call):
            continue
        statement = module.statement(call)
        loop = next((candidate for candidate in loops if _is_reachable_in_loop(check, statement, candidate)), None)
        edits = _set_epoch(check, call, loop) if loop is not None else ()
        function = module.scope(call)
        user = next(
            (one for one in module.methods.get(getattr(function, "name", ""), ()) if module.scope(one) is not function),
            None,
        )
        places = [f"of line {user.lineno}"] if user is not None else []
        places += [f"epochs in line {around[0].lineno}"] if around else []
        where = f" ({', '.join(places)})" if places else ""
        yield check.problem(
            "DT004", call, f"no set_epoch(): the sampler{where} gives every epoch the same order", edits=edits
        )  # fmt: skip
    if module.trains and (around or _has_another_data_loop(check, ())):
        yield from _same_order_elsewhere(check, f" (epochs in line {around[0].lineno})" if around else "")


def _given_away(check: CheckContext, sampler: ast.Call) -> bool:
    """Return whether an unknown function gets the sampler, and may therefore set its epoch."""
    module = check.module
    name = read_assigned_name(module, sampler)
    if name is None:
        return False
    for calls in module.methods.values():
        for call in calls:
            given = [*call.args, *(one.value for one in call.keywords)]
            unknown = (
                find_called_function(module, call) is None
                and (format_dotted_name(call.func) or "").partition(".")[0] in module.aliases
            )
            if unknown and any(format_dotted_name(one) == name for one in given):
                resolved = module.name(call.func) or ""
                if not resolved.startswith(_ONLY_ITERATES):
                    return True
    return False


def _is_shuffling_sampler(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a sampler shuffles training data, as far as the code shows it."""
    arguments = _collect_call_arguments(call, "dataset", "num_replicas", "rank", "shuffle")
    target = read_assigned_name(check.module, call)
    description = f"{target or ''} {format_dotted_name(arguments['dataset']) or '' if 'dataset' in arguments else ''}"
    shuffle = arguments.get("shuffle")
    values = find_value_origins(check.module, shuffle) if shuffle is not None else []
    if values and all(read_constant_value(value.node) is False for value in values):
        return False
    return not _HELD_OUT.search(description) and not _open_ended(call)


def _has_another_data_loop(check: CheckContext, importers: tuple[SourceFile, ...]) -> bool:
    """Return whether another file of the program has a loop over epochs."""
    module = check.module
    for source in (*check.project.find_modules_with_words(module, "epoch"), *importers):
        if any(_over_epochs(loop) for loop in source.nodes_of(ast.For)):
            return True
    return False


def _list_data_repetitions(module: SourceFile) -> list[ast.While]:
    """Return the `while` loops around a loop over the data."""
    return [
        loop for loop in module.nodes_of(ast.While)
        if any(isinstance(part, ast.For) and re.search("loader|data", ast.unparse(part.iter)) for part in loop.body)
    ]  # fmt: skip


def _same_order_elsewhere(check: CheckContext, where: str) -> Iterator[Problem]:
    """Yield samplers from functions of other files, if this file has the loop over epochs; `where` names its line."""
    module = check.module
    if check.project.methods(module, "set_epoch"):
        return
    for name in sorted(module.methods):
        if not re.search(r"load|data|sampler", name, re.IGNORECASE):
            continue
        for call in module.methods[name]:
            target = find_called_function(module, call)
            if target is None or target.module is module:
                continue
            other = CheckContext(target.module, check.project, check.cluster)
            if any(_is_shuffling_sampler(other, one) for one in _find_samplers(target.module, target.node)):
                yield check.problem(
                    "DT004", call, f"no set_epoch(): the sampler of `{name}`{where} gives every epoch the same order"
                )
                return


def _find_samplers(module: SourceFile, function: ast.AST, depth: int = 2) -> list[ast.Call]:
    """Return the samplers that a function creates, directly or in another function of its file."""
    found = [one for one in module.calls_of(names.SAMPLER) if module.scope(one) is function]
    for name, others in module.functions.items() if depth and not found else ():
        if any(module.scope(call) is function for call in module.methods.get(name, ())):
            found += [
                one for other in others if other is not function for one in _find_samplers(module, other, depth - 1)
            ]
    return found


def _epoch_set(check: CheckContext, sampler: ast.Call) -> bool:
    """Return whether a call of set_epoch() may concern a sampler, since it does not certainly concern another one."""
    module = check.module
    if any(
        source is not module and source.methods.get("set_epoch")
        for source in check.project.find_modules_with_words(module, "set_epoch")
    ):
        return True
    for call in module.methods.get("set_epoch", ()):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        bound = [source.value for source in module.lookup(owner)] if owner is not None else []
        if not bound or any(not _is_another(check, value, sampler) for value in bound):
            return True
    return False


def _is_another(check: CheckContext, value: ast.expr | None, sampler: ast.Call) -> bool:
    """Return whether a value is a different DistributedSampler."""
    if isinstance(value, ast.IfExp):
        return _is_another(check, value.body, sampler)
    return isinstance(value, ast.Call) and value is not sampler and check.module.name(value.func) == names.SAMPLER


def _set_epoch(check: CheckContext, sampler: ast.Call, loop: ast.For) -> tuple[Edit, ...]:
    """Return the edit that calls set_epoch() in a loop; empty without an epoch number or a known sampler."""
    module = check.module
    statement, counter, first = module.statement(sampler), _find_loop_counter(loop), loop.body[0]
    blanks = find_statement_indent(module, first)
    if not isinstance(statement, ast.Assign) or counter is None or blanks is None:
        return ()
    target = format_dotted_name(statement.targets[0])
    if target is None or len(module.lookup(statement.targets[0])) != 1 or len(statement.targets) != 1:
        return ()
    start = (first.lineno, first.col_offset)
    call = f"{target}.set_epoch({counter})"
    if statement.value is sampler:
        return (Edit(start, start, f"{call}\n{blanks}"),)
    either = statement.value
    if isinstance(either, ast.IfExp) and either.body is sampler and _is_none_literal(either.orelse):
        deeper = blanks + ("\t" if "\t" in blanks else "    ")
        return (Edit(start, start, f"if {target} is not None:\n{deeper}{call}\n{blanks}"),)
    return ()


def _is_none_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _find_loop_counter(loop: ast.For) -> str | None:
    """Return the name of a loop's integer counter; None if there is none."""
    iterated = loop.iter
    while isinstance(iterated, ast.Call) and read_last_name(iterated.func) == "tqdm" and iterated.args:
        iterated = iterated.args[0]
    function = read_last_name(iterated.func) if isinstance(iterated, ast.Call) else ""
    target = loop.target
    if function == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[0]
    elif function not in ("range", "trange", "count"):
        return None
    return target.id if isinstance(target, ast.Name) else None


def _over_epochs(loop: ast.For) -> bool:
    """Return whether a loop counts epochs, and more than one."""
    if "epoch" not in (ast.unparse(loop.target) + ast.unparse(loop.iter)).lower():
        return False
    text = ast.unparse(loop.iter)
    return text not in ("range(1)", "range(0, 1)")


def _is_reachable_in_loop(check: CheckContext, statement: ast.AST, loop: ast.For) -> bool:
    """Return whether the name that a statement sets is available in a loop, later in the same function."""
    return (
        check.module.scope(statement) is check.module.scope(loop)
        and getattr(statement, "lineno", 0) < loop.lineno
        and check.module.dominates(statement, loop)
    )


def check_loader_arguments(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT027: arguments that exclude each other."""
    for call in check.module.calls_of(names.LOADER):
        arguments = _collect_loader_arguments(call)
        if _open_ended(call):
            continue
        sampler = arguments.get("sampler")
        one_sampler = sampler is not None and _all_made(check, sampler)
        if one_sampler and read_constant_value(arguments.get("shuffle")) is True:
            yield check.problem("DT027", call, "shuffle=True beside a sampler: DataLoader raises ValueError")
        if "batch_sampler" in arguments and _all_made(check, arguments["batch_sampler"]):
            wrong: list[str] = [
                name
                for name in ("sampler", "shuffle", "drop_last")
                if name in arguments and _is_enabled_value(arguments[name])
            ]
            wrong += ["batch_size"] if read_constant_value(arguments.get("batch_size")) not in (None, 1) else []
            if wrong:
                yield check.problem("DT027", call, f"{wrong[0]} beside batch_sampler: DataLoader raises ValueError")
        workers = read_constant_value(arguments["num_workers"]) if "num_workers" in arguments else 0
        if workers == 0:
            for name in ("persistent_workers", "prefetch_factor"):
                if name in arguments and _is_enabled_value(arguments[name]):
                    yield check.problem("DT027", call, f"{name} without worker processes: DataLoader raises ValueError")


def _all_made(check: CheckContext, value: ast.expr) -> bool:
    """Return whether every possible value of an expression is an object, and not None."""
    bound = [binding.value for binding in check.module.lookup(value)]
    return isinstance(value, ast.Call) or (bool(bound) and all(isinstance(binding, ast.Call) for binding in bound))


def _is_enabled_value(value: ast.expr) -> bool:
    return read_constant_value(value) not in (None, False) or isinstance(value, ast.Call)


def check_stream_not_split(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT028: stream that is not divided."""
    module = check.module
    if (
        "IterableDataset" not in module.text
        or not check.project.is_distributed_training(module)
        or check.project.uses_framework(module)
    ):
        return
    for node in module.nodes_of(ast.ClassDef):
        if not any("IterableDataset" in (module.name(base) or ast.unparse(base)) for base in node.bases):
            continue
        text = ast.unparse(node)
        iter_methods = [
            member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == "__iter__"
        ]
        if not iter_methods or _passes_on(iter_methods[-1]):
            continue
        if not re.search(
            r"rank|world_size|num_replicas|shard|split|get_worker_info|process_index", text, re.IGNORECASE
        ):
            yield check.problem(
                "DT028", node, f"{node.name} gives every rank and every worker process the same samples"
            )


def _passes_on(function: ast.FunctionDef) -> bool:
    """Return whether an __iter__ produces no samples itself: it raises, or iterates over another dataset."""
    body = [
        statement
        for statement in function.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    last = body[-1] if body else None
    if isinstance(last, ast.Raise):
        return True
    returned = last.value if isinstance(last, ast.Return | ast.Expr) else None
    returned = returned.value if isinstance(returned, ast.YieldFrom) else returned
    returned = last.iter if isinstance(last, ast.For) else returned
    while isinstance(returned, ast.Call):
        if (format_dotted_name(returned.func) or "") in ("iter", "enumerate", "map") and returned.args:
            returned = returned.args[-1]
        else:
            return isinstance(returned.func, ast.Attribute) and returned.func.attr == "__iter__"
    return (format_dotted_name(returned) or "").startswith("self.") if returned is not None else False


CHECKS = (check_undivided_data, check_same_order, check_loader_arguments, check_stream_not_split)
