"""Paths in, problems out."""

from __future__ import annotations

import ast
import gc
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from dtctl.lint import names, source
from dtctl.lint.checks import Check, python_checks
from dtctl.lint.model import Cluster, Problem
from dtctl.lint.module import Module
from dtctl.lint.project import Project
from dtctl.lint.shell_files import check_shell

PARALLEL_FROM = 100
"""Files from which several processes are worth starting."""
SYNTAX = "DT000"


def lint(
    paths: Iterable[Path], *, cluster: Cluster, only: frozenset[str] = frozenset(), jobs: int | None = None
) -> list[Problem]:
    """Problems of all files, in the order of the paths, each file's in the order of its lines.

    Args:
        paths: files and folders.
        cluster: where the code will run.
        only: rules to apply; empty for all.
        jobs: processes; None for one per processor when there are many files.

    Raises:
        UsageError: a path does not exist.
    """
    files = source.collect(paths)
    workers = jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if len(files) < PARALLEL_FROM or workers < 2:
        return _files(files, cluster, only)
    from concurrent.futures import ProcessPoolExecutor

    # Files of one folder go to one process: what they import in common is then read once.
    size = -(-len(files) // (workers * 4))
    parts = [files[at : at + size] for at in range(0, len(files), size)]
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(_files, parts, [cluster] * len(parts), [only] * len(parts))
        return [problem for part in found for problem in part]


def lint_text(path: Path, text: str, *, cluster: Cluster, project: Project | None = None) -> list[Problem]:
    """Problems of one file's text."""
    ignored = source.Ignored(text)
    if source.is_python(path):
        found = _python(path, text, cluster, project or Project())
    else:
        found = check_shell(str(path), text, cluster)
    kept = [one for one in found if not ignored.covers(one.rule, one.line, one.end_line)]
    return sorted(kept, key=lambda one: (one.line, one.column, one.rule))


def _files(files: Sequence[Path], cluster: Cluster, only: frozenset[str]) -> list[Problem]:
    """Problems of some files; the worker of a process."""
    collecting = gc.isenabled()
    gc.disable()  # syntax trees have no cycles worth looking for, and a million nodes take seconds to look through
    try:
        project = Project()
        found = []
        for path in files:
            found += _file(path, cluster, project)
    finally:
        if collecting:
            gc.enable()
    return [one for one in found if not only or one.rule in only]


def _file(path: Path, cluster: Cluster, project: Project) -> list[Problem]:
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as exc:
        return [unreadable(path, 1, 1, f"cannot be read: {exc.strerror}")]
    except UnicodeDecodeError as exc:
        return [unreadable(path, raw.count(b"\n", 0, exc.start) + 1, 1, "is not UTF-8 text")]
    return lint_text(path, text, cluster=cluster, project=project)


def _python(path: Path, text: str, cluster: Cluster, project: Project) -> list[Problem]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
    except SyntaxError as exc:
        return [unreadable(path, exc.lineno or 1, exc.offset or 1, f"is not Python: {exc.msg}")]
    except (ValueError, RecursionError) as exc:
        return [unreadable(path, 1, 1, f"is not Python: {exc}")]
    if not any(word in text for word in names.RELEVANT):
        return []
    module = Module(path, text, tree)
    project.add(module)
    check = Check(module, project, cluster)
    return [problem for checker in python_checks() for problem in checker(check)]


def unreadable(path: Path, line: int, column: int, what: str) -> Problem:
    """The problem of a file that no rule can be applied to."""
    return Problem(
        rule=SYNTAX,
        severity="error",
        path=str(path),
        line=line,
        column=max(1, column),
        message=f"the file {what}",
        fix="mend this first; no rule was applied to the file",
        end_line=line,
    )
