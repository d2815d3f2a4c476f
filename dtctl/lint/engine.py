"""Linter: from paths to problems."""

from __future__ import annotations

import ast
import functools
import gc
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dtctl.lint import names, newer, source, versions
from dtctl.lint.check import CheckContext, Checker
from dtctl.lint.checks import (
    absent,
    accumulating,
    data,
    devices,
    diverging,
    environment,
    exits,
    figures,
    launching,
    legacy,
    loading,
    numbers,
    precision,
    repeated,
    saving,
    sharded,
    sharding,
    steps,
    tensors,
    together,
    units,
    wrapping,
)
from dtctl.lint.model import LEVELS, ClusterFacts, Problem
from dtctl.lint.project import Project
from dtctl.lint.rules import SYNTAX
from dtctl.lint.shell_files import check_shell
from dtctl.lint.source_file import SourceFile
from dtctl.python_source import NestingTooDeepError, parse_python, run_on_large_stack

PARALLEL_FROM = 100
"""Number of files from which several processes save time."""
FAMILIES = (
    wrapping, data, sharding, loading, devices, steps, repeated, precision, accumulating, together, tensors, diverging,
    exits, absent, saving, figures, numbers, sharded, units, launching, legacy, environment,
)  # fmt: skip
"""Modules with checkers."""
PYTHON_CHECKS: tuple[Checker, ...] = tuple(checker for family in FAMILIES for checker in family.CHECKS)
"""Checkers of all rules for Python."""


