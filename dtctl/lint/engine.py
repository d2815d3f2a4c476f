"""Paths in, problems out."""

from __future__ import annotations

import ast
import functools
import gc
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dtctl.lint import names, newer, source, versions
from dtctl.lint.check import Check, Checker
from dtctl.lint.checks import (
    absent,
    accumulating,
    data,
    devices,
    diverging,
    environment,
    exits,
    extent,
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
from dtctl.python_source import NestedTooDeeply, parse_python, run_on_large_stack

PARALLEL_FROM = 100
"""Files from which several processes are worth starting."""
FAMILIES = (
    wrapping, data, sharding, loading, devices, steps, repeated, precision, accumulating, together, tensors, diverging,
    exits, absent, saving, figures, numbers, sharded, units, launching, legacy, environment,
    extent,
    figures,
)  # fmt: skip
"""The modules of checkers."""
PYTHON_CHECKS: tuple[Checker, ...] = tuple(checker for family in FAMILIES for checker in family.CHECKS)
"""The checkers of all rules for Python."""


def lint(
    paths: Iterable[Path], *, cluster: ClusterFacts, only: frozenset[str] = frozenset(), jobs: int | None = None
) -> list[Problem]:
    """Problems of all files, in the order of the paths, each file's in the order of its lines.

    Args:
        paths: files and folders; what in them is not read is left out, see `source.collect`.
        cluster: where the code will run.
        only: rules to apply; empty for all.
        jobs: processes; None for one per processor when there are many files.

    Raises:
        UsageError: a path does not exist.
    """
    files, _ = source.collect(paths)
    workers = jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if len(files) < PARALLEL_FROM or workers < 2 or source.STDIN in files:
        return _files(files, cluster, only)
    from concurrent.futures import ProcessPoolExecutor

    # Files of one folder go to one process: what they import in common is then read once.
    size = -(-len(files) // (workers * 4))
    parts = [files[at : at + size] for at in range(0, len(files), size)]
    with ProcessPoolExecutor(workers) as pool:
        results = pool.map(_files, parts, [cluster] * len(parts), [only] * len(parts), [files] * len(parts))
        return [problem for part in results for problem in part]


def lint_text(
    path: Path, text: str, *, cluster: ClusterFacts, project: Project | None = None, kind: source.Kind | None = None
) -> list[Problem]:
    """Return the problems of one file's text.

    Args:
        path: of the file; its suffix decides the kind if `kind` is not given.
        text: its content.
        cluster: where the code will run.
        project: what other files are known already.
        kind: as what to read it.
    """
    python = (kind or source.kind_of(path, text.encode("utf-8", "replace"))) == "python"
    if python and "\r" in text:  # Python ends a line there too, and counts it
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    ignored = source.Ignored(text, python=python)
    if python:
        program = project or Project()
        problems = _guarded(lambda: _python(path, text, cluster, program), path, "index")
    else:
        problems = _guarded(lambda: check_shell(str(path), text, cluster), path, "check_shell")
    remaining = [problem for problem in problems if not ignored.covers(problem.rule, problem.line, problem.end_line)]
    return _once(sorted(remaining, key=lambda problem: (problem.line, problem.column, problem.rule)))


_CAUSES = (
    frozenset(["DT011", "DT012", "DT013", "DT036", "DT045", "DT046", "DT060"]),
    frozenset(["DT014", "DT015", "DT055"]),
    frozenset(["DT007", "DT016", "DT052"]),
    frozenset(["DT018", "DT053", "DT054"]),
    frozenset(["DT035", "DT042"]),
    frozenset(["DT031", "DT061"]),
    frozenset(["DT003", "DT057"]),
    frozenset(["DT013", "DT033"]),
)
"""Rules that see one cause from different sides; on one line only the gravest of them is reported."""


def _once(problems: list[Problem]) -> list[Problem]:
    """Return one finding for each cause and line, and for each obsolete name of a file."""
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
    """Return a problem that stands for all uses of an obsolete name in its file."""
    others = [f"line {line}" for line in dict.fromkeys(lines) if line != problem.line]
    if problem.rule != "DT025" or problem.edits or not others:
        return problem
    return replace(problem, message=f"{problem.message} (also {', '.join(others[:5])}{', ...' if others[5:] else ''})")


def _goes_first(other: Problem, problem: Problem, reported: bool) -> bool:
    """Return whether another problem of the same cause is the one to report."""
    levels = LEVELS.index(other.severity), LEVELS.index(problem.severity)
    return levels[0] > levels[1] or (levels[0] == levels[1] and reported)


def _one_cause(first: Problem, second: Problem) -> bool:
    return first.rule == second.rule or any(first.rule in cause and second.rule in cause for cause in _CAUSES)


def _files(
    files: Sequence[Path], cluster: ClusterFacts, only: frozenset[str], every: Sequence[Path] = ()
) -> list[Problem]:
    """Problems of some files, of all that there are; the worker of a process."""
    collecting = gc.isenabled()
    gc.disable()  # syntax trees have no cycles worth looking for, and a million nodes take seconds to look through
    try:
        project = Project(every or files)
        problems = []
        for path in files:
            problems += _file(path, cluster, project)
    finally:
        if collecting:
            gc.enable()
    return [problem for problem in problems if not only or problem.rule in only]


def _file(path: Path, cluster: ClusterFacts, project: Project) -> list[Problem]:
    raw = b""
    try:
        raw = source.read(path)
        kind = source.kind_of(path, raw)
        text = source.decoded(raw, python=kind == "python").text
    except OSError as exc:
        return [unreadable(path, 1, 1, f"cannot be read: {exc.strerror}")]
    except UnicodeDecodeError as exc:
        encoding = "UTF-8" if exc.encoding == "utf-8" else exc.encoding
        return [unreadable(path, raw.count(b"\n", 0, exc.start) + 1, 1, f"is not {encoding} text")]
    except SyntaxError as exc:  # the encoding that its first lines name
        return [unreadable(path, 1, 1, f"is not Python: {exc.msg}")]
    return lint_text(path, text, cluster=cluster, project=project, kind=kind)


def _python(path: Path, text: str, cluster: ClusterFacts, project: Project) -> list[Problem]:
    try:
        return _checked(path, text, cluster, project)
    except RecursionError:  # of a rule that goes down the tree
        try:
            return run_on_large_stack(lambda: _checked(path, text, cluster, project))
        except NestedTooDeeply as exc:
            return [unreadable(path, 1, 1, exc.msg)]


def _checked(path: Path, text: str, cluster: ClusterFacts, project: Project) -> list[Problem]:
    whole = True
    try:
        tree = parse_python(text)
    except NestedTooDeeply as exc:
        return [unreadable(path, 1, 1, exc.msg)]
    except SyntaxError as exc:
        again = newer.older(text)
        older_tree = _parsed_or_none(again) if again is not None else None
        if again is None or older_tree is None:
            reason = versions.reason(text, exc)
            return [unreadable(path, exc.lineno or 1, exc.offset or 1, reason or f"is not Python: {exc.msg}")]
        text, tree, whole = again, older_tree, False
    if not any(word in text for word in names.RELEVANT):
        return []
    module = project.parsed(path, text)
    if module is None:
        module = SourceFile(path, text, tree)
        project.add(module)
    check = Check(module, project, cluster)
    problems: list[Problem] = []
    for checker in PYTHON_CHECKS:
        problems += _guarded(functools.partial(checker, check), path, checker.__name__)
    problems = [problem for problem in problems if not module.is_dead(problem.line)]
    return problems if whole else [replace(problem, edits=()) for problem in problems]


def _parsed_or_none(text: str) -> ast.Module | None:
    try:
        return parse_python(text)
    except SyntaxError:
        return None


def _guarded(work: Callable[[], Iterable[Problem]], path: Path, name: str) -> list[Problem]:
    """Return the findings of a rule, or a problem if it failed, so that other rules and files continue."""
    try:
        return list(work())
    except RecursionError:
        raise
    except Exception as exc:  # noqa: BLE001 - whatever it is
        message = f"{type(exc).__name__}: {exc}"
        return [failed(path, f"the rule {name} failed on this file ({message}); this is a bug in dtctl")]


def unreadable(path: Path, line: int, column: int, message: str) -> Problem:
    """Return the problem of a file that no rule can be applied to."""
    return _dt000(path, line, column, f"the file {message}", "fix this first; no rule was applied to the file")


def failed(path: Path, message: str) -> Problem:
    """Return the problem of a file on which a rule crashed."""
    return _dt000(path, 1, 1, message, "report it with the file; all other rules were applied")


def _dt000(path: Path, line: int, column: int, message: str, fix: str) -> Problem:
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
