"""Rules about calls that all ranks must make together: DT011, DT012, DT036."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.collectives import collective_called, find_forward_kind, takes_a_group
from dtctl.lint.flow import find_called_function
from dtctl.lint.model import Problem
from dtctl.lint.ranks import RankGuard, is_single_process_code, list_rank_guards
from dtctl.lint.source_file import SourceFile, find_keyword_value, format_dotted_name
from dtctl.lint.wraps import Kind, can_be_wrapped, find_model_wrap, list_model_wraps

NEW_GROUP = "torch.distributed.new_group"
_OF_TORCH = frozenset("to cuda cpu item append get items keys values format join print len range int float str".split())


def _find_partial_call_guard(check: CheckContext, call: ast.Call, others_of_kind: list[ast.Call]) -> RankGuard | None:
    """Return the condition under which only some ranks make a call; None if all make it, here or elsewhere."""
    module = check.module
    condition = next((candidate for candidate in list_rank_guards(module, call) if candidate.sure), None)
    if condition is None or is_single_process_code(module, call):
        return None
    scope = module.scope(call)
    for other in others_of_kind:
        if other is not call and module.scope(other) is scope:
            other_condition = next(list_rank_guards(module, other), None)
            if other_condition is not None and other_condition.at_zero != condition.at_zero:
                return None
    return condition


def _ranks_of(condition: RankGuard) -> str:
    if condition.rank == "local":
        return "local rank 0 of each node" if condition.at_zero else "only some ranks of each node"
    return "rank 0 alone" if condition.at_zero else "only ranks other than 0"


def check_collective_by_some(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT011: collective by some ranks."""
    module = check.module
    for name in names.COLLECTIVES:
        calls = module.calls.get(name, [])
        for call in calls:
            if takes_a_group(name, call):
                continue
            condition = _find_partial_call_guard(check, call, calls)
            if condition is not None and not condition.early:
                short = name.rpartition(".")[2]
                yield check.problem("DT011", call, f"{short} is called by {_ranks_of(condition)}, and waits for all")
    yield from _of_accelerate(check)
    yield from _check_indirect_collectives(check)
    yield from _forward_passes(check)
    yield from _check_backward_passes(check)


def _forward_passes(check: CheckContext) -> Iterator[Problem]:
    """Yield forward passes of wrapped models that only some ranks run."""
    module = check.module
    if check.project.uses_framework(module) or not any(check.project.calls(module, name) for name in names.WRAPPERS):
        return
    for name in sorted(module.methods):
        for call in module.methods[name]:
            condition = next((one for one in list_rank_guards(module, call) if one.sure), None)
            if condition is None or condition.early or not isinstance(call.func, ast.Name | ast.Attribute):
                continue
            found = find_forward_kind(module, call)
            if found is None or _find_partial_call_guard(check, call, module.methods[name]) is None:
                continue
            kind, sure = found
            what = "DDP" if kind == "ddp" else "sharded"
            waits = "waits for all if the model has buffers" if kind == "ddp" else "waits for all"
            yield check.problem(
                "DT011", call, f"the forward pass of a {what} model is made by {_ranks_of(condition)}, and {waits}",
                severity="warning" if kind == "ddp" or not sure else None,
                fix="call the model's .module, or evaluate on all ranks" if kind == "ddp" else None,
            )  # fmt: skip


def _check_backward_passes(check: CheckContext) -> Iterator[Problem]:
    """Yield backward passes of wrapped models that only some ranks run, though gradients are exchanged in them."""
    module = check.module
    if check.project.uses_framework(module) or not any(check.project.calls(module, name) for name in names.WRAPPERS):
        return
    for call in module.methods.get("backward", ()):
        condition = next((one for one in list_rank_guards(module, call) if one.sure), None)
        if condition is None or condition.early or not isinstance(call.func, ast.Attribute):
            continue
        if _find_partial_call_guard(check, call, module.methods["backward"]) is None:
            continue
        found = _run_for(module, call.func.value, 4)
        if found is not None:
            kind, sure = found
            what = "DDP" if kind == "ddp" else "sharded"
            yield check.problem(
                "DT011", call,
                f"the backward pass of a {what} model is made by {_ranks_of(condition)}, and waits for all",
                severity=None if sure and condition.sure_not else "warning",
            )  # fmt: skip


