"""`dtctl lint`: mistakes in distributed training code, found by reading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import DoctorFailed, DtctlError, UsageError

if TYPE_CHECKING:
    from dtctl.lint.model import ClusterFacts, Problem


class Format(str, Enum):
    """Output formats."""

    text = "text"
    json = "json"
    sarif = "sarif"
    github = "github"


class Level(str, Enum):
    """Severities."""

    info = "info"
    warning = "warning"
    error = "error"


def lint(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files and folders: Python, shell, sbatch; - is stdin.")
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.text,
    fix: Annotated[bool, typer.Option("--fix", help="Fix what needs no decision.")] = False,
    select: Annotated[str, typer.Option("--select", metavar="RULES", help="Only these rules: DT004,DT011.")] = "",
    severity: Annotated[Level, typer.Option("--severity", help="Hide problems below this severity.")] = Level.info,
    spec: Annotated[
        Path | None,
        typer.Option("--spec", help="The spec; some rules apply to several nodes only. Default: ./dtctl.yaml."),
    ] = None,
    explain: Annotated[str | None, typer.Option("--explain", metavar="RULE", help="Explain a rule: DT011.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the rules: id, severity, name.")] = False,
) -> int:
    """Find mistakes in distributed training code; exit code 9 if there are any.

    `# dtctl: ignore[DT004]` on a line suppresses one.
    """
    if list_:
        return _list(format_)
    if explain is not None:
        return _explain(explain)
    if not paths:
        raise UsageError("there is nothing to read", hint="`dtctl lint train.py`, or `dtctl lint .` for a whole folder")
    from dtctl.lint.engine import lint as linted
    from dtctl.lint.model import LEVELS
    from dtctl.lint.source import collect

    only = _rules(select)
    cluster = _cluster(spec)
    files, unread = collect(paths)
    problems = linted(files, cluster=cluster, only=only)
    if fix:
        _mend(problems)
        problems = linted(files, cluster=cluster, only=only)
    visible = [problem for problem in problems if LEVELS.index(problem.severity) >= LEVELS.index(severity.value)]
    _show(visible, format_, read=len(files))
    for path, reason in unread:
        output.err(f"not read: {path} ({reason})")
    return DoctorFailed.exit_code if any(problem.severity != "info" for problem in problems) else 0


def _rules(text: str) -> frozenset[str]:
    """Return the rules that `--select` names."""
    from dtctl.lint.rules import rules

    only = frozenset(rule.strip().upper() for rule in text.split(",") if rule.strip())
    unknown = sorted(only - set(rules()) - {"DT000"})
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]}", hint="`dtctl lint --list` names all")
    return only


def _list(format_: Format) -> int:
    """Return all rules, one a line; `--format json` for programs."""
    from dtctl.lint.rules import rules

    if format_ is Format.json:
        fields = ("id", "name", "severity", "fixable", "source")
        output.emit_json([{name: getattr(rule, name) for name in fields} for rule in rules().values()])
        return 0
    for rule in rules().values():
        output.out(f"{rule.id}  {rule.severity:<8} {rule.name}{' (--fix)' if rule.fixable else ''}")
    return 0


def _explain(name: str) -> int:
    from dtctl.lint.formats import explained
    from dtctl.lint.rules import SYNTAX, explained_syntax, rules

    if name.upper() == SYNTAX:
        output.out(explained_syntax())
        return 0
    rule = rules().get(name.upper())
    if rule is None:
        raise UsageError(f"there is no rule {name}", hint="`dtctl lint --list` names all")
    output.out(explained(rule))
    return 0


def _cluster(path: Path | None) -> ClusterFacts:
    """Return the spec's facts about the cluster; empty without a spec. A spec that was not requested may be wrong."""
    from dtctl.lint.model import ClusterFacts

    default = Path(names.SPEC_FILE)
    if path is None and not default.is_file():
        return ClusterFacts()
    from dtctl.spec.load import load_spec
    from dtctl.spec.nodes import resolve_nodes

    try:
        return ClusterFacts(nodes=len(resolve_nodes(load_spec(path or default))))
    except DtctlError as exc:
        if path is not None:
            raise
        output.err(f"note: {default} is ignored: {exc.message}")
        return ClusterFacts()


def _mend(problems: Sequence[Problem]) -> None:
    from dtctl.lint.fixes import apply
    from dtctl.lint.source import STDIN

    files: dict[Path, str] = {}
    for item in problems:
        if item.edits and Path(item.path) != STDIN:
            files.setdefault(Path(item.path).resolve(), item.path)  # a link and its target once
    for path in files.values():
        result = apply(Path(path), [item for item in problems if item.path == path])
        for problem in result.mended:
            output.err(f"fixed {problem.path}:{problem.line}: {problem.rule} {problem.message}")
        if result.refused:
            output.err(f"not fixed: {path}: {result.refused}")


def _show(problems: Sequence[Problem], format_: Format, *, read: int) -> None:
    import dtctl
    from dtctl.lint import formats

    if format_ is Format.json:
        output.emit_json(formats.as_json(problems))
    elif format_ is Format.sarif:
        output.out(formats.dumped(formats.sarif(problems, dtctl.__version__)))
    elif format_ is Format.github:
        for problem in problems:
            output.out(formats.github(problem))
    else:
        styles = {"error": "red", "warning": "yellow", "info": "dim"}
        for problem in problems:
            head, rest = formats.text_lines(problem)
            output.out(head, styles[problem.severity])
            output.out(rest)
        counts = Counter(item.severity for item in problems)
        fixable = sum(bool(item.edits) for item in problems)
        plural = {"error": "errors", "warning": "warnings"}
        summary = ", ".join(
            f"{count} {plural.get(name, name) if count > 1 else name}"
            for name in ("error", "warning", "info")
            if (count := counts[name])
        )
        output.err(
            (summary or ("nothing found" if read else "there was no file to read"))
            + (f"; {fixable} can be fixed with --fix" if fixable else "")
        )
