"""Changes of the `train:` section of a spec that keep everything else as it was written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtctl.errors import UsageError
from dtctl.spec.load import parse_spec

BYTE_ORDER_MARK = "\ufeff"
_SECTION = re.compile(r"train:\s*(?:#.*)?\Z")


def with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """Return a spec's text with keys of its `train:` section set; comments and other keys stay.

    Raises:
        UsageError: the section is written in one line, which cannot be changed without losing how it was written.
    """
    lines = text.split("\n")
    end_of_line = "\r" if lines[0].endswith("\r") else ""
    at = next((number for number, line in enumerate(lines) if line.startswith("train:")), None)
    new_lines = {key: f"{key}: {as_yaml(value)}" for key, value in settings.items()}
    if at is None:
        above = text if not text or text.endswith("\n") else f"{text}{end_of_line}\n"
        return above + "".join(
            f"{entry}{end_of_line}\n" for entry in ("train:", *(f"  {x}" for x in new_lines.values()))
        )
    if not _SECTION.match(lines[at].rstrip()):
        raise UsageError(
            "the train section is written on one line", hint="write one key per line; set these: "
            + ", ".join(new_lines.values()),
        )  # fmt: skip
    end = at + 1
    while end < len(lines) and (not lines[end].strip() or lines[end][0] in " \t#"):
        end += 1
    body = lines[at + 1 : end]
    content_lines = (line for line in body if line.strip() and not line.lstrip().startswith("#"))
    indent = next((line[: len(line) - len(line.lstrip())] for line in content_lines), "  ")
    remaining, dropping = [], False
    for line in body:
        match = re.match(rf"{indent}([A-Za-z_0-9]+):", line)
        if match:
            dropping = match[1] in new_lines
            if dropping:
                comment = re.search(r"(?:\s+#.*)?\r?\Z", line)
                remaining.append(indent + new_lines.pop(match[1]) + (comment[0] if comment else ""))
        if not match and not (dropping and line.strip() and len(line) - len(line.lstrip()) > len(indent)):
            dropping = False
        if not dropping:
            remaining.append(line)
    new = [indent + entry + end_of_line for entry in new_lines.values()]
    return "\n".join([*lines[: at + 1], *new, *remaining, *lines[end:]])


def as_yaml(value: object) -> str:
    """Return a value as written in a spec."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def write_spec_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Change a spec in place, in one step, and only if the new one is valid. A link stays a link.

    Raises:
        UsageError: as `with_settings`, or the path is no plain file, or cannot be written.
        SpecError: the spec would not be right afterwards.
    """
    file = path.resolve()
    if not file.is_file():
        raise UsageError(f"{path} is not a regular file, so it cannot be changed", hint="name the spec itself")
    text = file.read_bytes().decode("utf-8")
    mark = text[: len(text) - len(text.removeprefix(BYTE_ORDER_MARK))]
    changed = with_settings(text.removeprefix(BYTE_ORDER_MARK), settings)
    parse_spec(changed, source=str(path), base_dir=file.parent)
    temporary = file.with_name(f".{file.name}.dtctl-{os.getpid()}")
    try:
        with temporary.open("wb") as out:
            out.write((mark + changed).encode("utf-8"))
            out.flush()
            os.fsync(out.fileno())
        temporary.chmod(file.stat().st_mode & 0o777)
        temporary.replace(file)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {exc.strerror}") from exc
