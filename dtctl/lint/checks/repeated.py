"""Rules about work in every step, or on every rank: DT046, DT054, DT055."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.checks.exits import find_backward_calls, is_inside_join
from dtctl.lint.checks.figures import find_shown_figures
from dtctl.lint.checks.steps import find_step_code
from dtctl.lint.collectives import collective_called, takes_a_group
from dtctl.lint.flow import find_called_function
from dtctl.lint.model import Problem
from dtctl.lint.ranks import by_turns, is_launcher_code, mentions_rank, resolve_rank_guard
from dtctl.lint.source_file import (
    SourceFile,
    find_argument,
    find_keyword_value,
    format_dotted_name,
    name_other_lines,
    read_constant_value,
)

_LOGGING = frozenset("info warning debug error".split())
_DISTRIBUTED = re.compile(
    r"^(?:[\w.]*(?:is_initialized\(\)|is_available\(\)|is_distributed\(\)|distributed|ddp|parallel|multi_?gpu|is_dist|sync_gradients)"
    r"|and|or|\s|[\w.]*(?:world_size|n(?:um)?_gpus?)(?:\(\))? > 1|[\w.]*rank != -1)+$"
)
"""Pattern of a condition that only tests if there are several ranks."""
_BARRIER = re.compile(r"barrier|wait_for_|^synchroni[sz]e$|sync_(?:all|processes)")
"""Pattern of names of helpers that are a barrier."""
_MAKES_LOGGER = re.compile(r"get_logger$|setup_logg|create_logger")
_QUIET = re.compile(
    r"builtins?\.print\s*=|__builtin__|setup_for_distributed|rank_zero_print|def print\b|__builtins__\[|"
    r"sys\.stdout\s*=|suppress_print"
)


def check_waiting_each_step(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT046: ranks wait for each other in every step."""
    module = check.module
    helpers = [call for name in module.methods if _BARRIER.search(name) for call in module.methods[name]
               if collective_called(module, call) == "barrier"]  # fmt: skip
    for call in [*module.calls.get("torch.distributed.barrier", ()), *helpers]:
        if call not in helpers and takes_a_group("torch.distributed.barrier", call):
            continue
        if is_inside_join(module, call):
            yield check.problem(
                "DT046",
                call,
                "a barrier inside join(): ranks that have run out of data do not reach it",
                severity="error",
            )
        elif (loop := _batch_loop(module, call)) is not None and not _now_and_then(module, call, loop):
            yield check.problem("DT046", call, "a barrier in every step: all ranks wait for the slowest, each time")
    for name in ("wait_for_everyone", "gather", "gather_for_metrics", "reduce") if "accelerate" in module.text else ():
        for call in module.methods.get(name, ()):
            loop = _batch_loop(module, call)
            if loop is None or _now_and_then(module, call, loop) or not module.find_calls_below(loop, "backward"):
                continue
            waits = name == "wait_for_everyone"
            if waits or re.search("loss|acc|metric|pred|label", " ".join(ast.unparse(one) for one in call.args)):
                what = "a barrier" if waits else f"`{name}`, only to report a figure,"
                yield check.problem("DT046", call, f"{what} in every step: all ranks wait for the slowest, each time")
                break
    if check.project.uses_framework(module):
        return
    reported: set[ast.AST] = set()
    for call, figure in _find_reduction_calls(module):
        loop = _batch_loop(module, call)
        if loop is not None and loop not in reported and not _now_and_then(module, call, loop):
            reported.add(loop)
            yield check.problem(
                "DT046", call, f"`{figure}` is reduced in every step, only to be reported", severity="info"
            )


def _find_reduction_calls(module: SourceFile) -> list[tuple[ast.Call, str]]:
    """Return calls that reduce a figure, in the order of the file: all_reduce, or a function with one."""
    direct = [*module.calls.get("torch.distributed.all_reduce", ()), *module.calls.get("torch.distributed.reduce", ())]
    helpers = [
        call
        for name in module.methods
        if re.search("reduce|gather|sync|average|aggregate|(?:^|_)(?:avg|mean)(?:_|$)", name)
        for call in module.methods[name]
        if call not in direct and collective_called(module, call)
    ]
    texts = [(call, ast.unparse(call.args[0]) if call.args else "") for call in (*direct, *helpers)]
    found = [
        (call, text)
        for call, text in texts
        if re.search("loss|acc|correct|metric|total|prec|top|time|tokens", text.lower())
    ]
    return sorted(found, key=lambda one: one[0].lineno)


