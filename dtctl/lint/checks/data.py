"""Rules about how data is divided: DT003, DT004, DT027, DT028."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.edits import indent
from dtctl.lint.flow import function_of, origins
from dtctl.lint.model import Edit, Problem
from dtctl.lint.source_file import SourceFile, constant, key
from dtctl.lint.wraps import wraps

_HELD_OUT = re.compile(r"val|test|eval|dev_|infer|predict", re.IGNORECASE)
_STREAM = re.compile(r"iterable|stream|webdataset|wds\.|infinite", re.IGNORECASE)


def _args(call: ast.Call, *order: str) -> dict[str, ast.expr]:
    """Arguments by name, positional ones too."""
    arguments = dict(zip(order, call.args, strict=False))
    return arguments | {argument.arg: argument.value for argument in call.keywords if argument.arg}


def _loader(call: ast.Call) -> dict[str, ast.expr]:
    return _args(call, "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")


def _open_ended(call: ast.Call) -> bool:
    """Return whether more arguments are passed than can be read: *args, **kwargs."""
    return any(argument.arg is None for argument in call.keywords) or any(
        isinstance(argument, ast.Starred) for argument in call.args
    )


def undivided(check: Check) -> Iterator[Problem]:
    """DT003."""
    module = check.module
    engine = any(
        not any(one.arg in ("training_data", None) for one in call.keywords)
        for call in module.calls_of("deepspeed.initialize")
    )  # without them DeepSpeed leaves the loader to the program
    if not (wraps(module) or engine) or (check.project.framework(module) and not engine):
        return
    for call in module.calls_of(names.LOADER):
        arguments = _loader(call)
        if _open_ended(call) or "sampler" in arguments or "batch_sampler" in arguments or "dataset" not in arguments:
            continue
        statement = module.statement(call)
        target = key(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
        dataset = " ".join(ast.unparse(value) for value in module.values(arguments["dataset"]))
        description = f"{target} {key(arguments['dataset']) or ''}"
        function = getattr(module.scope(call), "name", "")
        if _HELD_OUT.search(description) or _HELD_OUT.search(function) or _STREAM.search(dataset + description):
            continue
        if any(module.within(value, module.scope(call)) for value in module.calls_of(names.SAMPLER)):
            continue
        classes = {getattr(value, "name", ""): value for value in module.nodes_of(ast.ClassDef)}
        constructors = {
            (key(part.func) or "") for part in module.values(arguments["dataset"]) if isinstance(part, ast.Call)
        }
        if any(
            "IterableDataset" in ast.unparse(base)
            for name in constructors
            if name in classes
            for base in _bases(classes[name])
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
    if check.project.framework(module):
        return
    importers = check.project.importers(module) if module.calls_of(names.SAMPLER) else ()
    if any(
        source.methods.get("set_epoch")
        for importer in importers
        for source in check.project.having(importer, "set_epoch")
        if source is not module
    ):
        return
    loops = [candidate for candidate in module.nodes_of(ast.For) if _over_epochs(candidate)]
    repeated = bool(loops) or _repeats(check, importers)
    for call in module.calls_of(names.SAMPLER) if repeated else ():
        if not _shuffles(check, call) or _epoch_set(check, call) or _given_away(check, call):
            continue
        statement = module.statement(call)
        loop = next((candidate for candidate in loops if _reachable(check, statement, candidate)), None)
        edits = _set_epoch(check, call, loop) if loop is not None else ()
        function = module.scope(call)
        user = next(
            (one for one in module.methods.get(getattr(function, "name", ""), ()) if module.scope(one) is not function),
            None,
        )
        places = [f"of line {user.lineno}"] if user is not None else []
        places += [f"epochs in line {loops[0].lineno}"] if loops else []
        where = f" ({', '.join(places)})" if places else ""
        yield check.problem(
            "DT004", call, f"no set_epoch(): the sampler{where} gives every epoch the same order", edits=edits
        )  # fmt: skip
    if module.trains and (loops or _repeats(check, ())):
        yield from _same_order_elsewhere(check, f" (epochs in line {loops[0].lineno})" if loops else "")


def _given_away(check: Check, sampler: ast.Call) -> bool:
    """Return whether a sampler is an argument of a function that cannot be read, which may set its epoch."""
    module = check.module
    statement = module.statement(sampler)
    name = key(statement.targets[0]) if isinstance(statement, ast.Assign) else None
    if name is None:
        return False
    for calls in module.methods.values():
        for call in calls:
            given = [*call.args, *(one.value for one in call.keywords)]
            unknown = function_of(module, call) is None and (key(call.func) or "").partition(".")[0] in module.aliases
            if unknown and any(key(one) == name for one in given):
                resolved = module.name(call.func) or ""
                if not resolved.startswith(("torch.", "torch_", "builtins")):
                    return True
    return False


def _shuffles(check: Check, call: ast.Call) -> bool:
    """Return whether a sampler shuffles training data, as far as the code shows it."""
    arguments = _args(call, "dataset", "num_replicas", "rank", "shuffle")
    statement = check.module.statement(call)
    target = key(statement.targets[0]) if isinstance(statement, ast.Assign) else None
    description = f"{target or ''} {key(arguments['dataset']) or '' if 'dataset' in arguments else ''}"
    shuffle = arguments.get("shuffle")
    values = origins(check.module, shuffle) if shuffle is not None else []
    if values and all(constant(value.node) is False for value in values):
        return False
    return not _HELD_OUT.search(description) and not _open_ended(call)


def _repeats(check: Check, importers: tuple[SourceFile, ...]) -> bool:
    """Return whether the program has another loop over its data: epochs of another file, or an endless loop."""
    module = check.module
    for source in (*check.project.having(module, "epoch"), *importers):
        if any(_over_epochs(loop) for loop in source.nodes_of(ast.For)):
            return True
    return any(
        constant(loop.test) is True
        and any(isinstance(part, ast.For) and re.search("loader|data", ast.unparse(part.iter)) for part in loop.body)
        for loop in module.nodes_of(ast.While)
    )


def _same_order_elsewhere(check: Check, where: str) -> Iterator[Problem]:
    """Yield samplers that a function of another file makes for this one, which has the epochs, in line `where`."""
    module = check.module
    if check.project.methods(module, "set_epoch"):
        return
    for name in sorted(module.methods):
        if not re.search(r"load|data|sampler", name, re.IGNORECASE):
            continue
        for call in module.methods[name]:
            target = function_of(module, call)
            if target is None or target.module is module:
                continue
            other = Check(target.module, check.project, check.cluster)
            if any(_shuffles(other, one) for one in _samplers(target.module, target.node)):
                yield check.problem(
                    "DT004", call, f"no set_epoch(): the sampler of `{name}`{where} gives every epoch the same order"
                )
                return


def _samplers(module: SourceFile, function: ast.AST, depth: int = 2) -> list[ast.Call]:
    """Return the samplers that a function makes, itself or in another function of its file."""
    found = [one for one in module.calls_of(names.SAMPLER) if module.scope(one) is function]
    for name, others in module.functions.items() if depth and not found else ():
        if any(module.scope(call) is function for call in module.methods.get(name, ())):
            found += [one for other in others if other is not function for one in _samplers(module, other, depth - 1)]
    return found


def _epoch_set(check: Check, sampler: ast.Call) -> bool:
    """Return whether some set_epoch() may be that of a sampler: all are but those that are surely of another one."""
    module = check.module
    if any(
        source is not module and source.methods.get("set_epoch") for source in check.project.having(module, "set_epoch")
    ):
        return True
    for call in module.methods.get("set_epoch", ()):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        bound = [source.value for source in module.lookup(owner)] if owner is not None else []
        if not bound or any(not _is_another(check, value, sampler) for value in bound):
            return True
    return False


def _is_another(check: Check, value: ast.expr | None, sampler: ast.Call) -> bool:
    """Return whether a value is a DistributedSampler, and not this one."""
    if isinstance(value, ast.IfExp):
        return _is_another(check, value.body, sampler)
    return isinstance(value, ast.Call) and value is not sampler and check.module.name(value.func) == names.SAMPLER


def _set_epoch(check: Check, sampler: ast.Call, loop: ast.For) -> tuple[Edit, ...]:
    """The edit that calls set_epoch() in a loop; none where the epoch is no number, or the sampler may be another."""
    module = check.module
    statement, counter, first = module.statement(sampler), _counter(loop), loop.body[0]
    blanks = indent(module, first)
    if not isinstance(statement, ast.Assign) or counter is None or blanks is None:
        return ()
    target = key(statement.targets[0])
    if target is None or len(module.lookup(statement.targets[0])) != 1 or len(statement.targets) != 1:
        return ()
    start = (first.lineno, first.col_offset)
    call = f"{target}.set_epoch({counter})"
    if statement.value is sampler:
        return (Edit(start, start, f"{call}\n{blanks}"),)
    either = statement.value
    if isinstance(either, ast.IfExp) and either.body is sampler and _is_none(either.orelse):
        deeper = blanks + ("\t" if "\t" in blanks else "    ")
        return (Edit(start, start, f"if {target} is not None:\n{deeper}{call}\n{blanks}"),)
    return ()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _counter(loop: ast.For) -> str | None:
    """Return the name that a loop counts with whole numbers; None if it counts with anything else."""
    iterated = loop.iter
    while isinstance(iterated, ast.Call) and (key(iterated.func) or "").rpartition(".")[2] == "tqdm" and iterated.args:
        iterated = iterated.args[0]
    function = (key(iterated.func) or "").rpartition(".")[2] if isinstance(iterated, ast.Call) else ""
    target = loop.target
    if function == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[0]
    elif function not in ("range", "trange", "count"):
        return None
    return target.id if isinstance(target, ast.Name) else None


def _over_epochs(loop: ast.For) -> bool:
    """Return whether a loop counts epochs, more than one."""
    if "epoch" not in (ast.unparse(loop.target) + ast.unparse(loop.iter)).lower():
        return False
    text = ast.unparse(loop.iter)
    return text not in ("range(1)", "range(0, 1)")


def _reachable(check: Check, statement: ast.AST, loop: ast.For) -> bool:
    """Return whether the name that a statement sets can be used in a loop: the same function, before it."""
    return (
        check.module.scope(statement) is check.module.scope(loop)
        and getattr(statement, "lineno", 0) < loop.lineno
        and check.module.dominates(statement, loop)
    )


def contradicting(check: Check) -> Iterator[Problem]:
    """DT027."""
    for call in check.module.calls_of(names.LOADER):
        arguments = _loader(call)
        if _open_ended(call):
            continue
        sampler = arguments.get("sampler")
        one_sampler = sampler is not None and _all_made(check, sampler)
        if one_sampler and constant(arguments.get("shuffle")) is True:
            yield check.problem("DT027", call, "shuffle=True beside a sampler: DataLoader raises ValueError")
        if "batch_sampler" in arguments and _all_made(check, arguments["batch_sampler"]):
            wrong: list[str] = [
                name for name in ("sampler", "shuffle", "drop_last") if name in arguments and _on(arguments[name])
            ]
            wrong += ["batch_size"] if constant(arguments.get("batch_size")) not in (None, 1) else []
            if wrong:
                yield check.problem("DT027", call, f"{wrong[0]} beside batch_sampler: DataLoader raises ValueError")
        workers = constant(arguments["num_workers"]) if "num_workers" in arguments else 0
        if workers == 0:
            for name in ("persistent_workers", "prefetch_factor"):
                if name in arguments and _on(arguments[name]):
                    yield check.problem("DT027", call, f"{name} without worker processes: DataLoader raises ValueError")


def _surely_given(value: ast.expr) -> bool:
    """Return whether an argument is surely not None."""
    return isinstance(value, ast.Call)


def _all_made(check: Check, value: ast.expr) -> bool:
    """Return whether a value is an object wherever it is set, and not None."""
    bound = [binding.value for binding in check.module.lookup(value)]
    return _surely_given(value) or (bool(bound) and all(isinstance(binding, ast.Call) for binding in bound))


def _on(value: ast.expr) -> bool:
    return constant(value) not in (None, False) or isinstance(value, ast.Call)


def stream_not_split(check: Check) -> Iterator[Problem]:
    """DT028."""
    module = check.module
    if "IterableDataset" not in module.text or not check.project.trains(module) or check.project.framework(module):
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
    """Return whether an __iter__ has no samples of its own: it raises, or hands out those of another dataset."""
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
        if (key(returned.func) or "") in ("iter", "enumerate", "map") and returned.args:
            returned = returned.args[-1]
        else:
            return isinstance(returned.func, ast.Attribute) and returned.func.attr == "__iter__"
    return (key(returned) or "").startswith("self.") if returned is not None else False


CHECKS = (undivided, same_order, contradicting, stream_not_split)
