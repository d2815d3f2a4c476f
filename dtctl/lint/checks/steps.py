"""Rules about the training step: DT005, DT008, DT031, DT032."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import Check
from dtctl.lint.model import Problem
from dtctl.lint.ranks import guards, mentions_rank
from dtctl.lint.source_file import constant, key, keyword
from dtctl.lint.wraps import wraps

_RANDOM = re.compile(r"\bDropout|\bdropout|\bRandom[A-Z]|\brandom\.|torch\.rand|RandAugment|shuffle=True|np\.random")


def batch_norm(check: Check) -> Iterator[Problem]:
    """DT005."""
    module = check.module
    if not any(wrap.kind == "ddp" for wrap in wraps(module)):
        return
    if check.project.says(module, re.compile("SyncBatchNorm|sync_bn")):
        return
    for name in sorted(module.calls):
        if re.match(
            r"torch\.nn\.BatchNorm[123]d\Z|torchvision\.models\.(?:resnet|resnext|mobilenet|densenet)\w*\Z", name
        ):
            yield check.problem("DT005", module.calls[name][0], "BatchNorm under DDP: each GPU has its own statistics")
            return


def same_seed(check: Check) -> Iterator[Problem]:
    """DT008."""
    module = check.module
    seeds = [
        *module.calls_of("torch.manual_seed", "torch.cuda.manual_seed_all"),
        *module.methods.get("seed_everything", ()),
    ]
    wrappers = wraps(module)
    for wrap in wrappers:
        synced = keyword(wrap.call, "init_sync")
        if synced is not None and constant(synced) is False and not check.project.methods(module, "manual_seed"):
            yield check.problem(
                "DT008",
                synced,
                "init_sync=False without a seed: every rank trains a different model",
                severity="error",
            )
    if not wrappers or not seeds or _RANDOM.search(module.text) is None or check.project.framework(module):
        return
    if any(call.args and mentions_rank(module, call.args[0]) for call in seeds):
        return
    call = seeds[0]
    values = module.values(call.args[0]) if call.args else []
    same = all(
        isinstance(constant(value), int) or (key(value) or "").rpartition(".")[2] in ("seed", "manual_seed")
        for value in values
    )
    if values and same:
        yield check.problem(
            "DT008", call, "all ranks have one seed: dropout and augmentation are the same on all of them"
        )


def clipped_scaled(check: Check) -> Iterator[Problem]:
    """DT031."""
    module = check.module
    for clip in module.methods.get("clip_grad_norm_", []) + module.methods.get("clip_grad_value_", []):
        scope = module.scope(clip)
        scaled = [
            call
            for call in module.methods.get("backward", ())
            if isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Call)
            and isinstance(call.func.value.func, ast.Attribute)
            and call.func.value.func.attr == "scale"
            and module.scope(call) is scope
            and call.lineno < clip.lineno
        ]
        steps = [
            call
            for call in module.methods.get("step", ())
            if "scaler" in ast.unparse(call.func) and module.scope(call) is scope and call.lineno > clip.lineno
        ]
        unscaled = [call for call in module.methods.get("unscale_", ()) if module.scope(call) is scope]
        if scaled and steps and not any(call.lineno < clip.lineno for call in unscaled):
            yield check.problem(
                "DT031", clip, "gradients are clipped while they are still multiplied by the loss scale"
            )


def waits_each_step(check: Check) -> Iterator[Problem]:
    """DT032."""
    module = check.module
    loops = [
        loop
        for call in module.methods.get("backward", ())
        if isinstance(loop := module.enclosing(call, (ast.For, ast.While)), ast.For | ast.While)
        and module.scope(loop) is module.scope(call)
    ]
    for loop in dict.fromkeys(loops):
        for call in module.methods.get("item", ()):
            if call.args or not module.within(call, loop) or module.enclosing(call, (ast.For, ast.While)) is not loop:
                continue
            if any(isinstance(parent, ast.If) for parent, _ in module.chain(call) if module.within(parent, loop)):
                continue
            if next(guards(module, call), None) is None:
                yield check.problem("DT032", call, "`.item()` in every step makes the processor wait for the GPU")
                break


CHECKS = (batch_norm, same_seed, clipped_scaled, waits_each_step)
