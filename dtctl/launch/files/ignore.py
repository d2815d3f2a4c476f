"""Patterns of .gitignore with their meaning in git: gitignore(5), and wildmatch.c where the manual is incomplete.

Names and patterns are bytes, as in git: names need not be UTF-8, and a `?` stands for one byte. The rules decide about
one name at a time. A `!` cannot include a file below an ignored folder, because the caller does not walk into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

_CLASSES = {
    b"alnum": rb"0-9A-Za-z",
    b"alpha": rb"A-Za-z",
    b"blank": rb" \t",
    b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9",
    b"graph": rb"!-~",
    b"lower": rb"a-z",
    b"print": rb" -~",
    b"punct": rb"!-/:-@\[-`{-~",
    b"space": rb" \t-\r",
    b"upper": rb"A-Z",
    b"xdigit": rb"0-9A-Fa-f",
}
_SIGNS = frozenset(b"*?[\\")
_NEVER = rb"(?!)"
"""Expression without a match, for patterns that git accepts but that match no name: those that end in a backslash."""


class IgnoreRules:
    """Patterns in the order of their file; the last pattern that fits a name decides."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        """Parse patterns, one for each line; comments and blank lines are skipped."""
        parsed = [rule for line in lines if (rule := _parse_ignore_line(line)) is not None]
        # Adjacent patterns with the same effect become one expression, so that most names need one match.
        self._groups: list[tuple[bool, re.Pattern[bytes] | None, re.Pattern[bytes] | None]] = [
            (
                ignored,
                _compile_expressions([r[2] for r in rules if r[1]]),
                _compile_expressions([r[2] for r in rules if not r[1]]),
            )
            for ignored, group in groupby(parsed, key=lambda rule: rule[0])
            for rules in (list(group),)
        ]
        self._groups.reverse()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def verdict(self, folder: bytes, name: bytes) -> bool | None:
        """Return whether a name is ignored (True), included by a `!` (False), or fits no pattern (None).

        Args:
            folder: folder of the name, relative to the file of the patterns, with `/` at its end; empty for the same
                folder.
            name: name of a file, or of a folder with `/` at its end.
        """
        for ignored, names, paths in self._groups:
            if (names is not None and names.match(name)) or (paths is not None and paths.match(folder + name)):
                return ignored
        return None


def split_ignore_lines(text: bytes) -> list[bytes]:
    """Return the lines of an ignore file, without a byte order mark and without carriage returns."""
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [line.removesuffix(b"\r") for line in lines]


def _compile_expressions(expressions: list[bytes]) -> re.Pattern[bytes] | None:
    return re.compile(b"|".join(expressions), re.DOTALL) if expressions else None


def _parse_ignore_line(line: bytes) -> tuple[bool, bool, bytes] | None:
    """Return (ignores, applies to the last part of the path only, expression); None for a line without a rule."""
    if line.startswith(b"#"):
        return None
    pattern = _without_trailing_spaces(line)
    ignores = not pattern.startswith(b"!")
    if not ignores:
        pattern = pattern[1:]
    only_folders = pattern.endswith(b"/")
    pattern = pattern.removesuffix(b"/")
    if not pattern:
        return None
    anywhere = b"/" not in pattern
    end = rb"(?<!/)/\Z" if only_folders else rb"(?<!/)/?\Z"  # a/* does not fit the folder a/ itself.
    return ignores, anywhere, rb"(?:%s)%s" % (_translate_pattern(pattern.removeprefix(b"/")), end)


def _without_trailing_spaces(line: bytes) -> bytes:
    """Return the line without trailing spaces, except those after a backslash."""
    end = len(line)
    while end and line[end - 1 : end] == b" ":
        end -= 1
    backslashes = end - len(line[:end].rstrip(b"\\"))
    return line[: end + 1] if backslashes % 2 and end < len(line) else line[:end]


def _translate_pattern(pattern: bytes) -> bytes:
    """Return a pattern as a regular expression over a path without a slash at its end."""
    expression = bytearray()
    at = 0
    while at < len(pattern):
        sign = pattern[at : at + 1]
        if sign == b"*":
            end = at + len(pattern[at:]) - len(pattern[at:].lstrip(b"*"))
            at, fragment = _translate_stars(pattern, at, end)
        elif sign == b"?":
            at, fragment = at + 1, b"[^/]"
        elif sign == b"[":
            at, fragment = _translate_bracket(pattern, at)
        elif sign == b"\\":
            at, fragment = at + 2, re.escape(pattern[at + 1 : at + 2]) or _NEVER
        else:
            at, fragment = at + 1, re.escape(sign)
        expression += fragment
    return bytes(expression)


def _translate_stars(pattern: bytes, at: int, end: int) -> tuple[int, bytes]:
    """Return the position after the stars in `pattern[at:end]`, and their regular expression."""
    # git compares the plain text before the first wildcard separately, so stars after it count as the beginning.
    begins = pattern[at - 1 : at] == b"/" or _SIGNS.isdisjoint(pattern[:at])
    if end - at == 1 or not (begins and pattern[end : end + 1] in (b"", b"/")):
        return end, b"[^/]*"
    if end == len(pattern):
        return end, b".*"
    return end + 1, b"(?:.*/)?"  # The slash belongs to the stars: a/**/b fits a/b.


def _translate_bracket(pattern: bytes, start: int) -> tuple[int, bytes]:
    """Return the position after the set at `start`, and its regular expression; an unclosed set matches nothing."""
    at = start + 1
    negated = pattern[at : at + 1] in (b"!", b"^")
    at += negated
    members = bytearray()
    range_start = b""  # A `-` after this member would make a range from it.
    first = True
    while first or pattern[at : at + 1] != b"]":
        first = False
        sign = pattern[at : at + 1]
        close = pattern.find(b"]", at + 2) if pattern[at : at + 2] == b"[:" else -1
        if close > at + 2 and pattern[close - 1 : close] == b":":
            name = pattern[at + 2 : close - 1]
            if name not in _CLASSES:
                return len(pattern), _NEVER
            members += _CLASSES[name]
            at, range_start = close + 1, b""
            continue
        if sign == b"-" and range_start and pattern[at + 1 : at + 2] not in (b"", b"]"):
            at += 2 if pattern[at + 1 : at + 2] == b"\\" else 1
            last = pattern[at : at + 1]
            if range_start <= last:
                members += re.escape(range_start) + b"-" + re.escape(last)
            at, range_start = at + 1, b""
            if not last:
                return len(pattern), _NEVER
            continue
        if sign == b"\\":
            at += 1
            sign = pattern[at : at + 1]
        if not sign:
            return len(pattern), _NEVER
        members += re.escape(sign)
        at, range_start = at + 1, sign
    if not members:
        return at + 1, b"[^/]" if negated else _NEVER
    return at + 1, rb"(?!/)[%s%s]" % (b"^" if negated else b"", bytes(members))
