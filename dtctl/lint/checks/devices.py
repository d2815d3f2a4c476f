"""Rules about devices: DT007, DT016, DT017."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.checks.loading import default_of_setting
from dtctl.lint.collectives import collective_called, takes_a_group
from dtctl.lint.flow import find_value_origins
from dtctl.lint.model import Edit, Problem, Severity
from dtctl.lint.ranks import is_launcher_code, is_single_process_code, one_process, rank_kind, resolve_rank_guard
from dtctl.lint.source_file import (
    find_argument,
    find_keyword_value,
    format_dotted_name,
    read_constant_value,
    read_node_position,
)

_ON_THE_CURRENT_GPU = ("barrier", "all_gather_object", "broadcast_object_list", "gather_object", "synchronize")
"""Collectives that use the current GPU, regardless of the device of their arguments."""
_CHOOSE_A_GPU = ("set_device", "set_device_index", "setup_device", "device_count_per_node", "get_device")
"""Functions after whose call a rank has a GPU of its own."""
_SHOWN = re.compile(r"CUDA_VISIBLE_DEVICES[\"']\]\s*=|(?:setdefault|putenv)\(\s*[\"']CUDA_VISIBLE_DEVICES")
"""Pattern of code that sets the GPUs which a rank sees."""
_CUDA_N = re.compile(r"cuda:\d+\Z")
_ONE_PROCESS = re.compile(
    r"distributed|ddp|local_rank|world_size|multi|device_count|parallel|fsdp|n_gpu", re.IGNORECASE
)


def check_one_gpu_for_all(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT007: one GPU for all ranks."""
    module = check.module
    fixed = list(_fixed_devices(check))
    if not fixed or not module.trains or "CUDA_VISIBLE_DEVICES" in module.text or not _wrapped_somewhere(check):
        return
    if one_process(module):
        return
    for node, text in fixed:
        if resolve_rank_guard(module, node) is not None or is_launcher_code(module, node):
            continue
        if _has_distributed_condition(check, node) or is_single_process_code(module, node):
            continue
        yield check.problem(
            "DT007", node, f"`{text}`: every rank of a node uses the same GPU", edits=_own_gpu(check, node)
        )


def _wrapped_somewhere(check: CheckContext) -> bool:
    return any(check.project.calls(check.module, name) for name in (names.INIT, *names.WRAPPERS))


def _fixed_devices(check: CheckContext) -> Iterator[tuple[ast.expr, str]]:
    """Yield expressions that name one GPU by number."""
    module = check.module
    for call in module.calls_of("torch.device", "torch.cuda.set_device"):
        if call.args and _is_fixed(call.args[0], number=(module.name(call.func) or "").endswith("set_device")):
            yield call.args[0], ast.unparse(call)
        elif (
            len(call.args) == 2
            and read_constant_value(call.args[0]) == "cuda"
            and type(read_constant_value(call.args[1])) is int
        ):
            yield call.args[1], ast.unparse(call)
    for call in module.methods["to"] + module.methods["cuda"]:
        if (
            isinstance(call.func, ast.Attribute)
            and call.args
            and _is_fixed(call.args[0], number=call.func.attr == "cuda")
        ):
            yield call.args[0], ast.unparse(call) if len(ast.unparse(call)) < 50 else f".{call.func.attr}(...)"
    yield from _fixed_arguments(check)
    for node in module.nodes_of(ast.Assign):
        if _is_fixed(node.value, number=False) and not _set_again(check, node):
            yield node.value, ast.unparse(node)


def _set_again(check: CheckContext, node: ast.Assign) -> bool:
    """Return whether the name gets another device later in the function."""
    module = check.module
    name = format_dotted_name(node.targets[0])
    bound = module.bindings.get((module.scope(node), name or ""), ())
    return any(binding.line > node.lineno for binding in bound)


def _fixed_arguments(check: CheckContext) -> Iterator[tuple[ast.expr, str]]:
    """Yield keyword arguments that name one GPU by number."""
    module = check.module
    for call in module.calls_of(names.DDP, "torch.load"):
        for argument in call.keywords:
            if argument.arg == "device_ids" and isinstance(argument.value, ast.List) and len(argument.value.elts) == 1:
                if _is_fixed(argument.value.elts[0], number=True):
                    yield argument.value.elts[0], f"device_ids={ast.unparse(argument.value)}"
            elif argument.arg in ("output_device", "map_location") and _is_fixed(
                argument.value, number=argument.arg == "output_device"
            ):
                yield argument.value, f"{argument.arg}={ast.unparse(argument.value)}"
    calls = (argument for group in module.methods.values() for argument in group) if "cuda:" in module.text else ()
    values = [argument.value for call in calls for argument in call.keywords if argument.arg == "device"]
    fixed = [argument for argument in values if _is_fixed(argument, number=False)]
    if (
        len({read_constant_value(argument) for argument in fixed}) == 1
    ):  # a file with several GPU numbers uses them on purpose
        yield from ((argument, f"device={ast.unparse(argument)}") for argument in fixed)


