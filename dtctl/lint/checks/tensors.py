"""Rules about inputs and results of collectives: DT043, DT044."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.flow import find_value_origins, resolve_callee
from dtctl.lint.model import Problem
from dtctl.lint.source_file import (
    Function,
    SourceFile,
    find_keyword_value,
    format_dotted_name,
    read_constant_value,
    read_last_name,
)

_TENSORS = frozenset(
    "torch." + name
    for name in "tensor zeros ones full empty arange rand randn as_tensor Tensor FloatTensor LongTensor".split()
)
_FIRST = frozenset(
    "torch.distributed." + name for name in "all_reduce broadcast reduce all_gather_into_tensor send recv".split()
)
_FUNCTIONAL = frozenset(
    [f"torch.distributed.nn.{name}" for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")]
    + [f"torch.distributed.nn.functional.{name}" for name in ("all_reduce", "broadcast", "reduce", "all_gather")]
    + [f"torch.distributed._functional_collectives.{name}" for name in ("all_reduce", "broadcast", "all_gather_tensor")]
)
_NOTHING = frozenset(
    "torch.distributed." + name
    for name in "all_reduce broadcast all_gather reduce gather scatter reduce_scatter all_to_all barrier "
    "all_gather_into_tensor reduce_scatter_tensor all_gather_object broadcast_object_list gather_object".split()
)


def check_on_the_cpu(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT043: CPU tensor in a collective of NCCL."""
    module = check.module
    calls = [
        call
        for name in _FIRST
        for call in module.calls.get(name, ())
        if call.args and find_keyword_value(call, "group") is None
    ]
    if not calls or not _only_nccl(check):
        return
    if check.project.has_text(module, re.compile("set_default_device|set_default_tensor_type")):
        return
    for call in sorted(calls, key=lambda one: one.lineno):
        if len(call.args) > 2:
            continue
        values = find_value_origins(module, call.args[0])
        if (
            values
            and all(_is_cpu_tensor_call(value.module, value.node) for value in values)
            and not _is_tensor_moved(module, call)
        ):
            yield check.problem(
                "DT043", call, f"`{ast.unparse(call.args[0])}` is on the CPU, and NCCL has no such tensors"
            )


def _only_nccl(check: CheckContext) -> bool:
    """Return whether every process group of the program certainly uses NCCL alone."""
    starts = [
        (source, call)
        for origin in (check.module, *check.project.importers(check.module)[:4])
        for source in check.project.find_modules_with_words(origin, "init_process_group")
        for call in source.calls_of(names.INIT)
    ]
    for source, call in starts:
        backend = find_keyword_value(call, "backend") or (call.args[0] if call.args else None)
        values = find_value_origins(source, backend) if backend is not None else []
        if not values or not all(read_constant_value(value.node) == "nccl" for value in values):
            return False
    return bool(starts) and not check.project.has_text(check.module, "new_group")


def _is_cpu_tensor_call(module: SourceFile, node: ast.expr) -> bool:
    if (
        not isinstance(node, ast.Call)
        or module.name(node.func) not in _TENSORS
        or find_keyword_value(node, "device") is not None
    ):
        return False
    above = module.find_enclosing_node(node, (ast.With,))
    while isinstance(above, ast.With):
        if any("device" in ast.unparse(item.context_expr) for item in above.items):
            return False
        above = module.find_enclosing_node(above, (ast.With,))
    # A value of as_tensor may be on the GPU already.
    source = node.args[0] if node.args else None
    return not (module.name(node.func) == "torch.as_tensor" and isinstance(source, ast.Name | ast.Attribute))


