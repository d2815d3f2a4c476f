"""Hostfiles of MPI and DeepSpeed: `name slots=4`, one node a line. Pure but for reading the file."""

from __future__ import annotations

import re
from pathlib import Path

from dtctl.errors import SpecError

_WORD = re.compile(r"(?P<key>slots|max_slots|max-slots)\s*=\s*(?P<value>\S+)")


def parse(text: str, *, source: str) -> list[tuple[str, int | None]]:
    """Names and slots (None where the line says nothing), in the order of the file.

    Understands `name slots=4 max_slots=8` (Open MPI, DeepSpeed) and `name:4` (MPICH); `#` begins a comment.

    Raises:
        SpecError: a line is not of this form, a name stands twice, or there is none.
    """
    found: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split(None, 1)
        if not words:
            continue
        where = f"{source}:{number}"
        name, slots = words[0], None
        if re.fullmatch(r"[^:\[\]]+:\d+", name):
            name, count = name.rsplit(":", 1)
            slots = int(count)
        for match in _WORD.finditer(words[1] if len(words) > 1 else ""):
            if match["key"] == "slots":
                slots = _count(match["value"], where)
        rest = _WORD.sub("", words[1]).strip() if len(words) > 1 else ""
        if rest:
            raise SpecError(f"{rest!r} means nothing in a hostfile", where=where, hint="write `name slots=4`")
        if name in found:
            raise SpecError(
                f"node {name} stands twice in the hostfile", where=where, hint="add up its slots in one line"
            )
        found[name] = slots
    if not found:
        raise SpecError("the hostfile names no node", where=source, hint="write one `name slots=4` a line")
    return list(found.items())


def _count(text: str, where: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise SpecError(f"slots={text} is not a number of workers", where=where, hint="write `slots=4`")
    return int(text)


def read(path: Path) -> list[tuple[str, int | None]]:
    """The nodes of the hostfile at `path`.

    Raises:
        SpecError: it cannot be read, or is wrong. Never quietly taken for an empty one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"the hostfile cannot be read: {exc}", where=str(path), key="cluster.hostfile") from exc
    return parse(text, source=str(path))
