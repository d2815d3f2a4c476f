"""Rules about FSDP's own arguments and recomputation: DT048, DT050, DT051."""

from __future__ import annotations

from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.model import Problem
from dtctl.lint.source_file import key, keyword

_POLICIES = {
    "size_based_auto_wrap_policy": "min_num_params",
    "transformer_auto_wrap_policy": "transformer_layer_cls",
    "lambda_auto_wrap_policy": "lambda_fn",
}
_NEED_A_SETTING = ("transformer_auto_wrap_policy", "lambda_auto_wrap_policy")
"""Policies whose setting has no default."""
_CALLED = frozenset("module recurse nonwrapped_numel".split())
_CHECKPOINTS = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")


def policy_called_at_once(check: Check) -> Iterator[Problem]:
    """DT048."""
    module = check.module
    for name, setting in _POLICIES.items():
        for call in module.calls_of(f"torch.distributed.fsdp.wrap.{name}"):
            given = {argument.arg for argument in call.keywords}
            if call.args or None in given or given & _CALLED:
                continue
            yield check.problem(
                "DT048", call, f"{name} is called here, without the module that it decides on: TypeError",
                fix=f"functools.partial({name}, {setting}=...)",
            )  # fmt: skip


def policy_without_its_setting(check: Check) -> Iterator[Problem]:
    """DT048 of a policy that FSDP is given as it is, although it needs a setting."""
    module = check.module
    for call in module.calls_of(names.FSDP):
        policy = keyword(call, "auto_wrap_policy")
        if policy is None:
            continue
        package, _, name = (module.name(policy) or "").rpartition(".")
        if name in _NEED_A_SETTING and package == "torch.distributed.fsdp.wrap":
            yield check.problem(
                "DT048", policy, f"{name} is given as it is, and FSDP calls it without {_POLICIES[name]}: TypeError",
                fix=f"functools.partial({name}, {_POLICIES[name]}=...)",
            )  # fmt: skip


def to_fully_shard(check: Check) -> Iterator[Problem]:
    """DT050."""
    module = check.module
    calls = module.calls_of(names.FSDP)
    if calls and not module.calls_of(names.FULLY_SHARD):
        yield check.problem(
            "DT050", calls[0], "FullyShardedDataParallel is the older FSDP; fully_shard is its successor"
        )


def reentrant_by_default(check: Check) -> Iterator[Problem]:
    """DT051."""
    module = check.module
    for call in module.calls_of(*_CHECKPOINTS)[:1] if _all_silent(check) else ():
        yield check.problem("DT051", call, f"`{key(call.func)}` without use_reentrant: torch warns, and will refuse it")


def _all_silent(check: Check) -> bool:
    """Return whether no call of a file sets the variant: a file with one that does takes it into account."""
    calls = check.module.calls_of(*_CHECKPOINTS)
    return not any(argument.arg in (None, "use_reentrant") for call in calls for argument in call.keywords)


CHECKS = (policy_called_at_once, policy_without_its_setting, to_fully_shard, reentrant_by_default)