def _run_for(module: SourceFile, value: ast.expr, depth: int) -> tuple[Kind, bool] | None:
    """Return the kind of the wrapped model that a loss comes from; None if it is not known."""
    for one in (value, *module.values(value)):
        for part in ast.walk(one):
            if isinstance(part, ast.Call) and (found := find_forward_kind(module, part)) is not None:
                return found
            if depth and isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part is not value:
                found = _run_for(module, part, depth - 1)
                if found is not None:
                    return found
    return None


def _of_accelerate(check: CheckContext) -> Iterator[Problem]:
    """Yield methods of an Accelerator that only some ranks call."""
    module = check.module
    for name in ("wait_for_everyone", "gather", "gather_for_metrics", "reduce") if "accelerate" in module.text else ():
        calls = [call_of_name for call_of_name in module.methods.get(name, ()) if _is_accelerator(check, call_of_name)]
        for call in calls:
            condition = _find_partial_call_guard(check, call, calls)
            if condition is not None and not condition.early:
                yield check.problem("DT011", call, f"{name} is called by {_ranks_of(condition)}, and waits for all")


def _is_accelerator(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a method belongs to an accelerate.Accelerator."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    bound = [binding.value for binding in check.module.lookup(owner)] if owner is not None else []
    return bool(bound) and all(
        isinstance(binding, ast.Call) and (check.module.name(binding.func) or "").startswith("accelerate.")
        for binding in bound
    )


def _check_indirect_collectives(check: CheckContext) -> Iterator[Problem]:
    """Yield functions that run a collective and that only some ranks call."""
    module = check.module
    if not module.trains:
        return
    for name in sorted(module.methods):
        calls = module.methods[name]
        for call in calls:
            if name in _OF_TORCH or find_called_function(module, call) is None:
                continue
            condition = _find_partial_call_guard(check, call, calls)
            if condition is None or condition.early:
                continue
            collective = collective_called(module, call)
            if collective:
                message = (
                    f"`{format_dotted_name(call.func)}` calls {collective}, and is called by {_ranks_of(condition)}"
                )
                yield check.problem("DT011", call, message, severity="warning")


def check_wrapped_by_some(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT012: wrapped or gathered by some ranks."""
    module = check.module
    for name in (*names.WRAPPERS, *names.STATE_COLLECTIVES):
        calls = module.calls.get(name, [])
        for call in calls:
            condition = _find_partial_call_guard(check, call, calls)
            if condition is not None and find_keyword_value(call, "process_group") is None:
                short = name.rpartition(".")[2]
                yield check.problem("DT012", call, f"{short} is called by {_ranks_of(condition)}, and waits for all")
    sharded = any(wrap.kind != "ddp" for wrap in list_model_wraps(module))
    for name in ("full_tensor", "state_dict", "clip_grad_norm_") if module.trains else ():
        calls = [one for one in module.methods.get(name, []) if isinstance(one.func, ast.Attribute)]
        for call in calls:
            sure = name == "full_tensor" or (sharded and _is_sharded_model_call(check, call))
            if not sure and not _maybe_sharded(check, call):
                continue
            condition = _find_partial_call_guard(check, call, calls)
            if condition is not None:
                yield check.problem(
                    "DT012", call, f"{name} gathers from all ranks, and is called by {_ranks_of(condition)}",
                    severity=None if sure else "warning",
                )  # fmt: skip


def _is_sharded_model_call(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a method certainly belongs to a model that FullyShardedDataParallel wraps."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    wrap = find_model_wrap(check.module, owner, call)
    return wrap is not None and wrap.kind == "fsdp"


def _maybe_sharded(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a method belongs to a model that is sharded for some of its origins."""
    return isinstance(call.func, ast.Attribute) and can_be_wrapped(check.module, call.func.value, "fsdp")


def check_group_of_some(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT036: group made by its members only."""
    calls = check.module.calls.get(NEW_GROUP, [])
    for call in calls:
        condition = _find_partial_call_guard(check, call, [])
        if condition is not None and find_keyword_value(call, "use_local_synchronization") is None:
            yield check.problem("DT036", call, "new_group is called by members only, and every rank has to call it")


CHECKS = (check_collective_by_some, check_wrapped_by_some, check_group_of_some)
