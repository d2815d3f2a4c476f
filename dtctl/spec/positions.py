"""YAML with positions: the data of a text, and the line of each key.

The YAML library splits the text; this module determines the types of scalars by the rules of YAML 1.2 rather than 1.1,
which are closer to what users expect: `NO` and `on` are text, `1:30:00` is not 5400, `010` is not 8, and `1e-3` is a
number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import yaml

from dtctl.errors import SpecError
from dtctl.spec.places import KeyLocations, Path, format_dotted_key

MAX_VALUES = 100_000
"""Largest number of values in a spec, with aliases counted each time; it protects against files that would fill the
memory."""
MAX_DEPTH = 64
"""Largest number of nested levels; libyaml itself crashes on some ten thousand."""

_CORE = "tag:yaml.org,2002:"
_MERGE, _NULL, _BOOL, _INT, _FLOAT = (_CORE + name for name in ("merge", "null", "bool", "int", "float"))
_PLAIN = (
    # Each entry has a tag, a pattern, and the first characters of a scalar.
    (_MERGE, r"<<", ["<"]),
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    # Leading zeros are excluded: 010 is 8 in YAML 1.1, 10 in YAML 1.2, and probably meant as a name.
    (_INT, r"[-+]?(?:0|[1-9][0-9_]{0,30})|0x[0-9a-fA-F]{1,16}|0o[0-7]{1,22}", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(?:[0-9][0-9_]{0,30}\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]{1,3})?"
        r"|[-+]?[0-9]{1,30}[eE][-+]?[0-9]{1,3}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _PlainScalarLoader(_BaseLoader):  # type: ignore[misc]  # which of the two it is depends on how PyYAML was built
    """Loader that splits YAML and determines which plain scalars are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML wants it here


class _QuotingDumper(yaml.SafeDumper):
    """Dumper that quotes text which either version of YAML would read as another type."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # In other styles PyYAML writes Unicode's line breaks unchanged, and reads them as spaces.
    return dumper.represent_scalar(_CORE + "str", text, style=None if text.isprintable() else '"')


_QuotingDumper.add_representer(str, _represent_text)
for _tag, _pattern, _first in _PLAIN:
    for _class in (_PlainScalarLoader, _QuotingDumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)


class YamlDocument(NamedTuple):
    """Result of reading a YAML text."""

    data: Any
    """Dictionaries with text as keys, lists, text, numbers, truth values and None; no object occurs in it twice."""
    places: KeyLocations
    texts: dict[Path, str]
    """Numbers and truth values in the user's notation, for keys that require text: `1.10` is not the text `1.1`."""


def parse_yaml_document(text: str, *, source: str) -> YamlDocument:
    """Read one YAML document.

    Args:
        text: the YAML.
        source: name of the text, for messages.

    Raises:
        SpecError: the text is not YAML, or has several documents, a key that is set twice, a type that specs do not
            have, a NUL character, or too many values.
    """
    reader = _YamlReader(source)
    try:
        text.encode()  # libyaml requires bytes, and text from the command line may not be valid UTF-8
        _check_depth(text, source)
        root = yaml.compose(text, Loader=_PlainScalarLoader)
        data = None if root is None else reader.value(root, ())
    except yaml.MarkedYAMLError as exc:
        raise _not_yaml(exc, text, source) from exc
    except yaml.reader.ReaderError as exc:
        offset = text.find(chr(exc.character))
        where = f"{source}:{text.count(chr(10), 0, offset) + 1}"
        raise SpecError(f"YAML does not allow the character U+{exc.character:04X}", where=where) from exc
    except UnicodeEncodeError as exc:
        raise SpecError("this is not UTF-8 text", where=source) from exc
    return YamlDocument(data, KeyLocations(source, reader.lines), reader.texts)


def format_yaml_document(data: Any) -> str:
    """Return YAML that `parse_yaml_document` reads as `data`."""
    return str(yaml.dump(data, Dumper=_QuotingDumper, sort_keys=False, allow_unicode=True))


