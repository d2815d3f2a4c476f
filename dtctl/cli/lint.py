"""`dtctl lint`: find mistakes in distributed training code without running it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import DoctorFailed, DtctlError, UsageError
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.lint.model import ClusterFacts, Problem
    from dtctl.spec.model import Spec


class OutputFormat(str, Enum):
    """Formats of the list of problems."""

    text = "text"
    json = "json"
    sarif = "sarif"
    github = "github"


class SeverityLevel(str, Enum):
    """Severities of problems, the lowest first."""

    info = "info"
    warning = "warning"
    error = "error"


def lint(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH",
            help="Files and folders: Python, shell, sbatch; - is stdin.  [default: what a launch of the spec sends]",
            show_default=False,
        ),
    ] = None,
    format_: Annotated[OutputFormat, typer.Option("--format", help="Output format.")] = OutputFormat.text,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output, as with --format json.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Apply the fixes that need no decision.")] = False,
    select: Annotated[str, typer.Option("--select", metavar="RULES", help="Only these rules: DT004,DT011.")] = "",
    severity: Annotated[
        SeverityLevel, typer.Option("--severity", help="Hide problems below this severity.")
    ] = SeverityLevel.info,
    spec: Annotated[
        Path | None,
        typer.Option(
            "--spec", metavar="SPEC", help="The spec; some rules apply to several nodes only. Default: ./dtctl.yaml."
        ),
    ] = None,
    explain: Annotated[str | None, typer.Option("--explain", metavar="RULE", help="Explain a rule: DT011.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the rules: id, severity, name.")] = False,
) -> int:
    """Find mistakes in distributed training code; exit code 9 if there are any.

    `# dtctl: ignore[DT004]` on a line suppresses one.
    """
    format_ = OutputFormat.json if json_ else format_
    if list_:
        return _print_rule_list(format_)
    if explain is not None:
        return _print_rule_explanation(explain)
    from dtctl.lint.engine import lint_paths as linted
    from dtctl.lint.model import LEVELS
    from dtctl.lint.source import collect_source_files

    only = _parse_rule_selection(select)
    if paths:
        cluster = _read_cluster_facts(spec)
    else:
        loaded, paths = _find_spec_sources(spec)
        cluster = _count_nodes(loaded)
    files, unread = collect_source_files(paths)
    problems = linted(files, cluster=cluster, only=only)
    if fix:
        _fix_problems(problems)
        problems = linted(files, cluster=cluster, only=only)
    visible = [problem for problem in problems if LEVELS.index(problem.severity) >= LEVELS.index(severity.value)]
    _print_problems(visible, format_, read=len(files))
    for path, reason in unread:
        output.print_stderr(f"not read: {path} ({reason})")
    return DoctorFailed.exit_code if any(problem.severity != "info" for problem in problems) else 0


def _parse_rule_selection(text: str) -> frozenset[str]:
    """Return the rules that `--select` names."""
    from dtctl.lint.rules import load_lint_rules

    only = frozenset(rule.strip().upper() for rule in text.split(",") if rule.strip())
    unknown = sorted(only - set(load_lint_rules()) - {"DT000"})
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]}", hint="`dtctl lint --list` names all")
    return only


def _print_rule_list(format_: OutputFormat) -> int:
    """Print all rules, one per line, or as JSON for programs; return the exit code."""
    from dtctl.lint.rules import load_lint_rules

    if format_ is OutputFormat.json:
        fields = ("id", "name", "severity", "fixable", "source")
        output.emit_json([{name: getattr(rule, name) for name in fields} for rule in load_lint_rules().values()])
        return 0
    for rule in load_lint_rules().values():
        output.print_stdout(f"{rule.id}  {rule.severity:<8} {rule.name}{' (--fix)' if rule.fixable else ''}")
    return 0


def _print_rule_explanation(name: str) -> int:
    from dtctl.lint.formats import explained
    from dtctl.lint.rules import SYNTAX, explained_syntax, load_lint_rules

    if name.upper() == SYNTAX:
        output.print_stdout(explained_syntax())
        return 0
    rule = load_lint_rules().get(name.upper())
    if rule is None:
        raise UsageError(f"there is no rule {name}", hint="`dtctl lint --list` names all")
    output.print_stdout(explained(rule))
    return 0


def _find_spec_sources(path: Path | None) -> tuple[Spec, list[Path]]:
    """Return the spec, and the Python and shell files that a launch of it would send.

    Raises:
        UsageError: there is no spec, or it has no such file.
        SpecError: the spec is wrong.
        PlanError: the files cannot be read.
    """
    by_name = "`dtctl lint train.py`, or `dtctl lint .` for a whole folder"
    name = path or Path(names.SPEC_FILE)
    if path is None and not name.is_file():
        raise UsageError("there is nothing to read", where=f"no {name} in this folder", hint=by_name)
    from dtctl.launch.files.tree import list_pushed_paths
    from dtctl.lint.source import has_source_suffix
    from dtctl.spec.load import load_spec

    spec = load_spec(name)
    script = spec.base_dir / spec.job.files.root / spec.job.script if spec.job.script is not None else None
    sent = [file for file in list_pushed_paths(spec) if has_source_suffix(file)] if spec.pushes else []
    sources = [file for file in sent if file.is_file()]
    if script is not None and script.is_file() and script.resolve() not in {file.resolve() for file in sources}:
        sources.append(script.resolve())
    if not sources:
        raise UsageError(f"{name} sends no Python or shell file that is on this machine", hint=by_name)
    output.print_stderr(f"{format_count(len(sources), 'file')} that a launch of {name} sends")
    return spec, [Path(os.path.relpath(file)) for file in sources]


def _count_nodes(spec: Spec) -> ClusterFacts:
    """Return the facts about the cluster of a spec."""
    from dtctl.lint.model import ClusterFacts
    from dtctl.spec.nodes import resolve_nodes

    return ClusterFacts(nodes=len(resolve_nodes(spec)))


def _read_cluster_facts(path: Path | None) -> ClusterFacts:
    """Return the spec's facts about the cluster; empty without a spec, or if a spec that no option names is wrong."""
    from dtctl.lint.model import ClusterFacts

    default = Path(names.SPEC_FILE)
    if path is None and not default.is_file():
        return ClusterFacts()
    from dtctl.spec.load import load_spec

    try:
        return _count_nodes(load_spec(path or default))
    except DtctlError as exc:
        if path is not None:
            raise
        output.print_stderr(f"note: {default} is ignored: {exc.message}")
        return ClusterFacts()