def lint_paths(
    paths: Iterable[Path], *, cluster: ClusterFacts, only: frozenset[str] = frozenset(), jobs: int | None = None
) -> list[Problem]:
    """Return the problems of all files, in the order of the paths and, within a file, of the lines.

    Args:
        paths: files and folders; for the files that are read see `source.collect_source_files`.
        cluster: facts about the cluster on which the code will run.
        only: rules to apply; empty for all.
        jobs: number of processes; None for one per processor if there are many files.

    Raises:
        UsageError: a path does not exist.
    """
    files, _ = source.collect_source_files(paths)
    workers = jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if len(files) < PARALLEL_FROM or workers < 2 or source.STDIN in files:
        return _lint_file_group(files, cluster, only)
    from concurrent.futures import ProcessPoolExecutor

    # Files of one folder go to one process, so that their common imports are read once.
    size = -(-len(files) // (workers * 4))
    parts = [files[at : at + size] for at in range(0, len(files), size)]
    with ProcessPoolExecutor(workers, initializer=_begin_worker, initargs=(files,)) as pool:
        results = pool.map(_lint_file_group, parts, [cluster] * len(parts), [only] * len(parts))
        return [problem for part in results for problem in part]


_projects: list[Project] = []
"""Project of a worker process, which keeps the imports of its first files for the next ones."""


def _begin_worker(files: Sequence[Path]) -> None:
    """Make the project of a worker process, with all files of the run."""
    _projects.append(Project(files))


def lint_text(
    path: Path, text: str, *, cluster: ClusterFacts, project: Project | None = None, kind: source.Kind | None = None
) -> list[Problem]:
    """Return the problems in the text of one file.

    Args:
        path: path of the file; its suffix determines the kind if `kind` is not given.
        text: content of the file.
        cluster: facts about the cluster on which the code will run.
        project: files that were read already; None: no others.
        kind: kind of the file.
    """
    python = (kind or source.detect_file_kind(path, text.encode("utf-8", "replace"))) == "python"
    if python and "\r" in text:  # Python also ends and counts a line there
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    ignored = source.RuleSuppressions(text, python=python)
    if python:
        program = project or Project()
        problems = _run_guarded_rule(lambda: _lint_python_text(path, text, cluster, program), path, "index")
    else:
        problems = _run_guarded_rule(lambda: check_shell(str(path), text, cluster), path, "check_shell")
    remaining = [problem for problem in problems if not ignored.covers(problem.rule, problem.line, problem.end_line)]
    return _remove_duplicate_problems(
        sorted(remaining, key=lambda problem: (problem.line, problem.column, problem.rule))
    )


_CAUSES = (
    frozenset(["DT011", "DT012", "DT013", "DT036", "DT045", "DT046", "DT060"]),
    frozenset(["DT014", "DT015", "DT055"]),
    frozenset(["DT007", "DT052"]),
    frozenset(["DT016", "DT052"]),
    frozenset(["DT018", "DT054"]),
    frozenset(["DT035", "DT042"]),
    frozenset(["DT031", "DT061"]),
    frozenset(["DT003", "DT057"]),
    frozenset(["DT013", "DT033"]),
)
"""Groups of rules that report the same cause; only the most severe of their problems on one line is reported."""


def _remove_duplicate_problems(problems: list[Problem]) -> list[Problem]:
    """Return one problem for each cause and line, and one for each obsolete name of a file."""
    kept: list[Problem] = []
    reported: set[int] = set()
    obsolete: dict[str, list[int]] = {}
    on_line: dict[int, list[Problem]] = {}
    for problem in problems:
        on_line.setdefault(problem.line, []).append(problem)
    for problem in problems:
        if problem.rule == "DT025" and not problem.edits:
            obsolete.setdefault(problem.message, []).append(problem.line)
            if len(obsolete[problem.message]) > 1:
                continue
        others = [other for other in on_line[problem.line] if other is not problem and _one_cause(problem, other)]
        if any(_goes_first(other, problem, id(other) in reported) for other in others):
            continue
        kept.append(problem)
        reported.add(id(problem))
    return [_with_other_lines(problem, obsolete.get(problem.message, [])) for problem in kept]


def _with_other_lines(problem: Problem, lines: list[int]) -> Problem:
    """Return a problem about all uses of an obsolete name in its file."""
    others = [f"line {line}" for line in dict.fromkeys(lines) if line != problem.line]
    if problem.rule != "DT025" or problem.edits or not others:
        return problem
    return replace(problem, message=f"{problem.message} (also {', '.join(others[:5])}{', ...' if others[5:] else ''})")


def _goes_first(other: Problem, problem: Problem, reported: bool) -> bool:
    """Return whether another problem of the same cause is reported instead."""
    levels = LEVELS.index(other.severity), LEVELS.index(problem.severity)
    return levels[0] > levels[1] or (levels[0] == levels[1] and reported)


def _one_cause(first: Problem, second: Problem) -> bool:
    return first.rule == second.rule or any(first.rule in cause and second.rule in cause for cause in _CAUSES)


def _lint_file_group(files: Sequence[Path], cluster: ClusterFacts, only: frozenset[str]) -> list[Problem]:
    """Return the problems of some files."""
    collecting = gc.isenabled()
    gc.disable()  # syntax trees have no cycles, and the garbage collector needs seconds for a million nodes
    try:
        project = _projects[0] if _projects else Project(files)
        problems = []
        for path in files:
            problems += _lint_single_file(path, cluster, project)
    finally:
        if collecting:
            gc.enable()
    return [problem for problem in problems if not only or problem.rule in only]


def _lint_single_file(path: Path, cluster: ClusterFacts, project: Project) -> list[Problem]:
    raw = b""
    try:
        raw = source.read_source_bytes(path)
        kind = source.detect_file_kind(path, raw)
        text = source.decode_source(raw, python=kind == "python").text
    except OSError as exc:
        return [build_unreadable_problem(path, 1, 1, f"cannot be read: {exc.strerror}")]
    except UnicodeDecodeError as exc:
        encoding = "UTF-8" if exc.encoding == "utf-8" else exc.encoding
        return [build_unreadable_problem(path, raw.count(b"\n", 0, exc.start) + 1, 1, f"is not {encoding} text")]
    except SyntaxError as exc:  # the first lines name a wrong encoding
        return [build_unreadable_problem(path, 1, 1, f"is not Python: {exc.msg}")]
    return lint_text(path, text, cluster=cluster, project=project, kind=kind)


def _lint_python_text(path: Path, text: str, cluster: ClusterFacts, project: Project) -> list[Problem]:
    try:
        return _apply_python_rules(path, text, cluster, project)
    except RecursionError:  # a rule descends into a deep tree
        try:
            return run_on_large_stack(lambda: _apply_python_rules(path, text, cluster, project))
        except NestingTooDeepError as exc:
            return [build_unreadable_problem(path, 1, 1, exc.msg)]


def _apply_python_rules(path: Path, text: str, cluster: ClusterFacts, project: Project) -> list[Problem]:
    whole = True
    try:
        tree = parse_python(text)
    except NestingTooDeepError as exc:
        return [build_unreadable_problem(path, 1, 1, exc.msg)]
    except SyntaxError as exc:
        again = newer.rewrite_for_older_python(text)
        older_tree = _parsed_or_none(again) if again is not None else None
        if again is None or older_tree is None:
            reason = versions.explain_syntax_error(text, exc)
            return [
                build_unreadable_problem(path, exc.lineno or 1, exc.offset or 1, reason or f"is not Python: {exc.msg}")
            ]
        text, tree, whole = again, older_tree, False
    if not any(word in text for word in names.RELEVANT):
        return []
    module = project.get_parsed_module(path, text)
    if module is None:
        module = SourceFile(path, text, tree)
        project.add(module)
    check = CheckContext(module, project, cluster)
    problems: list[Problem] = []
    for checker in PYTHON_CHECKS:
        problems += _run_guarded_rule(functools.partial(checker, check), path, checker.__name__)
    problems = [problem for problem in problems if not module.is_dead(problem.line)]
    return problems if whole else [replace(problem, edits=()) for problem in problems]


def _parsed_or_none(text: str) -> ast.Module | None:
    try:
        return parse_python(text)
    except SyntaxError:
        return None


def _run_guarded_rule(work: Callable[[], Iterable[Problem]], path: Path, name: str) -> list[Problem]:
    """Return the problems of a rule, or one problem if the rule fails, so that other rules and files continue."""
    try:
        return list(work())
    except RecursionError:
        raise
    except Exception as exc:  # noqa: BLE001 - a rule may fail with any error
        message = f"{type(exc).__name__}: {exc}"
        return [build_crash_problem(path, f"the rule {name} failed on this file ({message}); this is a bug in dtctl")]


def build_unreadable_problem(path: Path, line: int, column: int, message: str) -> Problem:
    """Return the problem of a file to which no rule can be applied."""
    return _build_file_problem(
        path, line, column, f"the file {message}", "fix this first; no rule was applied to the file"
    )


def build_crash_problem(path: Path, message: str) -> Problem:
    """Return the problem of a file on which a rule crashed."""
    return _build_file_problem(path, 1, 1, message, "report it with the file; all other rules were applied")


def _build_file_problem(path: Path, line: int, column: int, message: str, fix: str) -> Problem:
    return Problem(
        rule=SYNTAX,
        severity="error",
        path=str(path),
        line=line,
        column=max(1, column),
        message=message,
        fix=fix,
        end_line=line,
    )
