"""Rules about the training step: DT005, DT008, DT031, DT032."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import CheckContext
from dtctl.lint.model import Problem
from dtctl.lint.ranks import is_launcher_code, is_single_process_code, list_rank_guards, mentions_rank, rank_kind
from dtctl.lint.source_file import (
    Function,
    SourceFile,
    find_argument,
    find_callers,
    find_keyword_value,
    name_other_lines,
    read_constant_value,
    read_last_name,
    read_node_position,
)
from dtctl.lint.wraps import list_model_wraps

_SEEDS = ("seed_everything", "fix_random_seeds", "fix_random_seed", "set_seed", "set_random_seed", "setup_seed")
_RANDOM = re.compile(r"\bDropout|\bdropout|\bRandom[A-Z]|\brandom\.|torch\.rand|RandAugment|shuffle=True|np\.random")


def check_batch_norm(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT005: BatchNorm under DDP."""
    module = check.module
    if not any(wrap.kind == "ddp" for wrap in list_model_wraps(module)):
        return
    if check.project.has_text(module, re.compile("SyncBatchNorm|sync_bn")):
        return
    for name in sorted(module.calls):
        if re.match(
            r"torch\.nn\.BatchNorm[123]d\Z|torchvision\.models\.(?:resnet|resnext|mobilenet|densenet)\w*\Z", name
        ):
            yield check.problem("DT005", module.calls[name][0], "BatchNorm under DDP: each GPU has its own statistics")
            return