def _check_depth(text: str, source: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_PlainScalarLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                mark: Any = event.start_mark
                raise _too_deep(f"{source}:{mark.line + 1}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _too_deep(where: str) -> SpecError:
    return SpecError(f"values are nested more than {MAX_DEPTH} deep", where=where)


def _not_yaml(error: yaml.MarkedYAMLError, text: str, source: str) -> SpecError:
    problem = error.problem or error.context or "unknown error"
    if problem.startswith("but "):
        problem = f"{error.context} {problem}"
    mark: Any = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
    return SpecError(f"not valid YAML: {problem}", where=where, hint=_find_yaml_hint(text, mark.line) if mark else None)


_KEY: Final = r"(?P<indent> *)\w[\w.-]*:(?: +(?P<value>[^ #].*)|\s*(?:#.*)?$)"
"""Pattern of a line that begins with a key."""


def _find_yaml_hint(text: str, number: int) -> str | None:
    """Return a hint about the most frequent mistake in such a line, or in the line before it."""
    lines = text.split("\n")
    for line in lines[max(0, number - 1) : number + 1]:
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return "indent with spaces; YAML does not allow tabs"
        if re.search(r"[\w.-]\[[0-9,/-]+\]", line):
            return 'quote ranges of nodes: ["gpu[01-04]"]'
    keys = [found for line in lines[: number + 1] if (found := re.match(_KEY, line))]
    if len(keys) > 1 and lines[number : number + 1] == [keys[-1].string]:
        *above, last = keys
        # A key without a value begins a section, whose keys stand further right.
        begins = len(last["indent"]) > len(above[-1]["indent"]) and not above[-1]["value"]
        if not begins and last["indent"] not in {key["indent"] for key in above}:
            return "keys of one section begin in the same column, and those of the section above it further left"
    return None


class _YamlReader:
    """Reader that turns YAML's nodes into data, and records the line of each key."""

    def __init__(self, source: str) -> None:
        self.lines: dict[Path, int] = {}
        self.texts: dict[Path, str] = {}
        self._source = source
        self._count = 0
        self._open: list[yaml.Node] = []

    def value(self, node: yaml.Node, path: Path) -> Any:
        self._count_one()
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, path)
        with self._entering_node(node):
            if isinstance(node, yaml.MappingNode) and node.tag == _CORE + "map":
                return self._read_mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _CORE + "seq":
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        raise self._unknown_tag(node)

    def _read_mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        mapping = {}
        for name, (line, value) in self._read_mapping_pairs(node, path).items():
            self.lines[(*path, name)] = line
            mapping[name] = self.value(value, (*path, name))
        return mapping

    def _read_mapping_pairs(self, node: yaml.MappingNode, path: Path) -> dict[str, tuple[int, yaml.Node]]:
        """Return the keys of a mapping, with lines and values; keys from `<<` do not replace other keys."""
        first_lines: dict[str, int] = {}
        pairs: dict[str, tuple[int, yaml.Node]] = {}
        merged: dict[str, tuple[int, yaml.Node]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or "\0" in key.value:
                raise self._build_node_error(key, "a key has to be text")
            if key.value in first_lines:
                first = first_lines[key.value]
                lines = f"on line {line}" if first == line else f"on lines {first} and {line}"
                message = f"`{key.value}` is set twice, {lines}"
                raise SpecError(message, where=f"{self._source}:{line}", key=format_dotted_key((*path, key.value)))
            first_lines[key.value] = line
            if key.tag == _MERGE:
                merged = self._read_merged_pairs(value, path)
            else:
                pairs[key.value] = (line, value)
        return merged | pairs

    def _read_merged_pairs(self, node: yaml.Node, path: Path) -> dict[str, tuple[int, yaml.Node]]:
        """Return the pairs of `<<`, a mapping or a list of mappings; the first mapping with a key counts."""
        pairs: dict[str, tuple[int, yaml.Node]] = {}
        for part in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(part, yaml.MappingNode):
                raise self._build_node_error(part, "`<<` takes keys with values, or a list of such")
            self._count_one()
            with self._entering_node(part):
                pairs |= self._read_mapping_pairs(part, path)
        return pairs

    def _count_one(self) -> None:
        self._count += 1
        if self._count > MAX_VALUES:
            raise SpecError(
                f"the file has more than {MAX_VALUES:,} values", where=self._source, hint="are there nested aliases?"
            )

    @contextmanager
    def _entering_node(self, node: yaml.Node) -> Iterator[None]:
        if any(outer is node for outer in self._open):
            raise self._build_node_error(node, "an alias is inside the value it refers to")
        if len(self._open) >= MAX_DEPTH:
            raise _too_deep(f"{self._source}:{node.start_mark.line + 1}")
        self._open.append(node)
        yield
        self._open.pop()

    def _read_scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text = str(node.value)
        if "\0" in text:
            raise self._build_node_error(node, "a NUL character cannot be passed to a program")
        if node.tag in (_CORE + "str", _MERGE):
            return text
        if node.tag == _NULL:
            return None
        self.texts[path] = text
        try:
            if node.tag == _BOOL:
                return {"true": True, "false": False}[text.lower()]
            if node.tag == _INT:
                return int(text.replace("_", ""), 0)
            if node.tag == _FLOAT:
                return _parse_yaml_number(text.replace("_", "").lower())
        except (ValueError, KeyError):
            raise self._build_node_error(node, f"{text!r} is not what its tag {_tag_name(node)} says") from None
        raise self._unknown_tag(node)

    def _unknown_tag(self, node: yaml.Node) -> SpecError:
        return self._build_node_error(node, f"a spec has no values of the type {_tag_name(node)}")

    def _build_node_error(self, node: yaml.Node, message: str) -> SpecError:
        return SpecError(message, where=f"{self._source}:{node.start_mark.line + 1}")


def _tag_name(node: yaml.Node) -> str:
    return str(node.tag).replace(_CORE, "!!")


def _parse_yaml_number(text: str) -> float | int:
    """Return a number; one without a point becomes an integer, since counts of steps may be written as `1e5`."""
    number = float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return int(number) if "." not in text and number.is_integer() and abs(number) < 2**53 else number
