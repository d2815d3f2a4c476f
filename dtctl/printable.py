"""Text from elsewhere, made safe for a terminal: control sequences are shown or left out, and have no effect.

A terminal executes commands in the text that it shows: to move its cursor, to change its title, to answer with what was
typed. Text from nodes, logs and names of files goes through here before it is shown.
"""

from __future__ import annotations

import re

# CSI (colours, cursor), OSC and other strings (titles, clipboard), and what else begins with an escape.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]+[0-~]")
# Control characters but for tab and line end, and those that turn the direction of text around.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without escape sequences, and with any other control character written out, as in Python's `ascii`."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], _SEQUENCE.sub("", text))
