"""Text from other sources, made safe for a terminal: control sequences have no effect, and are shown or removed.

A terminal executes commands in the text that it shows: they move the cursor, change the title, or send text back as
input. Text from nodes, logs and file names passes through this module before it is printed.
"""

from __future__ import annotations

import re

# Both are texts, so that `re` compiles them at the first use: most commands print only plain text. The first matches
# CSI (colours, cursor), OSC and other strings (titles, clipboard), and all other sequences that begin with an escape.
_SEQUENCE = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]+[0-~]"
# Control characters except for tab and line end, and characters that change the direction of text.
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def make_printable(text: str) -> str:
    """Return the text without escape sequences; other control characters are written out, as in Python's `ascii`."""
    if text.isascii() and text.isprintable():
        return text
    return re.sub(_CONTROL, lambda match: ascii(match[0])[1:-1], re.sub(_SEQUENCE, "", text))


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 file`, `2 files`, `1,200 processes`.

    Args:
        number: the number.
        noun: singular of the noun.
        plural: plural of the noun; empty: the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