def check_same_seed(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT008: one seed for all ranks."""
    module = check.module
    wraps = list_model_wraps(module)
    for wrap in wraps:
        synced = find_keyword_value(wrap.call, "init_sync")
        if synced is None or read_constant_value(synced) is not False:
            continue
        if not check.project.methods(module, "manual_seed"):
            yield check.problem(
                "DT008", synced, "init_sync=False without a seed: every rank trains a different model", severity="error"
            )
    seeds = _list_seed_calls(module)
    if not seeds or not (wraps or check.project.distributed(module)) or check.project.framework_has_loop(module):
        return
    if not check.project.has_text(module, _RANDOM) or "device_specific" in module.text:
        return
    numbers = [number for call in seeds if (number := find_argument(call, "seed", 0)) is not None]
    if any(mentions_rank(module, number) for number in numbers):
        yield from _check_seed_of_local_rank(check, numbers)
        return
    values = module.values(numbers[0]) if numbers else []
    if values and all(_is_same_seed(value) for value in values):
        yield check.problem(
            "DT008", seeds[0], "all ranks have the same seed: dropout and augmentation are the same on all of them"
        )


def _list_seed_calls(module: SourceFile) -> list[ast.Call]:
    """Return the calls that set a seed in the ranks; for helpers of this file, their calls without those in them."""
    seeds = [
        *module.calls_of("torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"),
        *(call for name in _SEEDS for call in module.methods.get(name, ())),
    ] or module.calls_of("random.seed", "numpy.random.seed")
    seeds = [call for call in seeds if not is_launcher_code(module, call) and not is_single_process_code(module, call)]
    # Seeds of a dimension of parallelism, and those after which the earlier state returns, are meant.
    if "set_rng_state" in module.text:
        seeds = [call for call in seeds if "set_rng_state" not in ast.unparse(module.scope(call))]
    seeds = [call for call in seeds if "parallel" not in ast.unparse(call)]
    helpers = {getattr(module.scope(call), "name", "") for call in seeds} & set(_SEEDS)
    return [call for call in seeds if read_last_name(call.func) in helpers] or seeds


def _check_seed_of_local_rank(check: CheckContext, numbers: list[ast.expr]) -> Iterator[Problem]:
    """Yield a seed that depends on the local rank alone."""
    parts = [part for number in numbers for part in ast.walk(number) if isinstance(part, ast.expr)]
    kinds = {part: kind for part in parts if (kind := rank_kind(check.module, part))}
    if set(kinds.values()) == {"local"} and not check.cluster.single_node:
        yield check.problem(
            "DT008",
            next(iter(kinds)),
            "the seed is that of the local rank: rank 0 of every node has the same, and so on",
            fix="take the global rank",
        )


def _is_same_seed(value: ast.expr) -> bool:
    """Return whether a value is a number that is written out, or has the name of a seed."""
    return isinstance(read_constant_value(value), int) or bool(re.search(r"(?i)(?:^|_)seed$", read_last_name(value)))


def check_clipped_scaled(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT031: clipped before unscale_."""
    module = check.module
    for clip in module.methods.get("clip_grad_norm_", []) + module.methods.get("clip_grad_value_", []):
        scope = module.scope(clip)
        scaled = [
            call
            for call in module.methods.get("backward", ())
            if re.search(r"\.scale\(.*\)\.backward$", ast.unparse(call.func))
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


def check_waits_each_step(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT032: wait in every step."""
    module = check.module
    names = ("item", "cpu", "tolist")
    calls = [*(call for name in names for call in module.methods.get(name, ())),
             *module.calls_of("torch.cuda.synchronize")]  # fmt: skip
    for step in find_step_code(module) if calls else ():
        waiting = [
            call
            for call in sorted(calls, key=read_node_position)
            if _is_waiting_for_gpu(module, call)
            and module.is_node_within(call, step)
            and _in_each_step(module, call, step)
            and next(list_rank_guards(module, call), None) is None
        ]
        if waiting:
            first = waiting[0]
            item = isinstance(first.func, ast.Attribute) and first.func.attr == "item"
            also = name_other_lines(sorted({call.lineno for call in waiting} - {first.lineno}))
            what = ".item()" if item else ast.unparse(first)
            yield check.problem("DT032", first, f"`{what}` in every step makes the processor wait for the GPU{also}")


def _is_waiting_for_gpu(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a call waits for the GPU, other than the item of a number that was drawn on the CPU."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("item", "cpu", "tolist"):
        return True
    if call.func.attr != "item":
        above = module.parents.get(call)
        read_on = isinstance(above, ast.Attribute) and above.attr in ("item", "tolist")  # which waits, too
        return _RESULT.search(ast.unparse(call.func.value).lower()) is not None and not read_on
    drawn = isinstance(call.func.value, ast.Call) and find_keyword_value(call.func.value, "device") is None
    owner = module.name(call.func.value.func) if isinstance(call.func.value, ast.Call) else None
    return not call.args and not (drawn and owner in ("torch.randint", "torch.rand", "torch.randn", "torch.randperm"))


def find_step_code(module: SourceFile) -> list[ast.AST]:
    """Return code that runs in every step: loops around a backward pass, and functions with one that a loop calls."""
    found: dict[ast.AST, None] = {}
    for backward in module.methods.get("backward", ()):
        function = module.scope(backward)
        loop = module.find_enclosing_node(backward, (ast.For, ast.While))
        if loop is not None and module.scope(loop) is function:
            found[loop] = None
            outer = module.find_enclosing_node(loop, (ast.For, ast.While))
            over = ast.unparse(loop.target) + ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
            if re.search(r"micro|accum", over) and outer is not None and module.scope(outer) is function:
                found[outer] = None
        elif isinstance(function, Function) and function.name != "backward":
            callers = find_callers(module, function)[:8]
            loops = [(caller, caller.find_enclosing_node(call, (ast.For, ast.While))) for caller, call in callers]
            for caller, around in loops:
                if around is not None and caller is module:
                    found[around] = None
            if _STEP.search(function.name) or any(around is not None for _, around in loops):
                found[function] = None
    for name in module.functions if module.methods.get("backward") and not module.is_test_file else ():
        if _STEP.search(name):
            found |= dict.fromkeys(module.functions[name])
    return list(found)


_STEP = re.compile(r"(?:^|_)(?:train|training|run|optimi[sz]ation)_(?:step|batch|iteration|iter)$")
"""Pattern of names of functions that are one step, regardless of the caller."""
_RESULT = re.compile(r"loss|\bacc\b|accuracy|pred|output|logits|correct")
"""Pattern of values that a step computes on the GPU."""
_EVERY_STEP = re.compile(
    r"^[^<>]*% [\w.]*accum\w* == 0$|\.sync_gradients$"
    r"|^(?:not )?(?:torch\.cuda\.is_available\(\)|(?:self\.)?(?:use_)?(?:cuda|gpu)"
    r"|(?:self\.)?device(?:\.type|_type)? == .cuda.)$"
)
"""Pattern of a condition that holds in all steps of a training run on GPUs, or in all updates."""


def _in_each_step(module: SourceFile, call: ast.Call, step: ast.AST) -> bool:
    """Return whether every step reaches a call, without a condition or a loop over other batches in between."""
    first = min((backward.lineno for backward in module.find_calls_below(step, "backward")), default=0)
    leaves = [one for one in step.body if isinstance(one, ast.If)] if isinstance(step, Function) else []
    if any(isinstance(one.body[-1], ast.Return) and first < one.lineno < call.lineno for one in leaves):
        return False  # `if not should_log(): return`
    return module.scope(call) in (step, module.scope(step)) and not any(
        (isinstance(parent, ast.If | ast.While) and not _EVERY_STEP.search(ast.unparse(parent.test)))
        or (isinstance(parent, ast.For) and re.search(r"loader|batches|data", ast.unparse(parent.iter)))
        for parent, _ in module.chain(call)
        if parent is not step and module.is_node_within(parent, step)
    )


CHECKS = (check_batch_norm, check_same_seed, check_clipped_scaled, check_waits_each_step)
