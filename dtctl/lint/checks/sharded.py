"""Rules about the arguments of FSDP: DT048, DT050."""

from __future__ import annotations

from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.model import Problem
from dtctl.lint.source_file import find_keyword_value

_POLICIES = {
    "size_based_auto_wrap_policy": "min_num_params",
    "transformer_auto_wrap_policy": "transformer_layer_cls",
    "lambda_auto_wrap_policy": "lambda_fn",
}
_NEED_A_SETTING = ("transformer_auto_wrap_policy", "lambda_auto_wrap_policy")
"""Policies with a setting that has no default."""
_CALLED = frozenset("module recurse nonwrapped_numel".split())


def check_policy_called_at_once(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT048: wrap policy called at once."""
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


def check_policy_without_its_setting(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT048 for a policy that is passed to FSDP without the setting that it needs."""
    module = check.module
    for call in module.calls_of(names.FSDP):
        policy = find_keyword_value(call, "auto_wrap_policy")
        if policy is None:
            continue
        package, _, name = (module.name(policy) or "").rpartition(".")
        if name in _NEED_A_SETTING and package == "torch.distributed.fsdp.wrap":
            yield check.problem(
                "DT048", policy, f"{name} is given as it is, and FSDP calls it without {_POLICIES[name]}: TypeError",
                fix=f"functools.partial({name}, {_POLICIES[name]}=...)",
            )  # fmt: skip


def check_to_fully_shard(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT050: the older FSDP."""
    module = check.module
    calls = module.calls_of(names.FSDP)
    if calls and not module.calls_of(names.FULLY_SHARD):
        yield check.problem(
            "DT050", calls[0], "FullyShardedDataParallel is the older FSDP; fully_shard is its successor"
        )


CHECKS = (check_policy_called_at_once, check_policy_without_its_setting, check_to_fully_shard)