def _is_tensor_moved(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a method in the function moves the tensor to another device."""
    name = format_dotted_name(call.args[0])
    scope = module.scope(call)
    return any(
        isinstance(move.func, ast.Attribute)
        and format_dotted_name(move.func.value) == name
        and module.scope(move) is scope
        for method in ("to", "cuda")
        for move in module.methods.get(method, ())
    )


def check_thrown_away(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT044: result of a collective thrown away."""
    module = check.module
    for name in _FUNCTIONAL:
        for call in module.calls.get(name, ()):
            if isinstance(module.parents.get(call), ast.Expr):
                yield check.problem(
                    "DT044",
                    call,
                    f"{name.rpartition('.')[2]} of torch.distributed.nn returns its result, which is thrown away",
                )
    for name in _NOTHING:
        for call in module.calls.get(name, ()):
            above = module.parents.get(call)
            asynchronous = find_keyword_value(call, "async_op") is not None or len(call.args) > 3
            if isinstance(above, ast.Assign) and not asynchronous and _used_as_tensor(module, above):
                yield check.problem(
                    "DT044",
                    call,
                    f"{name.rpartition('.')[2]} returns None: it changes its argument, and the name is lost",
                )
            elif (
                isinstance(above, ast.Expr)
                and read_constant_value(find_keyword_value(call, "async_op")) is True
                and not _has_later_wait(module, call)
            ):
                yield check.problem(
                    "DT044", call, f"{name.rpartition('.')[2]}(async_op=True) is never waited for", severity="warning"
                )
    yield from _of_a_helper(check)


def _used_as_tensor(module: SourceFile, assign: ast.Assign) -> bool:
    """Return whether a name that is certainly None is used afterwards in a way that None does not allow."""
    name = format_dotted_name(assign.targets[0])
    if name is None or len(assign.targets) != 1:
        return False
    scope = module.scope(assign)
    uses: list[tuple[ast.expr, ast.expr]] = [
        *((use, use.value) for use in module.nodes_of(ast.Attribute)),
        *((use, use.left) for use in module.nodes_of(ast.BinOp)),
        *((use, use.value) for use in module.nodes_of(ast.Subscript)),
    ]
    for use, part in uses:
        if format_dotted_name(part) != name or module.scope(use) is not scope or use.lineno <= assign.lineno:
            continue
        current = module.find_current_binding(part, use)
        if current is not None and current.statement is assign and getattr(use, "attr", "") != "wait":
            return True
    return False


def _has_later_wait(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a later call in the function waits for the device or for all ranks."""
    function = module.scope(call)
    return any(
        module.scope(wait) is function and wait.lineno > call.lineno
        for name in ("wait", "synchronize", "barrier")
        for wait in module.methods.get(name, ())
    )


def _of_a_helper(check: CheckContext) -> Iterator[Problem]:
    """Yield calls, as statements, of project functions that return a reduced copy of their argument."""
    module = check.module
    for name in sorted(module.methods):
        if "reduce" not in name and "gather" not in name:
            continue
        for call in module.methods[name]:
            if not isinstance(module.parents.get(call), ast.Expr) or not call.args:
                continue
            target = resolve_callee(module, call)
            if target is not None and isinstance(target.node, Function) and _gives_a_copy(target.module, target.node):
                yield check.problem(
                    "DT044", call, f"`{name}` returns what it reduces, and leaves its argument as it was: the result "
                    "is thrown away",
                )  # fmt: skip


def _gives_a_copy(module: SourceFile, function: Function) -> bool:
    """Return whether a function only reduces a clone of its parameter and returns it."""
    results = module.return_values.get(function, [])
    if not results:
        return False
    parameters = {one.arg for one in function.args.args}
    reduced = {
        format_dotted_name(call.args[0])
        for call in module.calls_of("torch.distributed.all_reduce", "torch.distributed.reduce")
        if call.args and module.scope(call) is function
    }
    if not reduced or reduced & parameters:
        return False
    for name in reduced:
        bound = [
            binding.value for binding in module.bindings.get((function, name or ""), ()) if binding.value is not None
        ]
        if not bound or not isinstance(bound[0], ast.Call) or read_last_name(bound[0].func) != "clone":
            return False
    return all(isinstance(part, ast.Name) and part.id in reduced for part in results)


CHECKS = (check_on_the_cpu, check_thrown_away)