def _is_fixed(node: ast.expr, *, number: bool) -> bool:
    value = read_constant_value(node)
    if isinstance(value, str):
        return _CUDA_N.match(value) is not None
    return number and type(value) is int and value >= 0


def _has_distributed_condition(check: CheckContext, node: ast.AST) -> bool:
    """Return whether a condition around a node tests if the job is distributed."""
    return any(
        isinstance(parent, ast.If | ast.IfExp)
        and child is not parent.test
        and _ONE_PROCESS.search(ast.unparse(parent.test))
        for parent, child in check.module.chain(node)
    )


def _own_gpu(check: CheckContext, node: ast.expr) -> tuple[Edit, ...]:
    """Return the edit that replaces a number by the local rank."""
    rank = _local_rank_here(check, node)
    if rank is None or node.end_lineno is None or node.end_col_offset is None:
        return ()
    text = f'f"cuda:{{{rank}}}"' if isinstance(read_constant_value(node), str) else rank
    if '"' in rank and text.startswith("f"):
        text = f'"cuda:" + {rank}'
    return (Edit(read_node_position(node), (node.end_lineno, node.end_col_offset), text),)


def _reads_local_rank(check: CheckContext, scope: ast.AST) -> bool:
    """Return whether a function, or the module outside of functions, already reads LOCAL_RANK."""
    module = check.module
    reads: list[ast.expr] = [
        node for node in module.nodes_of(ast.Subscript) if read_constant_value(node.slice) == "LOCAL_RANK"
    ]
    reads += [
        call for name in ("get", "getenv") for call in module.methods.get(name, ())
        if call.args and read_constant_value(call.args[0]) == "LOCAL_RANK"
    ]  # fmt: skip
    return any(module.scope(read) in (scope, module.tree) for read in reads)


def _local_rank_here(check: CheckContext, node: ast.expr) -> str | None:
    """Return a name of the local rank that is set before a node, or else its variable, if the file reads it."""
    module = check.module
    scope: ast.AST | None = module.scope(node)
    while scope is not None:
        if any(binding.line < node.lineno for binding in module.bindings.get((scope, "local_rank"), ())):
            return "local_rank"
        scope = module.find_enclosing_node(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module))
    if module.aliases.get("os") != "os" or not _reads_local_rank(check, module.scope(node)):
        return None
    return 'os.environ["LOCAL_RANK"]' if isinstance(read_constant_value(node), str) else 'int(os.environ["LOCAL_RANK"])'


