"""`dtctl init`: a new project that `dtctl launch` runs as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtctl import shell
from dtctl.cli import output
from dtctl.printable import format_count


def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The new project's folder.", show_default=False)
    ] = None,
    template: Annotated[str, typer.Option(metavar="NAME", help="What the project trains; see --list.")] = "gpt",
    launcher: Annotated[
        str, typer.Option(metavar="WHERE", help="Where it runs: local, ssh, slurm or sandbox.")
    ] = "local",
    list_: Annotated[bool, typer.Option("--list", help="List the templates.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that has files, and replace those of the same name.")
    ] = False,
    spec_only: Annotated[
        bool, typer.Option("--spec-only", help="Write dtctl.yaml alone, for a program that you have.")
    ] = False,
) -> None:
    """Create a new project from a template."""
    from dtctl.errors import UsageError
    from dtctl.render import project

    if list_:
        output.print_table(
            [[item.name, item.description] for item in project.list_project_templates()],
            header=["TEMPLATE", "WHAT IT IS"],
        )
        return
    if folder is None:
        raise UsageError("the new project needs a folder", hint="dtctl init my-project")
    files = project.create_project(folder, template=template, launcher=launcher, force=force, spec_only=spec_only)
    output.print_stderr(f"created {folder} from template {template}: {format_count(len(files), 'file')}")
    for path in files:
        output.print_stderr(f"  {path}", "dim")
    place = str(folder) if not str(folder).startswith("-") else f"./{folder}"
    named = "name your program as job.script in dtctl.yaml, then: " if spec_only else ""
    output.print_stdout(f"next: {named}cd {shell.quote_word(place)} && dtctl launch")
