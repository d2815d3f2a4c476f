"""New projects from templates: the folders below `templates/init/`, one a template.

A file that ends in `.j2` is rendered, every other one is copied as it is. The line `description:` of `template.yaml` is
shown by `dtctl init --list`.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import dtctl
from dtctl import names
from dtctl.errors import RenderError, UsageError
from dtctl.render import find_builtin_templates, render_template

LAUNCHERS = ("local", "ssh", "slurm", "sandbox")
ABOUT = "template.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectTemplate:
    """A kind of project that `dtctl init` can make."""

    name: str
    description: str
    folder: Path


def list_project_templates() -> list[ProjectTemplate]:
    """Return all templates, by name."""
    root = find_builtin_templates() / "init"
    available = []
    for folder in sorted(root.iterdir()):
        description_file = folder / ABOUT
        if description_file.is_file():
            match = re.search(r"^description:\s*(.+)$", description_file.read_text(encoding="utf-8"), re.MULTILINE)
            available.append(ProjectTemplate(name=folder.name, description=match[1] if match else "", folder=folder))
    return available


def create_project(folder: Path, *, template: str, launcher: str, force: bool, spec_only: bool = False) -> list[Path]:
    """Make a project; return the written files, relative to `folder`, in order.

    Args:
        folder: folder of the project; made if it does not exist.
        template: name of a template.
        launcher: transport of the new spec.
        force: write into a folder that is not empty, and replace files of the same name.
        spec_only: write the spec alone, into any folder that has none.

    Raises:
        UsageError: an unknown template or launcher, or a folder that is not empty.
        RenderError: a template is wrong.
    """
    by_name = {item.name: item for item in list_project_templates()}
    if template not in by_name:
        raise UsageError(f"there is no template {template}", hint=f"choose one of {', '.join(by_name)}")
    if launcher not in LAUNCHERS:
        raise UsageError(f"there is no launcher {launcher}", hint=f"choose one of {', '.join(LAUNCHERS)}")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="name a folder that does not exist yet")
    if spec_only and os.path.lexists(folder / names.SPEC_FILE) and not force:
        raise UsageError(f"{folder} has a spec", where=str(folder / names.SPEC_FILE), hint="--force would replace it")
    if folder.is_dir() and any(folder.iterdir()) and not force and not spec_only:
        raise UsageError(f"{folder} is not empty", hint=_describe_forced_write(by_name[template].folder, folder))
    values = {"name": folder.resolve().name, "launcher": launcher, "version": dtctl.__version__}
    made: list[Path] = []
    try:
        files = _write_project_files(by_name[template].folder, folder, values, made, spec_only=spec_only)
    except OSError as exc:
        for path in reversed(made):  # otherwise empty files would stay on a full disk
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise UsageError(f"cannot write the project: {exc.strerror}", where=str(exc.filename or folder)) from exc
    if not files:
        raise RenderError("the template has no files", where=str(by_name[template].folder))
    return files


def _list_template_files(source: Path) -> dict[Path, Path]:
    """Return the files of a template, by their paths in a project."""
    files = {}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_file() and relative != Path(ABOUT) and "__pycache__" not in relative.parts:
            files[relative.with_suffix("") if relative.suffix == ".j2" else relative] = path
    return files


def _describe_forced_write(source: Path, folder: Path) -> str:
    """Return the hint for a folder that is not empty: it names the user's files that --force would replace."""
    replaced = [str(path) for path in _list_template_files(source) if os.path.lexists(folder / path)]
    if not replaced:
        return "name another folder, or use --force to write into it, or --spec-only if you have a program already"
    return f"--force would replace {', '.join(replaced)}; --spec-only writes dtctl.yaml alone, for a program of yours"


def _write_project_files(
    source: Path, folder: Path, values: dict[str, str], made: list[Path], *, spec_only: bool
) -> list[Path]:
    """Write the project; return its files, relative to `folder`. `made` receives the folders and files that are new."""
    files = []
    for relative, path in _list_template_files(source).items():
        if spec_only and relative != Path(names.SPEC_FILE):
            continue
        target, rendered = folder / relative, path.suffix == ".j2"
        text = render_template(path.name, values, folders=[path.parent]).encode() if rendered else path.read_bytes()
        made += [parent for parent in reversed(target.parents) if not parent.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            made.append(target)
        target.write_bytes(text)
        if os.access(path, os.X_OK):
            target.chmod(0o755)
        files.append(target.relative_to(folder))
    return files
