"""YAML with positions: the data of a file, and the line on which each key stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from dtctl.errors import SpecError

Path = tuple[str | int, ...]
MAX_NODES = 100_000
"""Most values that a spec may have, aliases counted each time: the bound on files made to fill the memory."""

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file."""

    data: Any
    lines: dict[Path, int]
    """Key path -> line, from 1. A key's line, not that of its value; list entries by index."""
    source: str

    def where(self, path: Path) -> str:
        """`file:line` of the key at `path`, or of the nearest one above it that stands in the file."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return f"{self.source}:{self.lines[path[:end]]}"
        return self.source


def parse(text: str, *, source: str) -> Document:
    """Read YAML.

    Args:
        text: the file's text.
        source: its name, for messages.

    Raises:
        SpecError: not YAML, several documents, a key that stands twice, or unreasonably many values.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        lines: dict[Path, int] = {}
        if root is not None:
            _walk(root, (), lines, source, [0])
        data = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        hint = "indent with spaces; YAML does not allow tabs" if "\\t" in str(exc.problem) else None
        raise SpecError(f"not valid YAML: {exc.problem or exc.context}", where=where, hint=hint) from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise SpecError(f"not valid YAML: {exc}", where=source) from exc
    finally:
        loader.dispose()
    return Document(data, lines, source)


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], source: str, count: list[int]) -> None:
    count[0] += 1
    if count[0] > MAX_NODES:
        raise SpecError(f"the file has more than {MAX_NODES} values", where=source, hint="are there nested aliases?")
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise SpecError("a key has to be text", where=f"{source}:{key.start_mark.line + 1}")
            line = key.start_mark.line + 1
            if key.value in seen and key.value != "<<":
                raise SpecError(
                    f"`{key.value}` stands twice, on lines {seen[key.value]} and {line}",
                    where=f"{source}:{line}",
                    key=".".join(str(part) for part in (*path, key.value)),
                )
            seen[key.value] = line
            inner = path if key.value == "<<" else (*path, key.value)
            lines.setdefault(inner, line)
            _walk(value, inner, lines, source, count)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), lines, source, count)
