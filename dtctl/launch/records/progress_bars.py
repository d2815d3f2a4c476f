"""Lines with progress bars of tqdm: `epoch 0:  50%|█████     | 30/60 [00:03<00:03,  9.7it/s, loss=0.1]`."""

from __future__ import annotations

import re
from typing import Final

# tqdm prints `{n}/{total} [{elapsed}<{remaining}, {rate}{postfix}]` or `{n}it [{elapsed}, {rate}]` (tqdm/std.py).
_END: Final = re.compile(r"\d[\d.]*[kMGTP]?[^\s\[]* \[\d+:[\d:]+(?:<[\d:?]+)?, [^\]]*\]")
_DRAWING: Final = re.compile(r"(?<=%)\|[^|]*\| *")


def split_progress_bar(text: str) -> list[str]:
    """Return the bar and the text after it as separate lines.

    A bar has no end of line while it is redrawn, so a line that the program prints meanwhile follows it directly.
    """
    end = _END.search(text)
    if end is None or not text[end.end() :].strip():
        return [text]
    return [text[: end.end()], text[end.end() :].lstrip()]


def shorten_progress_bar(text: str, columns: int) -> str:
    """Return a bar shortened to one line: without its drawing, and cut if it is still too long.

    Args:
        text: any line; one without a bar is returned as it is.
        columns: characters of a line.
    """
    if len(text) <= columns or _END.search(text) is None:
        return text
    text = _DRAWING.sub(" ", text)
    return text if len(text) <= columns else f"{text[: columns - 1]}…"