def _batch_loop(module: SourceFile, call: ast.Call) -> ast.AST | None:
    """Return the loop over batches around a call: one with a backward pass, or over a loader; None without one.

    A function that is one step counts as such a loop.
    """
    loop, function = module.find_enclosing_node(call, (ast.For,)), module.scope(call)
    if not isinstance(loop, ast.For) or module.scope(loop) is not function:
        step = function if function in find_step_code(module) else None
        return _step_loop(module, call) or step
    batches = re.search(r"loader(?!s)|batches", ast.unparse(loop.iter).lower())
    return loop if batches else _step_loop(module, call)


def _step_loop(module: SourceFile, call: ast.Call) -> ast.AST | None:
    """Return the innermost loop around a call that has a backward pass of the same function; None without one."""
    loop = module.find_enclosing_node(call, (ast.For, ast.While))
    if loop is None or module.scope(loop) is not module.scope(call):
        return None
    over = ast.unparse(loop.target) + ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
    for backward in find_backward_calls(module, loop):
        if module.scope(backward) is not module.scope(call) or _whole_epoch(module, backward):
            continue
        nearest = module.find_enclosing_node(backward, (ast.For, ast.While))
        steps = (
            "epoch" not in over
            and nearest is not None
            and module.find_enclosing_node(nearest, (ast.For, ast.While)) is loop
        )
        if isinstance(loop, ast.While):
            over = ast.unparse(loop.test)
        if nearest is loop or (steps and re.search("step|iter", over)):
            return loop
    return None


