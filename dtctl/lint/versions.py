"""Python version of a file that this version of Python cannot parse."""

from __future__ import annotations

import re
import sys

_NAME = r"[^\W\d]\w*"
_NEWER: tuple[tuple[tuple[int, int], re.Pattern[str], str], ...] = (
    ((3, 10), re.compile(r"^\s*match\s+[^\n=]+:\s*(?:#[^\n]*)?\n\s+case\s", re.MULTILINE), "a match statement"),
    ((3, 11), re.compile(r"^\s*except\s*\*", re.MULTILINE), "except*"),
    ((3, 12), re.compile(rf"^\s*type\s+{_NAME}\s*(?:\[[^\]\n]*\])?\s*=", re.MULTILINE), "a type statement"),
    ((3, 12), re.compile(rf"^\s*(?:async\s+def|def|class)\s+{_NAME}\[", re.MULTILINE), "type parameters"),
    ((3, 14), re.compile(r"^\s*except\s+[\w.]+\s*,\s*[\w.]+\s*:", re.MULTILINE), "except without brackets"),
    ((3, 14), re.compile(r"(?<![\w\"'])(?:[tT][rR]?|[rR][tT])(?:\"|')"), "a template string"),
)
"""Version -> syntax that only this version and later ones have, as a pattern and in words."""
_OLD = re.compile(
    r"^\s*(?:print\s+[\"'\w%(]|exec\s+[\"'\w]|raise\s+\w+\s*,|except\s+[\w.]+\s*,\s*\w+\s*:)", re.MULTILINE
)


def explain_syntax_error(text: str, error: SyntaxError) -> str | None:
    """Return why this version of Python cannot parse a text that another version can; None if that is not known.

    Args:
        text: text of the file.
        error: error of the parser.
    """
    line = _read_text_line(text, error.lineno)
    here = sys.version_info[:2]
    for version, pattern, what in _NEWER:
        if here < version and pattern.search(line + "\n" + _read_text_line(text, (error.lineno or 0) + 1)):
            return _describe_newer_python(version, what)
    if here < (3, 12) and _quotes_in_quotes(text, error):
        return _describe_newer_python((3, 12), "quotes of the same kind, or a line break, inside an f-string")
    if _OLD.search(line):
        return f"is of Python 2 (line {error.lineno})"
    return None


def _describe_newer_python(version: tuple[int, int], what: str) -> str:
    here = sys.version_info
    return f"needs Python {version[0]}.{version[1]} ({what}), and dtctl runs on {here[0]}.{here[1]}"


def _read_text_line(text: str, number: int | None) -> str:
    lines = text.split("\n")
    return lines[number - 1] if number and number <= len(lines) else ""


def _quotes_in_quotes(text: str, error: SyntaxError) -> bool:
    """Return whether an f-string of this or the two previous lines contains its own quotes (Python 3.12)."""
    last = error.lineno or 0
    for number in range(max(1, last - 2), last + 1):
        line = _read_text_line(text, number)
        for begin in re.finditer(r"(?<!\w)(?:[fF][rR]?|[rR][fF])(\"|')(?!\1\1)", line):
            quote, depth = begin[1], 0
            for at in range(begin.end(), len(line)):
                if line[at] == "{":
                    depth += 1
                elif line[at] == "}":
                    depth = max(0, depth - 1)
                elif line[at] == quote:
                    if depth:
                        return True
                    break
            else:
                if depth:
                    return True
    return "f-string" in (error.msg or "") and "backslash" in error.msg
