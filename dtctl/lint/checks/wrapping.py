"""Rules about wrapping a model: DT001, DT002, DT010, DT021 to DT024, DT026."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.flow import find_value_origins
from dtctl.lint.model import Problem
from dtctl.lint.signatures import DDP_ATTRIBUTES, KEYWORDS
from dtctl.lint.source_file import (
    SourceFile,
    find_keyword_value,
    format_dotted_name,
    read_assigned_name,
    read_constant_value,
)
from dtctl.lint.wraps import ModelWrap, can_be_wrapped, find_model_wrap, list_model_wraps


def check_data_parallel(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT001: nn.DataParallel."""
    if not check.module.calls_of(names.DP):
        return
    both = any(name.endswith(".DistributedDataParallel") for name in check.module.calls) or any(
        check.project.calls(check.module, name) for name in names.WRAPPERS
    )
    for call in check.module.calls_of(names.DP)[:1]:
        yield check.problem(
            "DT001", call, "nn.DataParallel: one process drives all GPUs, and it cannot leave its node",
            severity="info" if both else None,
        )  # fmt: skip


def check_moved_after(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT002: moved after DDP."""
    module = check.module
    for call in module.methods["to"] + module.methods["cuda"]:
        inner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(inner, ast.Call) and module.name(inner.func) == names.DDP and _is_built_on_cpu(check, inner):
            yield check.problem("DT002", call, "the model is moved after it was wrapped in DDP")
    for wrap in list_model_wraps(module):
        if wrap.kind != "ddp" or wrap.target is None or _is_model_placed(check, wrap):
            continue
        for call in module.methods["to"] + module.methods["cuda"]:
            if (
                isinstance(call.func, ast.Attribute)
                and format_dotted_name(call.func.value) == wrap.target
                and call.lineno > wrap.call.lineno
                and module.scope(call) is module.scope(wrap.call)
                and find_model_wrap(module, call.func.value, call) == wrap
                and not (call.args and "float" in ast.unparse(call.args[0]))
            ):
                yield check.problem("DT002", call, f"`{wrap.target}` is moved after it was wrapped in DDP")
                break


def _is_built_on_cpu(check: CheckContext, wrap: ast.Call) -> bool:
    """Return whether the wrapped object is created in the call, by a class of torch or of this file, on the CPU."""
    argument = wrap.args[0] if wrap.args else None
    if not isinstance(argument, ast.Call) or not isinstance(argument.func, ast.Name | ast.Attribute):
        return False
    if re.search(r"device|cuda", ast.unparse(argument)):
        return False
    made = check.module.classes.get(format_dotted_name(argument.func) or "")
    if made is not None:
        return not re.search(r"\.to\(|\.cuda\(|device", ast.unparse(made))
    return (check.module.name(argument.func) or "").startswith("torch.nn.")


def _is_model_placed(check: CheckContext, wrap: ModelWrap) -> bool:
    """Return whether the model was moved to a device before it was wrapped."""
    module = check.module
    text = ast.unparse(wrap.call.args[0]) if wrap.call.args else ""
    if ".to(" in text or ".cuda(" in text or wrap.source is None:
        return not _is_built_on_cpu(check, wrap.call)
    for call in module.methods["to"] + module.methods["cuda"]:
        below = call.func.value if isinstance(call.func, ast.Attribute) else None
        if call.lineno > wrap.call.lineno or below is None or module.scope(call) is not module.scope(wrap.call):
            continue
        statement = module.statement(call)
        target = (
            format_dotted_name(statement.targets[0]) if isinstance(statement, ast.Assign) else format_dotted_name(below)
        )
        if target == wrap.source:
            return True
    return False


def check_unused_parameters(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT010: find_unused_parameters."""
    for wrap in list_model_wraps(check.module):
        value = find_keyword_value(wrap.call, "find_unused_parameters")
        if wrap.kind == "ddp" and read_constant_value(value) is True and value is not None:
            static_graph = read_constant_value(find_keyword_value(wrap.call, "static_graph")) is True
            message = "find_unused_parameters=True walks the graph of every step to look for unused parameters"
            if static_graph:
                message = "find_unused_parameters=True beside static_graph=True: the static graph finds them once"
            yield check.problem("DT010", value, message)


def check_ddp_attributes(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT021: attribute of a DDP model."""
    module = check.module
    targets = {wrap.target for wrap in list_model_wraps(module) if wrap.kind == "ddp" and wrap.target}
    if not targets or any(
        format_dotted_name(call.args[0]) in targets for call in module.methods.get("setattr", ()) if call.args
    ):
        return
    assigned = {
        (format_dotted_name(node.value), node.attr)
        for node in module.nodes_of(ast.Attribute)
        if not isinstance(node.ctx, ast.Load)
    }
    reported = set()
    for node in module.nodes_of(ast.Attribute):
        name = format_dotted_name(node.value)
        if name not in targets or node.attr in DDP_ATTRIBUTES or not isinstance(node.ctx, ast.Load):
            continue
        if node.attr.startswith("__") or (name, node.attr) in assigned:
            continue
        wrap = find_model_wrap(module, node.value, node)
        if wrap is None or wrap.kind != "ddp" or (name, node.attr) in reported or _asked_for(check, node):
            continue
        reported.add((name, node.attr))
        yield check.problem(
            "DT021", node, f"`{name}` is wrapped in DDP, which has no `{node.attr}`", fix=f"`{name}.module.{node.attr}`"
        )


def _asked_for(check: CheckContext, node: ast.Attribute) -> bool:
    """Return whether a condition around a node tests the type of the model: hasattr, isinstance."""
    return any(
        isinstance(parent, ast.If | ast.IfExp)
        and ("hasattr" in (text := ast.unparse(parent.test)) or "isinstance" in text)
        for parent, _ in check.module.chain(node)
    )


def check_prefixed_state(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT022: state with the prefix `module.`."""
    module = check.module
    saves = [call for name in module.methods for call in module.methods[name]
             if re.match(r"save_?(?:checkpoint|model|state|ckpt|snapshot|weights|on_master)", name)]  # fmt: skip
    for save in [*module.calls_of("torch.save"), *saves]:
        kept = [value for given in save.args[:1] for value in module.values(given)]
        states = [call for one in kept for call in module.find_calls_below(one, "state_dict")]
        for call in dict.fromkeys([*module.find_calls_below(save, "state_dict"), *states]):
            if not isinstance(call.func, ast.Attribute):
                continue
            wrap = find_model_wrap(module, call.func.value, call)
            name = format_dotted_name(call.func.value)
            if (wrap is not None and wrap.kind == "ddp") or (wrap is None and _prefixed_if_distributed(module, call)):
                yield check.problem(
                    "DT022", call, "every name in a DDP model's state begins with `module.`, and the bare model cannot "
                    "load it", fix=f"`{name}.module.state_dict()`",
                )  # fmt: skip


def _prefixed_if_distributed(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a model that is wrapped only with several ranks is saved directly."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = format_dotted_name(owner) if owner is not None else None
    if owner is None or name is None or not can_be_wrapped(module, owner, "ddp"):
        return False
    if any(
        isinstance(value.node, ast.Attribute) and value.node.attr == "module"
        for value in find_value_origins(module, owner)
    ):
        return False  # unwrapped where the model is wrapped
    return f"{name}.module" not in ast.unparse(module.statement(call))


def check_optimizer_before(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT023: optimizer before FSDP."""
    module = check.module
    for wrap in list_model_wraps(module):
        if wrap.kind == "ddp" or wrap.source is None:
            continue
        for call in module.methods["parameters"] + module.methods["named_parameters"]:
            above = module.parents.get(call)
            if (
                isinstance(call.func, ast.Attribute)
                and format_dotted_name(call.func.value) == wrap.source
                and isinstance(above, ast.Call)
                and (module.name(above.func) or "").startswith("torch.optim.")
                and module.dominates(module.statement(above), wrap.call)
                and above.lineno < wrap.call.lineno
                and not _made_again(check, above, wrap)
            ):
                wrapper_name = "fully_shard" if wrap.kind == "fully_shard" else "FSDP"
                yield check.problem(
                    "DT023",
                    above,
                    f"the optimizer is made before {wrapper_name}, which puts other parameters in their place",
                )


def _made_again(check: CheckContext, optimizer: ast.Call, wrap: ModelWrap) -> bool:
    """Return whether the optimizer's name gets another optimizer after the wrap."""
    target = read_assigned_name(check.module, optimizer)
    bound = check.module.bindings.get((check.module.scope(optimizer), target or ""), [])
    return any(binding.line > wrap.call.lineno for binding in bound)


def check_changed_after(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT024: parameters changed after DDP."""
    module = check.module
    for call in module.calls_of("torch.nn.SyncBatchNorm.convert_sync_batchnorm"):
        if call.args and (wrap := find_model_wrap(module, call.args[0], call)) is not None and wrap.kind == "ddp":
            yield check.problem("DT024", call, "BatchNorm layers are replaced after DDP has taken the parameters")
    for name in ("requires_grad_", "add_module", "register_parameter"):
        for call in module.methods.get(name, ()):
            if isinstance(call.func, ast.Attribute) and _of_ddp(check, call.func.value, call):
                yield check.problem("DT024", call, f"`{name}` after DDP has taken the parameters")
    for assign in module.nodes_of(ast.Assign):
        target = assign.targets[0]
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad" and isinstance(target.value, ast.Name):
            loop = _loop_over_parameters(check, target.value)
            for_all = isinstance(module.parents.get(assign), ast.For) and read_constant_value(assign.value) is False
            if isinstance(loop, ast.Name) and for_all:
                continue  # a model that is frozen as a whole has no gradients to exchange
            if loop is not None and _of_ddp(check, loop, assign) and not _in_a_step(check, assign):
                yield check.problem("DT024", assign, "parameters are frozen or thawed after DDP has taken them")
        elif (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Attribute)
            and target.value.attr == "module"
            and isinstance(assign.value, ast.Call)
            and (module.name(assign.value.func) or "").startswith("torch.nn.")
            and _of_ddp(check, target.value, assign)
        ):
            yield check.problem(
                "DT024", assign, f"`{ast.unparse(target)}` is replaced after DDP has taken the parameters"
            )


def _in_a_step(check: CheckContext, node: ast.AST) -> bool:
    """Return whether a loop around a node trains, so that the frozen part may be unfrozen in each step, as in a GAN."""
    module = check.module
    loops = [parent for parent, _ in module.chain(node) if isinstance(parent, ast.For | ast.While)]
    return any(module.find_calls_below(loop, "backward") for loop in loops) or len(
        {ast.unparse(one.value) for one in module.nodes_of(ast.Assign)
         if isinstance(one.targets[0], ast.Attribute) and one.targets[0].attr == "requires_grad"}
    ) > 1  # fmt: skip


def _loop_over_parameters(check: CheckContext, name: ast.Name) -> ast.expr | None:
    """Return `model` for a name in `for name in model.parameters()`; None for other names."""
    loop = check.module.find_enclosing_node(name, (ast.For,))
    while isinstance(loop, ast.For):
        if name.id in {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}:
            call = loop.iter
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and "parameters" in call.func.attr:
                return call.func.value
            return None
        loop = check.module.find_enclosing_node(loop, (ast.For,))
    return None


def _of_ddp(check: CheckContext, node: ast.expr, at: ast.AST) -> bool:
    """Return whether an expression is a DDP model, or a part of one."""
    while True:
        wrap = find_model_wrap(check.module, node, at)
        if wrap is not None:
            return wrap.kind == "ddp"
        if not isinstance(node, ast.Attribute):
            return False
        node = node.value


def check_unknown_keyword(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT026: argument that does not exist."""
    for call in check.module.calls_of("torch.cuda.nccl.is_available"):
        if not call.args:
            yield check.problem(
                "DT026", call, "torch.cuda.nccl.is_available needs tensors", fix="torch.distributed.is_nccl_available()"
            )
    for call in check.module.calls_of("torch.distributed.broadcast"):
        if len(call.args) == 1 and not {"src", "group_src", None} & {one.arg for one in call.keywords}:
            yield check.problem("DT026", call, "broadcast needs the rank that sends", fix="src=0")
    for name, allowed in KEYWORDS.items():
        for call in check.module.calls_of(name):
            for argument in call.keywords:
                if argument.arg is not None and argument.arg not in allowed:
                    short = name.rpartition(".")[2]
                    hint = "the time-out is an argument of init_process_group" if argument.arg == "timeout" else None
                    yield check.problem("DT026", argument, f"{short} has no argument `{argument.arg}`", fix=hint)


CHECKS = (
    check_data_parallel,
    check_moved_after,
    check_unused_parameters,
    check_ddp_attributes,
    check_prefixed_state,
    check_optimizer_before,
    check_changed_after,
    check_unknown_keyword,
)
