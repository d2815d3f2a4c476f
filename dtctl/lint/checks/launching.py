"""Rules about starting ranks and preparing models for them: DT064, DT065, DT066."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.checks.accumulating import every_few
from dtctl.lint.flow import origins
from dtctl.lint.model import Problem
from dtctl.lint.source_file import key, keyword


def last_window_lost(check: Check) -> Iterator[Problem]:
    """DT064."""
    module = check.module
    if not check.project.trains(module) or check.project.framework(module):
        return
    for call in module.methods.get("backward", ()):
        loop = module.enclosing(call, (ast.For,))
        if not isinstance(loop, ast.For) or module.scope(loop) is not module.scope(call):
            continue
        choice = every_few(check, loop, call)
        if choice is None or "len(" in ast.unparse(choice.test) or not isinstance(loop.iter, ast.Call):
            continue
        if not isinstance(choice.test, ast.Compare) or (key(loop.iter.func) or "") == "range":
            continue
        after = module.block(loop)
        at = next((index for index, statement in enumerate(after) if statement is loop), len(after))
        if any(
            "step(" in ast.unparse(statement) or "zero_grad" in ast.unparse(statement)
            for statement in after[at + 1 : at + 4]
        ):
            continue
        yield check.problem(
            "DT064", choice.test, "the gradients of the last, incomplete window are not used in their epoch"
        )
        return


def whole_model_moved(check: Check) -> Iterator[Problem]:
    """DT065."""
    module = check.module
    for call in module.calls_of(names.FSDP):
        model = call.args[0] if call.args else keyword(call, "module")
        if model is None:
            continue
        for value in origins(module, model):
            inner = value.node
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and _to_gpu(inner):
                at = f" (in line {inner.lineno})" if value.module is module else ""
                yield check.problem("DT065", call, f"the whole model is put on every GPU{at} before FSDP divides it")
                return
        name = key(model)
        moves = [
            move for move in [*module.methods["cuda"], *module.methods["to"]]
            if isinstance(move.func, ast.Attribute) and name and key(move.func.value) == name and _to_gpu(move)
            and module.scope(move) is module.scope(call) and move.lineno <= call.lineno
        ]  # fmt: skip
        if moves:
            at = f" (in line {moves[-1].lineno})"
            yield check.problem("DT065", call, f"the whole model is put on every GPU{at} before FSDP divides it")
            return


def _to_gpu(call: ast.Call) -> bool:
    """Return whether `.cuda()` or `.to(device)` moves to a GPU, as it seems."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method == "cuda":
        return True
    text = ast.unparse(call.args[0]) if call.args else ""
    return method == "to" and ("device" in text or "rank" in text or "cuda" in text or "gpu" in text)


def death_unnoticed(check: Check) -> Iterator[Problem]:
    """DT066."""
    module = check.module
    starts = module.calls_of("torch.multiprocessing.Process", "multiprocessing.Process")
    if not starts or not check.project.calls(module, names.INIT) or not module.methods.get("join"):
        return
    if "exitcode" in module.text or "sentinel" in module.text or "is_alive" in module.text:
        return
    for start in starts[:1]:
        yield check.problem("DT066", start, "a rank that dies is not noticed: the others wait for it in a collective")


CHECKS = (last_window_lost, whole_model_moved, death_unnoticed)
