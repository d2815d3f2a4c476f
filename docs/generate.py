"""Generate the reference pages from the code at build time, so that they cannot differ from it.

A hook of mkdocs: https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import inspect
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those on disk."""
    pages = {"commands": commands(), "spec": spec(), "errors": errors()}
    pages |= {"variables": variables(), "signatures": signatures(), "rules": rules()}
    pages["doctor-faults"] = doctor_faults()
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for file in benchmarks(config):
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Link the titles, in italics, of the pages made here; a clone does not have these, so its text only names them."""
    for title, path in generated_titles(config).items():
        link = posixpath.relpath(path, posixpath.dirname(page.file.src_uri))
        markdown = markdown.replace(f"*{title}*", f"[{title}]({link})")
    return markdown


def generated_titles(config: MkDocsConfig) -> dict[str, str]:
    """Title in the navigation -> path, of the pages that are not on disk."""
    return {title: path for title, path in _pages(config.nav or []) if not Path(config.docs_dir, path).exists()}


def _pages(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield title and path of all pages in a part of the navigation."""
    for entry in entries:
        for title, below in entry.items():
            if isinstance(below, list):
                yield from _pages(below)
            else:
                yield title, below


def commands() -> str:
    """Every command with its help, as the terminal shows it."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from dtctl.cli.app import make_app

    app = make_app()
    runner = CliRunner()

    def paths(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name in sorted(getattr(command, "commands", ())):
            below = command.get_command(None, name)
            if not below.hidden:
                yield from paths(below, (*path, name))

    parts = ["# Commands\n\nThis is what `dtctl COMMAND --help` (or `-h`) prints.\n"]
    for path in paths(get_command(app), ()):
        shown = runner.invoke(app, [*path, "--help"], prog_name="dtctl", terminal_width=80)
        parts.append(f"## {' '.join(('dtctl', *path))}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(parts)


def spec() -> str:
    """Every key of dtctl.yaml."""
    from dtctl.spec.schema import build_json_schema

    schema = build_json_schema()
    parts = [
        "# The spec\n",
        "Keys of `dtctl.yaml`. `dtctl validate` checks a file, `dtctl validate --schema` prints this as JSON Schema "
        "for your editor, and every key can be set on the command line: `dtctl launch --set train.lr=1e-3`.\n",
    ]
    for path, name in _section_paths(schema, schema, ()):
        section = schema["$defs"][name]
        meaning = _cell(section["description"])
        purpose = re.split(r"[;:.] |\.$", meaning)[0]
        title = f"{'.'.join(path)}: {purpose[0].lower()}{purpose[1:]}"
        parts.append(f"{'#' * (len(path) + 1)} {title} {{ #{name.lower()} }}\n")
        if meaning != f"{purpose}.":
            parts.append(f"{meaning}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts += [
            f"| `{key}` | {_type(value)} | {_default(value)} | {_cell(value.get('description', ''))} |"
            for key, value in section["properties"].items()
        ]
        parts.append("")
    return "\n".join(parts)


def _section_paths(schema: dict[str, Any], section: dict[str, Any], path: tuple[str, ...]) -> Iterator[Any]:
    """Yield the keys that lead to each section of a spec, and its name in the schema; outer sections first."""
    for key, value in section["properties"].items():
        for name in re.findall(r"#/\$defs/(\w+)", json.dumps(value)):
            yield (*path, key), name
            yield from _section_paths(schema, schema["$defs"][name], (*path, key))


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        return f"[mapping](#{name.lower()})"
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
    """Text for a cell of a table; in code, a `|` does not end the cell, and a backslash before it would be shown."""
    parts = text.split("`")
    parts[::2] = [part.replace("|", "\\|") for part in parts[::2]]
    return " ".join("`".join(parts).split())


def errors() -> str:
    """The tree of errors, with the exit code of each."""
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
    from dtctl.nccl.catalogue import load_variable_catalogue

    parts = [
        "# Variables of NCCL, torch and gloo\n\n`dtctl nccl explain NAME` prints a row of this table, and "
        "`dtctl nccl env` the variables that your nodes need. `dtctl doctor` finds those that differ, are misspelt, "
        "dead or dangerous.\n",
        "| variable | meaning | default | since | danger, or what to use instead |\n|---|---|---|---|---|",
    ]
    parts += [
        f"| `{one.name}` | {_cell(one.meaning)} | {_cell(one.default.replace('*', '&#42;'))} | {one.since} | "
        f"{_cell(one.danger or one.instead)} |"
        for one in load_variable_catalogue().values()
    ]
    return "\n".join(parts) + "\n"


def signatures() -> str:
    """Every text of a failed job that dtctl knows."""
    from dtctl.doctor.explain.signatures import load_exception_kinds
    from dtctl.doctor.explain.signatures import load_signatures as known

    parts = [
        "# What failed jobs print\n\n`dtctl doctor --log PATH...` looks for these texts, and distinguishes causes from "
        "consequences. Each heading begins with the id that `--json` has.\n"
    ]
    for one in known():
        rerun = (
            f" This text has several causes; to find out which, run {_cell(one.ambiguous)}." if one.ambiguous else ""
        )
        parts.append(
            f"{_cause_heading(one)}```text\n{one.example.strip()}\n```\n\n**Cause:** {_filled(one.cause)}.{rerun}\n\n"
            f"**Fix:** {_filled(one.fix)}. [Source]({one.source})\n"
        )
    parts.append(
        "# Exceptions without a known text\n\nThe doctor recognizes these by their class, their error number, and the "
        "file that raised them.\n"
    )
    parts += [
        f"{_cause_heading(one)}**Cause:** {_filled(one.cause)}.\n\n**Fix:** {_filled(one.fix)}.\n"
        for one in load_exception_kinds().values()
        if one.id not in {other.id for other in known()}
    ]
    return "\n".join(parts)


def _cause_heading(known: Any) -> str:
    """Heading of a known failure: its id, which alone is the anchor, and its cause."""
    cause = re.split(r"; |: ", re.sub(r" \([^)]*\)", "", _filled(known.cause)))[0]
    return f"## {known.id}: {cause} {{ #{known.id} }}\n\n"


def _filled(text: str) -> str:
    """Text for a cell, with `NAME` for what dtctl fills in from a log; attr_list would take `{name}` for attributes."""
    return re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), _cell(text))


def rules() -> str:
    """Every rule of the linter."""
    from dtctl.lint.rules import load_lint_rules as known

    parts = [
        "# Rules of the linter\n\n`dtctl lint --explain DT011` prints the same text. "
        "[How to use the linter](../guides/lint.md).\n"
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


def benchmarks(config: MkDocsConfig) -> Iterator[File]:
    """A page for each question that kept results answer, with its plots, and one that lists them."""
    with _benchmarks_folder():
        from plot import THEMES, drawn
        from questions import answers
        from readme import section

        rows = []
        for answer in answers():
            plots = []
            for chart in (chart for chart in answer.charts if chart.plotted):
                for theme in THEMES:
                    yield File.generated(config, f"benchmarks/{chart.name}.{theme}.svg", content=drawn(chart, theme))
                    plots.append(f"![{chart.title}]({chart.name}.{theme}.svg#only-{theme})")
            text = section(answer, plots="\n".join(plots), level=1)
            yield File.generated(config, f"benchmarks/{answer.slug}.md", content=text)
            rows.append(f"| [{answer.question}]({answer.slug}.md) | {_cell(answer.answer)} |")
        head = (
            "# Benchmarks\n\nEvery page is generated from results in `benchmarks/results/`. All programs of a table "
            "ran in turn on one otherwise idle machine; figures are medians. Each page names its missed targets.\n\n"
            "| question | answer |\n|---|---|\n"
        )
        yield File.generated(config, "benchmarks/index.md", content=head + "\n".join(rows) + "\n" + gpu_checks())


def gpu_checks() -> str:
    """The newest result of `make gpu`, as a table."""
    kept = max((ROOT / "benchmarks" / "results").glob("gpu-*.json"), default=None)
    if kept is None:
        return "\n## On a GPU\n\nNo result of `make gpu` is kept.\n"
    from benchmarks.gpu import table

    return f"\n## make gpu\n\n{table(json.loads(kept.read_text(encoding='utf-8')))}"


@contextmanager
def _benchmarks_folder() -> Iterator[None]:
    """Make the modules of benchmarks/ importable, as its programs do."""
    folders = [str(ROOT / "benchmarks"), str(ROOT)]
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(folder)


FAULTS = "doctor-faults"
LAYERS = ("all", "reach", "node", "network", "links", "settings", "torch")


def doctor_faults() -> str:
    """Reports of the doctor, of torchrun, and of ping with nc about each injected fault."""
    path = max((ROOT / "benchmarks" / "results").glob(f"{FAULTS}-*.json"))
    kept = json.loads(path.read_text(encoding="utf-8"))
    rows = {name: row for name, row in kept["faults"].items() if row["doctor"]["status"] != "ok"}
    right = sum(row["doctor"]["right"] for row in rows.values())
    silent = sum(row["torchrun"]["says"].startswith("nothing") for row in rows.values())
    hung = sum(row["torchrun"]["says"].count("(nothing more") == 3 for row in rows.values())
    asked = sum(row["torchrun"]["says"] != "not asked" for row in rows.values())
    blind = sum(row["ping and nc"]["says"] == "all is well" for row in rows.values())
    parts = [
        "# Faults, and what the doctor, torchrun and ping report\n",
        f"The doctor's tests (`tests/fault/test_doctor*.py`) injected {len(rows)} faults into three virtual hosts "
        f"({kept['date']}, torch {kept['versions']['torch']}, {kept['versions']['cores']} cores, other programs ran). "
        f"`dtctl doctor` named the right check, the right nodes, one primary cause and a fix for {right} of them. "
        f"torchrun, started by hand on each host for three all_reduce with gloo and a time-out of 6 s, was tried with "
        f"{asked} of them: it succeeded with {silent} (many affect only larger jobs, or NCCL), and with {hung} it had "
        f"printed nothing when it was stopped after 22 s. With {blind} of the faults, pinging node1 and calling its "
        "port with `nc -z` from the others found nothing wrong. Seconds include SSH. "
        "`python benchmarks/doctor_faults.py` generates the table again.\n",
        "| fault | `dtctl doctor`: primary | nodes | right | s | torchrun alone | s | ping and nc |",
        "|---|---|---|---|--:|---|--:|---|",
    ]
    for name, row in sorted(kept["faults"].items(), key=lambda pair: LAYERS.index(pair[1]["layer"])):
        said, others = row["doctor"], row["torchrun"]
        primary = f"**{said['check']}** ({said['status']}): {said['summary']}" if said["check"] else said["summary"]
        if said.get("also"):
            primary += f"; also {'; '.join(said['also'])}"
        cells = [name, primary, ", ".join(said["nodes"]), "yes" if said["right"] else "no", f"{said['took_s']:.1f}"]
        cells += [
            _together(others["says"]),
            f"{others['took_s']:.1f}" if others["took_s"] else "",
            row["ping and nc"]["says"],
        ]
        parts.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(parts) + "\n"


def _together(says: str) -> str:
    """The reports of the nodes, as one if all are the same."""
    told = [text.partition(": ")[2] for text in says.split("; node")]
    return f"on all nodes: {told[0]}" if len(told) > 1 and len(set(told)) == 1 else says