def check_global_rank_as_device(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT016: GPU by global rank."""
    module = check.module
    chosen = [node for node in _device_numbers(check) if rank_kind(module, node) == "global"]
    if not chosen or check.cluster.single_node or not _wrapped_somewhere(check):
        return
    reported = set()
    for node in chosen:
        if ast.unparse(node) in reported:
            continue
        reported.add(ast.unparse(node))
        sure = any(binding.value is not None for binding in module.lookup(node)) or not isinstance(node, ast.Name)
        severity: Severity = "error" if check.cluster.multi_node else "warning" if sure else "info"
        if isinstance(node, ast.Attribute):
            sure = False
        where = "" if check.cluster.multi_node else " on the second node and later ones"
        yield check.problem(
            "DT016",
            node,
            f"the global rank `{ast.unparse(node)}` chooses the GPU: there is no such device{where}",
            severity=severity,
        )


def _device_numbers(check: CheckContext) -> Iterator[ast.expr]:
    """Yield expressions that choose a GPU by number."""
    module = check.module
    for call in module.calls_of("torch.cuda.set_device", "torch.cuda.device", "torch.accelerator.set_device_index"):
        yield from call.args[:1]
    for call in module.calls_of("torch.device", "torch.set_default_device"):
        yield from _number_of_device(call)
    for call in module.calls_of(names.DDP):
        given = find_keyword_value(call, "device_ids")
        for value in find_value_origins(module, given) if given is not None else ():
            if isinstance(value.node, ast.List) and value.module is module:
                yield from value.node.elts
    for call in module.methods["to"] + module.methods["cuda"]:
        if isinstance(call.func, ast.Attribute) and call.args:
            if isinstance(call.args[0], ast.Name | ast.Attribute):
                yield call.args[0]
            yield from _find_formatted_device(call.args[0])


def _number_of_device(call: ast.Call) -> Iterator[ast.expr]:
    """Yield the number in torch.device("cuda", number), or a single argument that may be a number."""
    if len(call.args) == 2 and read_constant_value(call.args[0]) == "cuda":
        yield call.args[1]
    elif call.args:
        for branch in _list_conditional_branches(call.args[0]):
            yield from _find_formatted_device(branch)
            if isinstance(branch, ast.Name | ast.Attribute):
                yield branch


def _list_conditional_branches(node: ast.expr) -> tuple[ast.expr, ...]:
    return (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node,)


def _find_formatted_device(node: ast.expr) -> Iterator[ast.expr]:
    r"""Yield the number in f"cuda:{number}"."""
    if isinstance(node, ast.JoinedStr) and read_constant_value(node.values[0]) == "cuda:" and len(node.values) == 2:
        inner = node.values[1]
        if isinstance(inner, ast.FormattedValue):
            yield inner.value


def check_no_device_chosen(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT017: no GPU chosen."""
    module = check.module
    yield from _chosen_late(check)
    starts = module.calls_of(names.INIT)
    if not starts or check.project.has_text(module, _SHOWN):
        return
    if any(check.project.methods(module, name) for name in _CHOOSE_A_GPU):
        return
    for call in starts:
        backend = find_argument(call, "backend", 0)
        if backend is None or find_keyword_value(call, "device_id") is not None:
            continue
        values = [value.node for value in find_value_origins(module, backend)]
        given = [read_constant_value(value) or default_of_setting(check, value) for value in values]
        unknown = not any(given) and _ids_of_ddp(check)
        if unknown or "nccl" in given or any("nccl" in ast.unparse(value) for value in values):
            sure = any(check.project.methods(module, name) for name in _ON_THE_CURRENT_GPU) and not unknown
            yield check.problem(
                "DT017",
                call,
                f"NCCL, and no rank says which GPU is its own before the first collective{_describe_uses(check, call)}",
                severity=None if sure else "info",
            )
            return
    if module.calls_of(names.DDP) and not _ids_of_ddp(check) and not one_process(module):
        yield from _check_unnumbered_gpu(check)


def _check_unnumbered_gpu(check: CheckContext) -> Iterator[Problem]:
    """Yield the first device "cuda" without a number in a program that chooses no GPU."""
    module = check.module
    for call in [*module.calls_of("torch.device"), *module.methods.get("to", ())]:
        named = [part for given in call.args[:1] for part in ast.walk(given) if read_constant_value(part) == "cuda"]
        if named and not _has_distributed_condition(check, call) and not is_single_process_code(module, call):
            yield check.problem("DT007", call, f"`{ast.unparse(call)}`: every rank of a node uses its first GPU")
            return


def _describe_uses(check: CheckContext, start: ast.Call) -> str:
    """Return the first lines after the start of the process group that need a GPU, as text."""
    barriers = check.module.calls.get("torch.distributed.barrier", [])
    at = f" (line {barriers[0].lineno})" if barriers else ""
    lines = [number.lineno for number in _device_numbers(check) if number.lineno > start.lineno]
    return f"{at}; its number is first used in line {lines[0]}" if lines else at


def _ids_of_ddp(check: CheckContext) -> bool:
    """Return whether a call of DDP has `device_ids`, the GPU of the rank."""
    return any(find_keyword_value(call, "device_ids") is not None for call in check.module.calls_of(names.DDP))


def _chosen_late(check: CheckContext) -> Iterator[Problem]:
    """Yield a barrier or another collective without a tensor that precedes the choice of the GPU in one function."""
    module = check.module
    for chosen in module.calls_of("torch.cuda.set_device"):
        scope = module.scope(chosen)
        started = [call for call in module.calls_of(names.INIT) if module.scope(call) is scope]
        if not started or any(find_keyword_value(call, "device_id") is not None for call in started):
            continue
        for name in ("barrier", "synchronize", "broadcast_object_list", "all_gather_object"):
            for call in module.methods.get(name, ()):
                inside = module.scope(call) is scope and started[0].lineno < call.lineno < chosen.lineno
                whole = f"torch.distributed.{name}"
                meets = module.name(call.func) == whole or collective_called(module, call) == "barrier"
                if inside and meets and not takes_a_group(whole, call):
                    yield check.problem(
                        "DT017", call, f"a collective before the rank has chosen its GPU (line {chosen.lineno})"
                    )
                    return


CHECKS = (check_one_gpu_for_all, check_global_rank_as_device, check_no_device_chosen)
