"""Reference pages made from the code at build time, so that they cannot say anything else than the code does.

A hook of mkdocs: https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those on disk."""
    pages = {"commands": commands(), "spec": spec(), "errors": errors(), "benchmarks": benchmarks()}
    pages |= {"variables": variables(), "signatures": signatures(), "rules": rules()}
    pages["doctor-faults"] = doctor_faults()
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def commands() -> str:
    """Every command with its help, as the terminal shows it."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from dtctl.cli.app import app_of

    app = app_of(())
    runner = CliRunner()

    def paths(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, below in sorted(getattr(command, "commands", {}).items()):
            if not below.hidden:
                yield from paths(below, (*path, name))

    parts = ["# Commands\n\n`-h` works everywhere. What stands here is what it prints.\n"]
    for path in paths(get_command(app), ()):
        shown = runner.invoke(app, [*path, "--help"], prog_name="dtctl", terminal_width=100)
        parts.append(f"## {' '.join(('dtctl', *path))}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(parts)


def spec() -> str:
    """Every key of dtctl.yaml."""
    from dtctl.spec.schema import json_schema

    schema = json_schema()
    parts = [
        "# The spec\n",
        "Keys of `dtctl.yaml`. `dtctl validate` checks a file, `dtctl validate --schema` prints this as JSON Schema "
        "for your editor, and every key can be set on the command line: `dtctl launch --set train.lr=1e-3`.\n",
    ]
    sections = [("", schema), *schema["$defs"].items()]
    for name, section in sections:
        if not name:
            continue
        parts.append(f"## {name}\n\n{_cell(section.get('description', ''))}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts += [
            f"| `{key}` | {_type(value)} | {_default(value)} | {_cell(value.get('description', ''))} |"
            for key, value in section["properties"].items()
        ]
        parts.append("")
    return "\n".join(parts)


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(option) for option in value["anyOf"] if option.get("type") != "null"))
    kind = value.get("type", "any")
    if kind == "array":
        return f"list of {_type(value.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _default(value: dict[str, Any]) -> str:
    found = value.get("default")
    return "" if found is None or found == [] or found == {} else f"`{json.dumps(found)}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def errors() -> str:
    """The tree of errors, and what each ends a command with."""
    from dtctl import errors as module

    tree = inspect.getdoc(module) or ""
    head, _, rest = tree.partition("\n\n")
    drawn = inspect.cleandoc(rest.partition("An error is a fact")[0])
    return (
        "# Errors and exit codes\n\nAn error is three lines: the fact, the place, and what to do next. Its class "
        f"decides the exit code.\n\n{head}\n\n```text\n{drawn}\n```\n"
    )


def variables() -> str:
    """Every variable of NCCL, torch and gloo that dtctl knows."""
    from dtctl.nccl.catalogue import catalogue

    parts = [
        "# Variables of NCCL, torch and gloo\n\n`dtctl nccl explain NAME` says the same, `dtctl nccl env` which ones "
        "your nodes need, and `dtctl doctor` finds those that differ, are misspelt, dead or dangerous.\n",
        "| variable | meaning | default | since | danger, or what to use instead |\n|---|---|---|---|---|",
    ]
    parts += [
        f"| `{one.name}` | {_cell(one.meaning)} | {_cell(one.default)} | {one.since} | "
        f"{_cell(one.danger or one.instead)} |"
        for one in catalogue().values()
    ]
    return "\n".join(parts) + "\n"


def signatures() -> str:
    """Every text of a failed job that dtctl knows."""
    from dtctl.doctor.explain.signatures import kinds
    from dtctl.doctor.explain.signatures import signatures as known

    parts = [
        "# What failed jobs print\n\n`dtctl doctor --log PATH...` looks for these and tells cause from consequence.\n"
    ]
    for one in known():
        rerun = f" This text alone cannot tell the cause; run {_cell(one.ambiguous)}." if one.ambiguous else ""
        parts.append(
            f"## {one.id}\n\n```text\n{one.example.strip()}\n```\n\n{_cell(one.cause)}.{rerun}\n\n"
            f"**Fix:** {_cell(one.fix)}. [Source]({one.source})\n"
        )
    parts.append(
        "# Exceptions that no text is known of\n\nThey are told by their class, their error number, and the file that "
        "raised them.\n"
    )
    parts += [
        f"## {one.id}\n\n{_cell(one.cause)}.\n\n**Fix:** {_cell(one.fix)}.\n"
        for one in kinds().values()
        if one.id not in {other.id for other in known()}
    ]
    return "\n".join(parts)


def rules() -> str:
    """Every rule of the linter."""
    from dtctl.lint.rules import rules as known

    parts = [
        "# Rules of the linter\n\n`dtctl lint --explain DT011` says the same. [How to use it](../guides/lint.md).\n"
    ]
    for one in known().values():
        exempt = f"Does not apply: {_cell(one.exempt)}.\n\n" if one.exempt else ""
        fixed = " `--fix` fixes the plain cases." if one.fixable else ""
        parts.append(
            f"## {one.id}: {one.name}\n\n{one.severity}. {_cell(one.why)}\n\n"
            f"Wrong:\n\n```python\n{one.wrong.strip()}\n```\n\nRight:\n\n```python\n{one.right.strip()}\n```\n\n"
            f"{exempt}**Fix:** {_cell(one.fix)}.{fixed} [Source]({one.source})\n"
        )
    return "\n".join(parts)


def benchmarks() -> str:
    """The newest result of every benchmark that was kept."""
    parts = [
        "# Benchmarks\n\nEvery table is made from a kept result in `benchmarks/results/`, which one command makes "
        "anew: `python benchmarks/NAME.py`. All programs of a table ran in turn on one otherwise idle machine; figures "
        "are medians.\n"
    ]
    newest: dict[str, Path] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        newest[_benchmark_of(path)] = path
    newest.pop(FAULTS, None)  # has a page of its own
    newest.pop("logs", None)  # is told in the guide of the doctor
    for name, path in newest.items():
        kept = json.loads(path.read_text(encoding="utf-8"))
        machine = ", ".join(f"{key} {value}" for key, value in kept.get("versions", {}).items())
        when = "".join(f"{text}. " for text in (kept.get("date", ""), machine) if text).strip()
        if isinstance(kept.get("checks"), list):
            parts.append(f"## {name}\n\n{_gpu_checks(kept)}")
            continue
        parts.append(f"## {name}\n\n{when}\n")
        parts += [_rows(title, rows) for title, rows in kept.items() if isinstance(rows, dict) and title != "versions"]
    return "\n".join(parts)


def _gpu_checks(kept: dict[str, Any]) -> str:
    """The table of `make gpu`."""
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.gpu import table
    finally:
        sys.path.remove(str(ROOT))
    return table(kept)


def _benchmark_of(path: Path) -> str:
    return re.sub(r"-\d{8}-\d{4}$", "", path.stem)


FAULTS = "doctor-faults"
LAYERS = ("all", "reach", "node", "network", "links", "settings", "torch")


def doctor_faults() -> str:
    """What the doctor, torchrun, and ping with nc say of each injected fault."""
    path = max((ROOT / "benchmarks" / "results").glob(f"{FAULTS}-*.json"))
    kept = json.loads(path.read_text(encoding="utf-8"))
    rows = {name: row for name, row in kept["faults"].items() if row["doctor"]["status"] != "ok"}
    right = sum(row["doctor"]["right"] for row in rows.values())
    silent = sum(row["torchrun"]["says"].startswith("nothing") for row in rows.values())
    hung = sum(row["torchrun"]["says"].count("(nothing more") == 3 for row in rows.values())
    asked = sum(row["torchrun"]["says"] != "not asked" for row in rows.values())
    blind = sum(row["ping and nc"]["says"] == "all is well" for row in rows.values())
    parts = [
        "# What the doctor says of a fault, and what others say\n",
        f"{len(rows)} faults injected into three virtual hosts by the doctor's tests (`tests/fault/test_doctor*.py`), "
        f"{kept['date']}, torch {kept['versions']['torch']}, {kept['versions']['cores']} cores, other work beside. "
        f"`dtctl doctor` named the right check, the right nodes, one primary cause and a fix for {right} of them. "
        f"torchrun, started by hand on each host for three all_reduce with gloo and a time-out of 6 s, ran well with "
        f"{silent} of the {asked} it was asked of (many hurt only larger jobs, or NCCL), "
        f"and had said nothing when it was ended after "
        f"22 s with {hung}; pinging node1 and calling its port with `nc -z` from the others found nothing wrong in "
        f"{blind}. Seconds include SSH. "
        "`python benchmarks/doctor_faults.py` regenerates the table.\n",
        "| fault | `dtctl doctor`: primary | nodes | right | s | torchrun alone | s | ping and nc |",
        "|---|---|---|---|--:|---|--:|---|",
    ]
    for name, row in sorted(kept["faults"].items(), key=lambda pair: LAYERS.index(pair[1]["layer"])):
        said, others = row["doctor"], row["torchrun"]
        primary = f"**{said['check']}** ({said['status']}): {said['summary']}" if said["check"] else said["summary"]
        if said.get("also"):
            primary += f"; beside it {'; '.join(said['also'])}"
        cells = [name, primary, ", ".join(said["nodes"]), "yes" if said["right"] else "no", f"{said['took_s']:.1f}"]
        cells += [
            _together(others["says"]),
            f"{others['took_s']:.1f}" if others["took_s"] else "",
            row["ping and nc"]["says"],
        ]
        parts.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(parts) + "\n"


def _together(says: str) -> str:
    """What nodes say, once where all say the same."""
    told = [text.partition(": ")[2] for text in says.split("; node")]
    return f"on all nodes: {told[0]}" if len(told) > 1 and len(set(told)) == 1 else says


COLUMNS = 8
"""A table with more would not fit on a page; raw samples are left to the file."""


def _rows(title: str, rows: dict[str, Any]) -> str:
    """A table of what was kept under one title: a row for each thing that was measured, a column for each figure."""
    if not any(isinstance(row, dict) for row in rows.values()):
        rows = {title: rows}
    flat = {
        (f"{name} nodes: {inner}" if str(name).isdigit() else f"{name}: {inner}"): row
        for name, outer in rows.items()
        if isinstance(outer, dict) and any(isinstance(row, dict) for row in outer.values())
        for inner, row in outer.items()
        if isinstance(row, dict)
    } or {name: row for name, row in rows.items() if isinstance(row, dict)}
    plain = {
        name: {key: value for key, value in row.items() if isinstance(value, str | int | float)}
        for name, row in flat.items()
    }
    columns = list(dict.fromkeys(key for row in plain.values() for key in row))[:COLUMNS]
    if not columns:
        return ""
    head = f"| | {' | '.join(_cell(key) for key in columns)} |\n|---|{'--:|' * len(columns)}\n"
    lines = [
        f"| {_cell(name)} | {' | '.join(_figure(row.get(key)) for key in columns)} |" for name, row in plain.items()
    ]
    return f"### {title}\n\n{head}" + "\n".join(lines) + "\n"


def _figure(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else _cell(str(value))
