"""Rules about the training step: DT005, DT008, DT009, DT031, DT032."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.checks import Check
from dtctl.lint.model import Edit, Problem
from dtctl.lint.module import constant, key, keyword
from dtctl.lint.ranks import guards, mentions_rank
from dtctl.lint.wraps import wraps

_RANDOM = re.compile(r"\bDropout|\bdropout|\bRandom[A-Z]|\brandom\.|torch\.rand|RandAugment|shuffle=True|np\.random")
_ACCUMULATES = re.compile(r"no_sync|requires_gradient_sync|require_backward_grad_sync|\.accumulate\(|is_gradient_accum")


def batch_norm(check: Check) -> Iterator[Problem]:
    """DT005."""
    module = check.module
    if not any(wrap.kind == "ddp" for wrap in wraps(module)):
        return
    if any("SyncBatchNorm" in one.text or "sync_bn" in one.text for one in check.project.reach(module)):
        return
    for name in sorted(module.calls):
        if re.match(
            r"torch\.nn\.BatchNorm[123]d\Z|torchvision\.models\.(?:resnet|resnext|mobilenet|densenet)\w*\Z", name
        ):
            yield check.problem(
                "DT005", module.calls[name][0], "BatchNorm under DDP: each GPU has statistics of its own"
            )
            return


def same_seed(check: Check) -> Iterator[Problem]:
    """DT008."""
    module = check.module
    seeds = [
        *module.called("torch.manual_seed", "torch.cuda.manual_seed_all"),
        *module.methods.get("seed_everything", ()),
    ]
    found = wraps(module)
    for wrap in found:
        synced = keyword(wrap.call, "init_sync")
        if synced is not None and constant(synced) is False and not check.project.methods(module, "manual_seed"):
            yield check.problem(
                "DT008",
                synced,
                "init_sync=False without a seed: every rank trains a model of its own",
                severity="error",
            )
    if not found or not seeds or _RANDOM.search(module.text) is None or check.project.framework(module):
        return
    if any(call.args and mentions_rank(module, call.args[0]) for call in seeds):
        return
    call = seeds[0]
    values = module.values(call.args[0]) if call.args else []
    if values and all(isinstance(constant(one), int) for one in values):
        yield check.problem(
            "DT008", call, "all ranks have one seed: dropout and augmentation are the same on all of them"
        )


def accumulation(check: Check) -> Iterator[Problem]:
    """DT009."""
    module = check.module
    if not module.methods.get("backward") or not module.methods.get("step"):
        return
    if check.project.framework(module) or any(_ACCUMULATES.search(one.text) for one in check.project.reach(module)):
        return
    if not check.project.calls(module, names.DDP):
        return
    for call in module.methods.get("backward", ()):
        loop = module.enclosing(call, (ast.For, ast.While))
        if not isinstance(loop, ast.For | ast.While) or module.scope(loop) is not module.scope(call):
            continue
        test = _every_few(check, loop, call)
        if test is not None:
            edits = _deferred(check, loop, call, test)
            yield check.problem(
                "DT009", call, "gradients are exchanged in every micro batch, and used in one of several", edits=edits
            )


def _every_few(check: Check, loop: ast.For | ast.While, backward: ast.Call) -> ast.expr | None:
    """The condition `(i + 1) % n == 0` under which the optimizer of a loop steps; None if it steps every time."""
    module = check.module
    for call in module.methods.get("step", ()):
        if not module.within(call, loop) or not re.search(r"optim|scaler|opt\b", ast.unparse(call.func)):
            continue
        for parent, child in module.chain(call):
            if parent is loop:
                break
            if isinstance(parent, ast.If) and child in parent.body and not module.within(backward, parent):
                compared = parent.test.values[0] if isinstance(parent.test, ast.BoolOp) else parent.test
                if isinstance(compared, ast.Compare) and any(
                    isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) for one in ast.walk(compared)
                ):
                    return parent.test
    return None


def _deferred(check: Check, loop: ast.For | ast.While, backward: ast.Call, test: ast.expr) -> tuple[Edit, ...]:
    """The edits that put forward and backward pass under no_sync(), where they stand together in the loop's body."""
    module = check.module
    models = {wrap.target for wrap in wraps(module) if wrap.kind == "ddp" and wrap.target}
    last = module.statement(backward)
    if last not in loop.body:
        return ()
    end = loop.body.index(last)
    for begin, statement in enumerate(loop.body[: end + 1]):
        called = {key(part.func) for part in ast.walk(statement) if isinstance(part, ast.Call)}
        model = next((name for name in sorted(models) if name in called), None)
        if model is None:
            continue
        block = loop.body[begin : end + 1]
        lines = module.text.split("\n")
        quoted = any(isinstance(part, ast.Constant | ast.JoinedStr) and part.end_lineno != part.lineno
                     for one in block for part in ast.walk(one))  # fmt: skip
        if quoted or "\t" in lines[statement.lineno - 1][: statement.col_offset]:
            return ()
        indent = " " * statement.col_offset
        head = f"with contextlib.nullcontext() if {ast.unparse(test)} else {model}.no_sync():\n{indent}    "
        start = (statement.lineno, statement.col_offset)
        edits = [Edit(start, start, head)]
        rest = range(statement.lineno + 1, (last.end_lineno or last.lineno) + 1)
        edits += [Edit((number, 0), (number, 0), "    ") for number in rest if lines[number - 1].strip()]
        if module.aliases.get("contextlib") != "contextlib":
            edits.append(_import(check, "import contextlib\n"))
        return tuple(edits)
    return ()


def _import(check: Check, text: str) -> Edit:
    """The edit that adds an import in front of the first one that does not have to be the first."""
    imports: list[ast.Import | ast.ImportFrom] = [*check.module.each(ast.Import), *check.module.each(ast.ImportFrom)]
    top = [one for one in imports if check.module.parents[one] is check.module.tree]
    lines = [one.lineno for one in top if getattr(one, "module", "") != "__future__"]
    at = (min(lines, default=1), 0)
    return Edit(at, at, text)


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


CHECKS = (batch_norm, same_seed, accumulation, clipped_scaled, waits_each_step)
