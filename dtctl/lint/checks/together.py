"""Rules about calls that all ranks have to make together: DT011, DT012, DT036."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.model import Problem
from dtctl.lint.ranks import RankGuard, guards
from dtctl.lint.source_file import key, keyword
from dtctl.lint.wraps import wrapped, wraps

NEW_GROUP = "torch.distributed.new_group"


def _alone(check: Check, call: ast.Call, others_of_kind: list[ast.Call]) -> RankGuard | None:
    """The condition under which only some ranks make a call; None if all make it, here or in another place."""
    module = check.module
    condition = next((candidate for candidate in guards(module, call) if candidate.sure), None)
    if condition is None:
        return None
    scope = module.scope(call)
    for other in others_of_kind:
        if other is not call and module.scope(other) is scope:
            other_condition = next(guards(module, other), None)
            if other_condition is not None and other_condition.at_zero != condition.at_zero:
                return None
    return condition


def _ranks_of(condition: RankGuard) -> str:
    if condition.rank == "local":
        return "local rank 0 of each node" if condition.at_zero else "only some ranks of each node"
    return "rank 0 alone" if condition.at_zero else "other ranks than 0 only"


def collective_by_some(check: Check) -> Iterator[Problem]:
    """DT011."""
    module = check.module
    for name in names.COLLECTIVES:
        calls = module.calls.get(name, [])
        for call in calls:
            if keyword(call, "group") is not None or _takes_a_group(name, call):
                continue
            condition = _alone(check, call, calls)
            if condition is not None and not condition.early:
                short = name.rpartition(".")[2]
                yield check.problem("DT011", call, f"{short} is called by {_ranks_of(condition)}, and waits for all")
    yield from _of_accelerate(check)
    yield from _indirectly(check)


def _of_accelerate(check: Check) -> Iterator[Problem]:
    """Methods of an Accelerator."""
    module = check.module
    for name in ("wait_for_everyone", "gather", "gather_for_metrics", "reduce") if "accelerate" in module.text else ():
        calls = [call_of_name for call_of_name in module.methods.get(name, ()) if _is_accelerator(check, call_of_name)]
        for call in calls:
            condition = _alone(check, call, calls)
            if condition is not None and not condition.early:
                yield check.problem("DT011", call, f"{name} is called by {_ranks_of(condition)}, and waits for all")


def _is_accelerator(check: Check, call: ast.Call) -> bool:
    """Whether a method is that of an accelerate.Accelerator."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    bound = [binding.value for binding in check.module.lookup(owner)] if owner is not None else []
    return bool(bound) and all(
        isinstance(binding, ast.Call) and (check.module.name(binding.func) or "").startswith("accelerate.")
        for binding in bound
    )


def _takes_a_group(name: str, call: ast.Call) -> bool:
    """Whether the group is given by position."""
    most = {"barrier": 0, "all_reduce": 2, "broadcast": 2, "all_gather": 2, "reduce": 3, "gather": 3, "scatter": 3}
    return len(call.args) > most.get(name.rpartition(".")[2], 3)


def _indirectly(check: Check) -> Iterator[Problem]:
    """Functions that make a collective, called by some ranks."""
    module = check.module
    if not module.trains:
        return
    local = {
        name
        for name, qualified in module.aliases.items()
        if qualified.startswith(".") or not qualified.startswith("torch")
    }
    for name in (local | set(module.functions)) & set(module.methods):
        calls = module.methods[name]
        for call in calls:
            condition = _alone(check, call, calls)
            if condition is None or condition.early:
                continue
            collective = check.project.collective_called(module, call)
            if collective:
                message = f"`{key(call.func)}` calls {collective}, and is called by {_ranks_of(condition)}"
                yield check.problem("DT011", call, message, severity="warning")


def wrapped_by_some(check: Check) -> Iterator[Problem]:
    """DT012."""
    module = check.module
    for name in (*names.WRAPPERS, *names.STATE_COLLECTIVES):
        calls = module.calls.get(name, [])
        for call in calls:
            condition = _alone(check, call, calls)
            if condition is not None and keyword(call, "process_group") is None:
                short = name.rpartition(".")[2]
                yield check.problem("DT012", call, f"{short} is called by {_ranks_of(condition)}, and waits for all")
    sharded = any(wrap.kind != "ddp" for wrap in wraps(module))
    for name in ("full_tensor", "state_dict", "clip_grad_norm_") if module.trains else ():
        calls = [
            call_of_name
            for call_of_name in module.methods.get(name, [])
            if isinstance(call_of_name.func, ast.Attribute)
        ]
        for call in calls:
            if name != "full_tensor" and not (sharded and _sharded(check, call)):
                continue
            condition = _alone(check, call, calls)
            if condition is not None:
                yield check.problem(
                    "DT012", call, f"{name} gathers from all ranks, and is called by {_ranks_of(condition)}"
                )


def _sharded(check: Check, call: ast.Call) -> bool:
    """Whether a method is that of a model in shards."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    wrap = wrapped(check.module, owner, call)
    if wrap is None:
        wrap = next(
            (
                wrapper
                for wrapper in wraps(check.module)
                if wrapper.kind == "fully_shard"
                and wrapper.target == key(owner)
                and check.module.dominates(wrapper.call, call)
                and wrapper.call.lineno < call.lineno
            ),
            None,
        )
    return wrap is not None and wrap.kind == "fsdp"


def group_of_some(check: Check) -> Iterator[Problem]:
    """DT036."""
    calls = check.module.calls.get(NEW_GROUP, [])
    for call in calls:
        condition = _alone(check, call, [])
        if condition is not None and keyword(call, "use_local_synchronization") is None:
            yield check.problem("DT036", call, "new_group is called by members only, and every rank has to call it")


CHECKS = (collective_by_some, wrapped_by_some, group_of_some)
