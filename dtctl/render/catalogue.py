"""Where templates are: those that come with dtctl, and the user's, which win."""

from __future__ import annotations

from pathlib import Path

USER_FOLDER = "templates"
"""Folder beside the spec; a file in it with the name of one of dtctl's templates is used instead."""


def builtin() -> Path:
    """Folder of the templates that come with dtctl: inside the installed package, or in the source tree."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_templates"
    return installed if installed.is_dir() else package.parent / "templates"


def folders(base_dir: Path) -> tuple[Path, ...]:
    """Where to look for a template of a spec that lies in `base_dir`, in order."""
    return (base_dir / USER_FOLDER, builtin())