def _whole_epoch(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a call makes several steps: its function has a loop over batches, or is unknown."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
        return False
    target = find_called_function(module, call)
    return target is None or any(
        target.module.find_enclosing_node(backward, (ast.For, ast.While)) is not None
        for backward in target.module.find_calls_below(target.node, "backward")
    )


def _now_and_then(module: SourceFile, call: ast.AST, loop: ast.AST) -> bool:
    for parent, _ in module.chain(call):
        if parent is loop:
            return False
        if isinstance(parent, ast.ExceptHandler):
            return True
        if isinstance(parent, ast.If) and not (
            _is_setting_condition(parent.test) or _DISTRIBUTED.search(ast.unparse(parent.test))
        ):
            return True
    return True


def _is_setting_condition(test: ast.expr) -> bool:
    """Return whether a condition is the same in all steps: a name of the settings, or its negation."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    return (
        re.match(r"(?:args|cfg|config|opt|hparams|self|use_amp|ddp)(?:\.|$)", format_dotted_name(test) or "")
        is not None
    )


def check_said_by_all(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT054: line printed by every rank."""
    module = check.module
    if not (module.trains or module.methods.get("backward")) or check.project.framework_has_loop(module):
        return
    if not any(check.project.calls(module, name) for name in (names.INIT, *names.WRAPPERS, *names.ENGINES)):
        return
    if check.project.has_text(module, _QUIET):
        return
    lines = sorted(
        {
            call.lineno: call
            for call in [*_find_print_calls(check), *_find_printing_helpers(module)]
            if _by_all(module, call)
        }.items()
    )
    # A line with a figure has a rule of its own.
    if lines:
        plain = (call for _, call in lines if next(find_shown_figures(check, call), None) is None)
        first = next(plain, lines[0][1])
        also = name_other_lines(number for number, call in lines if call is not first)
        yield check.problem("DT054", first, f"every rank prints this line{also}")


def _by_all(module: SourceFile, call: ast.Call) -> bool:
    """Return whether all ranks print a line that does not name the rank."""
    if "rank" in ast.unparse(call).lower() or (
        resolve_rank_guard(module, call) is not None and not by_turns(module, call)
    ):
        return False
    return module.find_enclosing_node(call, (ast.ExceptHandler,)) is None and not is_launcher_code(module, call)


def _find_print_calls(check: CheckContext) -> Iterator[ast.Call]:
    """Yield calls of print and of loggers, and progress bars over batches, that the ranks run."""
    module = check.module
    for call in module.methods.get("print", ()):
        if (
            format_dotted_name(call.func) == "print"
            and find_keyword_value(call, "file") is None
            and _is_program_output(module, call)
        ):
            yield call
    if module.trains and not _quiet_loggers(check):
        for name in sorted(_LOGGING & set(module.methods)):
            for call in module.methods[name]:
                if format_dotted_name(call.func) in (
                    f"logger.{name}",
                    f"logging.{name}",
                    f"self.logger.{name}",
                ) and _is_program_output(module, call):
                    yield call
    for name in ("tqdm", "trange"):
        for call in module.methods.get(name, ()):
            above = module.parents.get(call)
            assigned = isinstance(above, ast.Assign) and module.methods.get("backward")
            if find_keyword_value(call, "disable") is None and (
                assigned or isinstance(above, ast.For | ast.Call | ast.withitem)
            ):
                yield call


def _is_program_output(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a line belongs to the program, and not to a description or an error."""
    function = module.scope(call)
    return (
        bool(call.args)
        and (not getattr(function, "name", "").startswith("__") or getattr(function, "name", "") == "__init__")
        and not any(
            isinstance(parent, ast.If)
            and child in parent.body
            and re.search(r"verbose|debug|not os\.path|not .*exists|is None", ast.unparse(parent.test))
            for parent, child in module.chain(call)
        )
    )


def _quiet_loggers(check: CheckContext) -> bool:
    """Return whether a program configures its loggers by rank: level, handlers, or a function that creates them."""
    module = check.module
    return check.project.has_text(
        module,
        re.compile(
            r"(?:setLevel|level=|disable\()[^\n]*(?:rank|master|main)"
            r"|(?:rank|master|main_process|is_main)[^\n]*:\s*\n?[^\n]*"
            r"(?:setLevel|addHandler|basicConfig|\.remove\(|disable\(|getLogger|propagate)|NullHandler|init_logger"
        ),
    ) or _has_logger_by_rank(check)


def _has_logger_by_rank(check: CheckContext) -> bool:
    """Return whether a function that makes the program's loggers asks for the rank, or is not known."""
    for source in check.project.find_modules_with_words(check.module, "get_logger", "setup_logg", "create_logger"):
        for name in filter(_MAKES_LOGGER.search, {**source.functions, **source.methods}):
            called = [find_called_function(source, call) for call in source.methods.get(name, ())]
            made = [*source.functions.get(name, ()), *(one.node for one in called if one is not None)]
            if None in called or any(re.search("rank|master|main_process", ast.unparse(one)) for one in made):
                return True
    return False


def _find_printing_helpers(module: SourceFile) -> list[ast.Call]:
    """Return calls, in loops over batches, of project functions that print on every rank: `progress.display(i)`."""
    found = []
    for name in ("display", "report", "print_progress", "show", "print_log", "print"):
        for call in module.methods.get(name, ()):
            target = find_called_function(module, call)
            if target is None or _batch_loop(module, call) is None:
                continue
            lines = target.module.find_calls_below(target.node, "print")
            if lines and all(resolve_rank_guard(target.module, line, 0) is None for line in lines):
                found.append(call)
    return found


def check_folder_made_by_all(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT055: folder made by every rank."""
    module = check.module
    if not (module.trains or module.methods.get("backward")) or check.project.framework_has_loop(module):
        return
    if not check.project.distributed(module):
        return
    for name in ("os.makedirs", "os.mkdir", "shutil.rmtree"):
        for call in module.calls_of(name):
            ignores = name == "shutil.rmtree" and find_argument(call, "ignore_errors", 1) is not None
            if ignores or read_constant_value(find_argument(call, "exist_ok", 2)) is True or not call.args:
                continue
            if mentions_rank(module, call.args[0]) or not _is_run_by_all(module, call):
                continue
            if not module.trains and not module.find_calls_below(module.scope(call), "backward"):
                continue
            verb = "removes" if name == "shutil.rmtree" else "makes"
            yield check.problem(
                "DT055", call, f"every rank {verb} `{ast.unparse(call.args[0])}`: all but the first fail",
                fix="on one rank, followed by a barrier" if verb == "removes" else None,
            )  # fmt: skip
    yield from _paths_made_by_all(check)


def _is_run_by_all(module: SourceFile, call: ast.Call) -> bool:
    """Return whether all ranks make a call whose error would end them."""
    if resolve_rank_guard(module, call) is not None or module.find_enclosing_node(call, (ast.Try,)) is not None:
        return False
    return not is_launcher_code(module, call)


def _paths_made_by_all(check: CheckContext) -> Iterator[Problem]:
    """Yield calls of `Path.mkdir` on all ranks."""
    module = check.module
    for call in module.methods.get("mkdir", ()):
        if not isinstance(call.func, ast.Attribute) or call.args[2:] or module.name(call.func) == "os.mkdir":
            continue
        root = (format_dotted_name(call.func.value) or "").partition(".")[0]
        exists = read_constant_value(find_keyword_value(call, "exist_ok")) is True
        if call.args or exists or root in module.aliases or root in ("sftp", "fs", "hdfs"):
            continue
        if any(argument.arg is None for argument in call.keywords):
            continue
        if mentions_rank(module, call.func.value) or not _is_run_by_all(module, call):
            continue
        yield check.problem("DT055", call, f"every rank makes `{ast.unparse(call.func.value)}`: all but the first fail")


CHECKS = (check_waiting_each_step, check_said_by_all, check_folder_made_by_all)
