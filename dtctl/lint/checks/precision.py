"""Rules about reduced precision and gradients in shards: DT039, DT049, DT061."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.flow import find_value_origins
from dtctl.lint.model import Problem
from dtctl.lint.source_file import (
    SourceFile,
    find_argument,
    find_keyword_value,
    format_dotted_name,
    list_contexts,
    read_constant_value,
)
from dtctl.lint.wraps import model_kinds

_SCALERS = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler",
            "torch.amp.grad_scaler.GradScaler")  # fmt: skip
_AUTOCAST = ("torch.cuda.amp.autocast", "torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
_HALF = ("torch.float16", "torch.half")


def check_scaler_of_one_rank(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT039: GradScaler with FSDP."""
    module = check.module
    scalers = module.calls_of(*_SCALERS)
    if not scalers or not check.project.calls(module, names.FSDP):
        return
    sharded = check.project.has_text(module, "ShardedGradScaler")
    ddp = check.project.calls(module, names.DDP)
    for call in scalers if not sharded else ():
        enabled = find_keyword_value(call, "enabled")
        if read_constant_value(enabled) is False and enabled is not None:
            continue
        yield check.problem(
            "DT039", call,
            "GradScaler looks for infinities in the gradients of its own shard, and ranks skip different steps",
            severity="info" if ddp or enabled is not None else None,
        )  # fmt: skip


def check_half_without_scaler(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT049: float16 without a gradient scaler."""
    module = check.module
    if (
        not check.project.is_distributed_training(module)
        or check.project.uses_framework(module)
        or not _has_backward_pass(check)
    ):
        return
    if check.project.has_text(module, re.compile("GradScaler|loss_scale")):
        return
    for call in module.calls_of(*_AUTOCAST):
        if _is_half(module, call) and _around_training(module, call):
            yield check.problem("DT049", call, "float16 without a GradScaler: small gradients become 0")
    for call in module.calls_of("torch.distributed.fsdp.MixedPrecision", "torch.distributed.fsdp.MixedPrecisionPolicy"):
        dtype = find_keyword_value(call, "param_dtype")
        if dtype is not None and module.name(dtype) in _HALF:
            yield check.problem("DT049", call, "float16 parameters without a gradient scaler: small gradients become 0")


def _has_backward_pass(check: CheckContext) -> bool:
    return bool(check.module.methods.get("backward"))


def _is_half(module: SourceFile, call: ast.Call) -> bool:
    """Return whether an autocast certainly computes in float16: by its argument, or as CUDA's default."""
    given = {argument.arg for argument in call.keywords}
    if None in given:
        return False
    enabled = find_keyword_value(call, "enabled")
    if enabled is not None and read_constant_value(enabled) is not True:
        return False
    name = (module.name(call.func) or "").removeprefix("torch.")
    positional = name in ("autocast", "amp.autocast")
    dtype = find_argument(call, "dtype", 1) if positional else find_keyword_value(call, "dtype")
    if dtype is not None:
        values = find_value_origins(module, dtype)
        return bool(values) and all(value.module.name(value.node) in _HALF for value in values)
    if name.startswith("cuda"):
        return not call.args or read_constant_value(call.args[0]) is True
    device = find_argument(call, "device_type", 0)
    return read_constant_value(device) == "cuda"


def _around_training(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a backward pass follows in the function, and nothing disables gradients."""
    function = module.scope(call)
    contexts = " ".join(ast.unparse(context) for context in list_contexts(module, call))
    quiet = "no_grad" in contexts or "inference_mode" in contexts
    return not quiet and any(
        module.scope(one) is function and one.lineno >= call.lineno for one in module.methods["backward"]
    )


def check_clipped_by_shard(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT061: clipped by the norm of a shard."""
    module = check.module
    for call in module.calls_of("torch.nn.utils.clip_grad_norm_"):
        parameters = call.args[0] if call.args else find_keyword_value(call, "parameters")
        if not isinstance(parameters, ast.Call) or not isinstance(parameters.func, ast.Attribute):
            continue
        kinds = model_kinds(module, parameters.func.value) if parameters.func.attr == "parameters" else set()
        asked = any(
            isinstance(parent, ast.If)
            and re.search(r"isinstance|hasattr|fsdp|strategy|shard", ast.unparse(parent.test).lower())
            for parent, _ in module.chain(call)
        )
        if "fsdp" in kinds and not asked and not _one_shard(check):
            name = format_dotted_name(parameters.func.value)
            yield check.problem(
                "DT061", call, f"each rank clips by the norm of its own shard of `{name}`",
                fix=f"`{name}.clip_grad_norm_(...)`", severity=None if kinds == {"fsdp"} else "warning",
            )  # fmt: skip


def _one_shard(check: CheckContext) -> bool:
    """Return whether a wrap of the program keeps whole parameters, so that the norm may be right."""
    return check.project.has_text(check.module, "NO_SHARD")


CHECKS = (check_scaler_of_one_rank, check_half_without_scaler, check_clipped_by_shard)
