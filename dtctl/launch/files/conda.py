"""Environments of conda (environment.yml), which nodes cannot install: the requirements to write in their place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from dtctl.errors import PlanError

_SECTION: Final = re.compile(r"^dependencies:", re.MULTILINE)
_PACKAGE: Final = re.compile(
    r"(?:\S+::)?(?P<name>[A-Za-z0-9][\w.-]*)\s*(?P<operator>[=<>!~]*)\s*(?P<version>[^\s=]*)(?P<rest>.*)", re.DOTALL
)
_OTHER_NAMES: Final = {"pytorch": "torch", "pytorch-gpu": "torch", "pytorch-cpu": "torch"}
"""Packages of conda that have another name on PyPI."""
_LEFT_OUT: Final = re.compile(r"(?:pytorch-cuda|cuda.*|cudnn|nccl|gcc.*|gxx.*|.*compiler.*|mkl.*|_.*|lib.*)\Z")
"""Packages of conda that are no packages of Python, or that the wheels of torch contain."""


def refuse_conda_file(path: Path, text: str, where: str) -> None:
    """Raise an error if a file of requirements is an environment of conda.

    Raises:
        PlanError: it is one; the hint has the requirements in its place.
    """
    if path.suffix not in {".yml", ".yaml"} or not _SECTION.search(text):
        return
    raise PlanError(
        f"{path.name} is an environment of conda, which is not supported: nodes install wheels from a package index",
        where=where,
        hint=_describe_replacement(text),
    )


def _describe_replacement(text: str) -> str:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        document = None
    entries = document.get("dependencies") if isinstance(document, dict) else None
    lines, python, left_out = _translate_packages(entries if isinstance(entries, list) else [])
    if not lines:
        return "write a requirements.txt with the same packages, and name it in `job.environment.requirements`"
    hint = f"write requirements.txt with these lines: {', '.join(lines)}; and `job.environment: {{requirements: "
    hint += f'requirements.txt, python: "{python}"}}`' if python else "requirements.txt}`"
    if left_out:
        hint += f"; {', '.join(left_out)} {'is' if len(left_out) == 1 else 'are'} left out, as no package of PyPI"
    return hint


def _translate_packages(entries: list[Any]) -> tuple[list[str], str, list[str]]:
    """Return lines of requirements, the version of Python, and the packages that are left out."""
    lines, python, left_out = [], "", []
    for entry in entries:
        if isinstance(entry, dict):
            lines += [str(line) for line in entry.get("pip") or []]
            continue
        match = _PACKAGE.match(str(entry))
        if match is None or match["name"] == "pip":
            continue
        name, operator, version = match["name"], match["operator"], match["version"]
        if name == "python":
            found = re.match(r"3\.\d+", version)
            python = found[0] if found and operator in {"=", "=="} else ""
        elif _LEFT_OUT.match(name):
            left_out.append(name)
        else:
            lines.append(_OTHER_NAMES.get(name, name) + _translate_version(operator, version, match["rest"]))
    return lines, python, left_out


def _translate_version(operator: str, version: str, rest: str) -> str:
    if not version:
        return ""
    if operator != "=":
        return f"{operator}{version}{rest.strip()}"
    # In conda, `a=1.3` is any version that begins with 1.3, and a third part is the name of a build.
    is_whole = version.endswith("*") or rest.startswith("=") or version.count(".") > 1
    return f"=={version}" if is_whole else f"=={version}.*"
