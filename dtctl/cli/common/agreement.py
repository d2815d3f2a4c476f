"""Agreement of the user, before a command acts on a spec, to everything that it reaches beyond its own folder."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.spec.model import Spec

Yes = Annotated[
    bool, typer.Option("--yes", help="Allow, without asking, everything the spec accesses outside its folder.")
]


def agreed(spec: Spec, *, yes: bool, launching: bool = False) -> None:
    """Ask for what the spec reaches beyond its folder, the first time that a command acts on this folder.

    Args:
        spec: The spec.
        yes: Agree to all of it.
        launching: The command runs the job of the folder, which is the user's consent that its programs may run.

    Raises:
        LaunchError: the user does not agree, or there is no terminal for the question.
    """
    from dtctl.launch import trust

    for name in trust.likely_secrets(spec, dict(os.environ)):
        hint = "named in job.secrets it is kept out of scripts and plans"
        output.err(f"warning: {name} looks like a secret and is sent by job.env_from: {hint}", "yellow")
    if launching:
        trust.agree_to_launch(spec)
    missing = trust.list_open(spec)
    if not missing:
        return
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        for text in missing:
            output.err(text, "yellow")
        output.err("agree to this, for this folder? [y/N] ")
        yes = sys.stdin.readline().strip().lower() in ("y", "yes")
    if yes:
        trust.agree(spec)
    trust.check(spec)
