"""Rendering of the scripts for nodes. Here: the folders of templates, and the process that renders them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import dtctl
from dtctl.plan.model import NodePlan, Plan

NODE_TEMPLATE = "node.sh.j2"
USER_FOLDER = "templates"
"""Folder next to the spec; a file in it with the name of one of dtctl's templates replaces that template."""


@functools.cache
def find_builtin_templates() -> Path:
    """Folder of the templates that come with dtctl: inside the installed package, or in the source tree."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_templates"
    return installed if installed.is_dir() else package.parent / "templates"


def list_template_folders(base_dir: Path) -> tuple[Path, ...]:
    """Return the folders to search for a template of a spec in `base_dir`, in order."""
    return (base_dir / USER_FOLDER, find_builtin_templates())


def render_template(name: str, values: Mapping[str, object], *, folders: Sequence[Path]) -> str:
    """Return the text of template `name`, taken from the first folder that has it.

    Templates that are not dtctl's own are rendered in a process with limits of memory and time.

    Args:
        name: file name of the template, such as `node.sh.j2`.
        values: what the template may use; a name that is not here is an error.
        folders: folders to search, the user's before dtctl's.

    Raises:
        RenderError: the template is missing, is not valid, uses a name that does not exist, or exceeds a limit.
    """
    if any(folder.is_dir() and not _is_builtin_folder(folder) for folder in folders):
        from dtctl.render import limited

        return limited.render_with_limits(name, values, folders=folders)
    from dtctl.render import templates

    return templates.render_in_process(name, values, folders=folders)


def render_node_script(plan: Plan, node: NodePlan, *, base_dir: Path) -> str:
    """Return the script that `node` runs.

    Args:
        plan: the attempt.
        node: one of its nodes.
        base_dir: folder of the spec, whose `templates/` may replace dtctl's template.

    Raises:
        RenderError: the template is missing or wrong.
    """
    values = {"version": dtctl.__version__, "plan": plan, "node": node}
    return render_template(NODE_TEMPLATE, values, folders=list_template_folders(base_dir))


def render_node_scripts(plan: Plan, *, base_dir: Path) -> dict[str, str]:
    """Return node name -> script, in node rank order.

    Raises:
        RenderError: the template is missing or wrong.
    """
    return {node.name: render_node_script(plan, node, base_dir=base_dir) for node in plan.nodes}


def _is_builtin_folder(folder: Path) -> bool:
    builtin = find_builtin_templates().resolve()
    return builtin in (folder.resolve(), *folder.resolve().parents)
