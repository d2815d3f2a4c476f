"""F-strings and type parameters of Python 3.12, rewritten on the same lines so that an older parser accepts them.

Columns on such a line may differ slightly, so no edits are offered for a file that was rewritten.
"""

from __future__ import annotations

import re

_TYPE_STATEMENT = re.compile(
    r"^(?P<indent>\s*)type\s+(?P<name>[^\W\d]\w*)\s*(?:\[[^\]\n]*\])?(?P<rest>\s*=)", re.MULTILINE
)
_PARAMETERS = re.compile(
    r"^(?P<head>\s*(?:async\s+def|def|class)\s+[^\W\d]\w*)\[(?P<inside>[^\n()]*?)\](?=\s*[(:])", re.MULTILINE
)
_OPENING = re.compile(r"(?<![\w\"'])(?P<prefix>[bBuUfFrRtT]{0,2})(?P<quote>\"\"\"|'''|\"|')")


def rewrite_for_older_python(text: str) -> str | None:
    """Return the same program for an older parser; None if no change is needed or known."""
    found = _PARAMETERS.sub(lambda match: match["head"], text)
    found = _TYPE_STATEMENT.sub(lambda match: f"{match['indent']}{match['name']}{match['rest']}", found)
    pieces: list[str] = []
    at = done = 0
    while at < len(found):
        if found[at] == "#":
            at = _find_line_end(found, at)
            continue
        opening = _OPENING.match(found, at) if found[at] in "\"'bBuUfFrRtT" else None
        if opening is None:
            at += 1
            continue
        formatted = "f" in opening["prefix"].lower()
        end, nested = _string_end(found, opening.end(), opening["quote"], formatted=formatted)
        if end is None:
            return None
        if nested and len(opening["quote"]) == 1:
            inside = found[opening.end() : end - 1]
            if "\\" in inside or '"""' in inside or inside.endswith('"'):
                return None
            pieces += [found[done : opening.start("quote")], '"""', inside, '"""']
            done = end
        at = end
    rewritten = "".join([*pieces, found[done:]])
    return rewritten if rewritten != text else None


def _find_line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _string_end(text: str, at: int, quote: str, *, formatted: bool) -> tuple[int | None, bool]:
    """Return the end of a string, and True if a field of it contains the string's own quotes or a line end.

    Args:
        text: text of the file.
        at: offset after the opening quote.
        quote: opening quote.
        formatted: whether the string has fields.
    """
    depth, nested = 0, False
    while at < len(text):
        letter = text[at]
        escaped = letter == "\\" or (formatted and text[at : at + 2] in ("{{", "}}"))
        if not depth and text.startswith(quote, at):
            return at + len(quote), nested
        if not depth and escaped:
            at += 2
            continue
        if letter == "\n" and len(quote) == 1:
            if not depth:
                break
            nested = True
        if formatted and letter == "{":
            depth += 1
        elif depth and letter == "}":
            depth -= 1
        elif depth and letter in "\"'":
            inner = _OPENING.match(text, at)
            if inner is None:
                break
            end, deeper = _string_end(text, inner.end(), inner["quote"], formatted=text[at - 1] in "fF")
            if end is None or deeper:
                break
            nested = nested or letter in quote
            at = end
            continue
        at += 1
    return None, nested
