"""Consent of the user to everything outside of a spec's folder that the spec uses."""

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

Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the spec.")]
"""Option of commands that read a spec."""


def require_spec_agreement(spec: Spec, *, yes: bool, launching: bool = False) -> None:
    """Ask the user to agree to what the spec uses outside of its folder, at the first command for this folder.

    Args:
        spec: the checked spec.
        yes: whether the user agrees to everything.
        launching: whether the command runs the job, by which the user agrees that the folder's programs run.

    Raises:
        LaunchError: the user does not agree, or there is no terminal for the question.
    """
    from dtctl.launch import trust

    for name in trust.find_likely_secrets(spec, dict(os.environ)):
        hint = "if job.secrets names it, it is kept out of scripts and plans"
        output.print_stderr(f"warning: {name} looks like a secret and is sent by job.env_from: {hint}", "yellow")
    if launching:
        trust.agree_to_launch(spec)
        if yes:
            trust.agree_to_builds(spec)
    missing = trust.list_open(spec)
    if not missing:
        return
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        for text in missing:
            output.print_stderr(text, "yellow")
        output.print_stderr("agree to this, for this folder? [y/N] ")
        yes = sys.stdin.readline().strip().lower() in ("y", "yes")
    if yes:
        trust.record_agreement(spec)
    trust.require_user_agreement(spec)