def _fix_problems(problems: Sequence[Problem]) -> None:
    from dtctl.lint.fixes import apply_fixes
    from dtctl.lint.source import STDIN

    files: dict[Path, str] = {}
    for item in problems:
        if item.edits and Path(item.path) != STDIN:
            files.setdefault(Path(item.path).resolve(), item.path)  # a link and its target count as one file
    for path in files.values():
        result = apply_fixes(Path(path), [item for item in problems if item.path == path])
        for problem in result.mended:
            output.print_stderr(f"fixed {problem.path}:{problem.line}: {problem.rule} {problem.message}")
        if result.refused:
            output.print_stderr(f"not fixed: {path}: {result.refused}")


def _print_problems(problems: Sequence[Problem], format_: OutputFormat, *, read: int) -> None:
    import dtctl
    from dtctl.lint import formats

    if format_ is OutputFormat.json:
        output.emit_json(formats.build_json_problems(problems))
    elif format_ is OutputFormat.sarif:
        output.print_stdout(formats.format_json_value(formats.build_sarif_log(problems, dtctl.__version__)))
    elif format_ is OutputFormat.github:
        for problem in problems:
            output.print_stdout(formats.format_github_command(problem))
    else:
        styles = {"error": "red", "warning": "yellow", "info": "dim"}
        for problem in problems:
            head, rest = formats.text_lines(problem)
            output.print_stdout(head, styles[problem.severity])
            output.print_stdout(rest)
        counts = Counter(item.severity for item in problems)
        fixable = sum(bool(item.edits) for item in problems)
        plural = {"error": "errors", "warning": "warnings"}
        summary = ", ".join(
            f"{count} {plural.get(name, name) if count > 1 else name}"
            for name in ("error", "warning", "info")
            if (count := counts[name])
        )
        output.print_stderr(
            (summary or ("nothing found" if read else "there was no file to read"))
            + (f"; {fixable} can be fixed with --fix" if fixable else "")
        )
