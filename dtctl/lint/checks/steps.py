"""Rules about the training step: DT005, DT008, DT031, DT032."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import Check
from dtctl.lint.model import Problem
from dtctl.lint.ranks import by_launcher, for_one_process, guards, mentions_rank
from dtctl.lint.source_file import Function, SourceFile, constant, key, keyword, position
from dtctl.lint.wraps import wraps

_SEEDS = ("seed_everything", "fix_random_seeds", "fix_random_seed", "set_seed", "set_random_seed", "setup_seed")
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
        *(call for name in _SEEDS for call in module.methods.get(name, ())),
    ] or module.calls_of("random.seed", "numpy.random.seed")
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
    if not seeds or not (wrappers or check.project.distributed(module)) or check.project.runs_loop(module):
        return
    if not check.project.says(module, _RANDOM) or "device_specific" in module.text:
        return
    seeds = [call for call in seeds if not by_launcher(module, call) and not for_one_process(module, call)]
    if not seeds:
        return
    helpers = {getattr(module.scope(call), "name", "") for call in seeds} & set(_SEEDS)
    called = [call for call in seeds if (key(call.func) or "").rpartition(".")[2] in helpers]
    seeds = called or seeds  # where a helper of the file is called, and not the line in it
    if any(call.args and mentions_rank(module, call.args[0]) for call in seeds):
        return
    call = seeds[0]
    values = module.values(call.args[0]) if call.args else []
    same = all(
        isinstance(constant(value), int) or re.search(r"(?i)(?:^|_)seed$", (key(value) or "").rpartition(".")[2])
        for value in values
    )
    if values and same:
        yield check.problem(
            "DT008", call, "all ranks have the same seed: dropout and augmentation are the same on all of them"
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
    calls = [*module.methods.get("item", ()), *module.calls_of("torch.cuda.synchronize")]
    for step in _steps(module) if calls else ():
        waiting = [
            call
            for call in sorted(calls, key=position)
            if _waits(module, call) and module.within(call, step) and _in_each_step(module, call, step)
            and next(guards(module, call), None) is None
        ]  # fmt: skip
        if waiting:
            first = waiting[0]
            item = isinstance(first.func, ast.Attribute) and first.func.attr == "item"
            lines = sorted({call.lineno for call in waiting} - {first.lineno})
            also = f" (also {', '.join(f'line {line}' for line in lines)})" if lines else ""
            what = ".item()" if item else ast.unparse(first)
            yield check.problem("DT032", first, f"`{what}` in every step makes the processor wait for the GPU{also}")


def _waits(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a call waits for the GPU: not the item of a number that was drawn on the processor."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "item":
        return True
    drawn = isinstance(call.func.value, ast.Call) and keyword(call.func.value, "device") is None
    owner = module.name(call.func.value.func) if isinstance(call.func.value, ast.Call) else None
    return not call.args and not (drawn and owner in ("torch.randint", "torch.rand", "torch.randn", "torch.randperm"))


def _steps(module: SourceFile) -> list[ast.AST]:
    """Return what is run in every step: loops around a backward pass, and functions with one that a loop calls."""
    found: dict[ast.AST, None] = {}
    for backward in module.methods.get("backward", ()):
        function = module.scope(backward)
        loop = module.enclosing(backward, (ast.For, ast.While))
        if loop is not None and module.scope(loop) is function:
            found[loop] = None
            outer = module.enclosing(loop, (ast.For, ast.While))
            over = ast.unparse(loop.target) + ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
            if re.search(r"micro|accum", over) and outer is not None and module.scope(outer) is function:
                found[outer] = None
        elif isinstance(function, Function) and function.name != "backward":
            callers = module.neighbours.callers(module, function) if module.neighbours is not None else []
            loops = [(caller, caller.enclosing(call, (ast.For, ast.While))) for caller, call in callers[:8]]
            for caller, around in loops:
                if around is not None and caller is module:
                    found[around] = None
            if _STEP.search(function.name) or any(around is not None for _, around in loops):
                found[function] = None
    return list(found)


_STEP = re.compile(r"(?:^|_)(?:train|training|run|optimi[sz]ation)_(?:step|batch|iteration|iter)$")
"""Names of functions that are one step, regardless of the caller."""
_EVERY_STEP = re.compile(
    r"^(?:not )?(?:torch\.cuda\.is_available\(\)|(?:self\.)?(?:use_)?(?:cuda|gpu)"
    r"|(?:self\.)?device(?:\.type|_type)? == .cuda.)$"
)
"""A condition that holds in all steps of a training on GPUs."""


def _in_each_step(module: SourceFile, call: ast.Call, step: ast.AST) -> bool:
    """Return whether every step comes to a call: no condition, and no loop over other batches, is between."""
    return module.scope(call) in (step, module.scope(step)) and not any(
        (isinstance(parent, ast.If | ast.While) and not _EVERY_STEP.match(ast.unparse(parent.test)))
        or (isinstance(parent, ast.For) and re.search(r"loader|batches|data", ast.unparse(parent.iter)))
        for parent, _ in module.chain(call)
        if parent is not step and module.within(parent, step)
    )


CHECKS = (batch_norm, same_seed, clipped_scaled, waits_each_step)
