"""Rendering a template: dtctl's own at once, those that came with a project in a process with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dtctl.render import catalogue, limited, templates


def render(name: str, values: Mapping[str, object], *, folders: Sequence[Path]) -> str:
    """The text of template `name`, taken from the first folder that has it.

    Templates that are not dtctl's own are rendered in a process with limits of memory and time.

    Args:
        name: file name of the template, such as `node.sh.j2`.
        values: what the template may use; a name that is not here is an error.
        folders: where to look, the user's before dtctl's.

    Raises:
        RenderError: the template is missing, is not valid, uses a name that does not exist, or exceeds a limit.
    """
    if any(folder.is_dir() and not _is_own(folder) for folder in folders):
        return limited.render(name, values, folders=folders)
    return templates.render(name, values, folders=folders)


def _is_own(folder: Path) -> bool:
    own = catalogue.builtin().resolve()
    return own in (folder.resolve(), *folder.resolve().parents)
