"""Changes of the `train:` section of a spec that keep everything else as it was written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtctl.errors import UsageError
from dtctl.spec.load import parse_spec

BYTE_ORDER_MARK = "\ufeff"
_SECTION = re.compile(r"train:\s*(?:#.*)?\Z")


def set_train_settings(text: str, settings: Mapping[str, Any]) -> str:
    """Return a spec's text with keys of its `train:` section set; comments and other keys stay.

    Raises:
        UsageError: the section is written in one line, which cannot be changed without losing how it was written.
    """
    lines = text.split("\n")
    end_of_line = "\r" if lines[0].endswith("\r") else ""
    entries = {key: f"{key}: {format_yaml_value(value)}" for key, value in settings.items()}
    start = next((number for number, line in enumerate(lines) if line.startswith("train:")), None)
    if start is None:
        above = text if not text or text.endswith("\n") else f"{text}{end_of_line}\n"
        section = ["train:", *(f"  {entry}" for entry in entries.values())]
        return above + "".join(f"{line}{end_of_line}\n" for line in section)
    if not _SECTION.match(lines[start].rstrip()):
        raise UsageError(
            "the train section is written on one line", hint="write one key per line; set these: "
            + ", ".join(entries.values()),
        )  # fmt: skip
    end = start + 1
    while end < len(lines) and _is_in_section(lines[end]):
        end += 1
    body = lines[start + 1 : end]
    indent = next((_indent_of(line) for line in body if _has_content(line)), "  ")
    body, unwritten = _replace_entries(body, indent, entries)
    added = [indent + entry + end_of_line for entry in unwritten]
    return "\n".join([*lines[: start + 1], *added, *body, *lines[end:]])


def _is_in_section(line: str) -> bool:
    """Return whether a line belongs to the section above it: it is empty, indented, or a comment."""
    return not line.strip() or line[0] in " \t#"


def _has_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _replace_entries(body: Sequence[str], indent: str, entries: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the lines of a section with new entries in the place of old ones, and the entries that had no place."""
    key_and_comment = re.compile(rf"{indent}(?P<key>[A-Za-z_0-9]+):.*?(?P<comment>(?:\s+#.*)?\r?)")
    unwritten = dict(entries)
    lines: list[str] = []
    in_old_value = False
    for line in body:
        old = key_and_comment.fullmatch(line)
        if old and old["key"] in unwritten:
            lines.append(indent + unwritten.pop(old["key"]) + old["comment"])
            in_old_value = True
            continue
        # An old value may extend over the deeper lines that follow its key.
        in_old_value = in_old_value and bool(line.strip()) and len(_indent_of(line)) > len(indent)
        if not in_old_value:
            lines.append(line)
    return lines, list(unwritten.values())


def format_yaml_value(value: object) -> str:
    """Return a value as written in a spec."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {format_yaml_value(item)}" for key, item in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def write_spec_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Change a spec in place, in one step, and only if the new one is valid. A link stays a link.

    Raises:
        UsageError: as `set_train_settings`, or the path is no plain file, or cannot be written.
        SpecError: the spec would not be right afterwards.
    """
    file = path.resolve()
    if not file.is_file():
        raise UsageError(f"{path} is not a regular file, so it cannot be changed", hint="name the spec itself")
    text = file.read_bytes().decode("utf-8")
    mark = text[: len(text) - len(text.removeprefix(BYTE_ORDER_MARK))]
    changed = set_train_settings(text.removeprefix(BYTE_ORDER_MARK), settings)
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
