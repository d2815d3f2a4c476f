"""What is real, changed as nobody would write it: bytes, and documents of JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

ODD: Sequence[Any] = (
    None, True, 0, -1, 1 << 31, 1 << 63, 10**30, 1e308, float("nan"), float("inf"), -0.0, "", "x" * 5000, "../../x",
    "/etc/passwd", ".", "..", "a/b", "a\0b", "\x1b[2J", "[/red]", "\u202e", "\ud800", "\u00b2", "9" * 5000, "nan",
    [], {}, [[]], {"": {}}, [None] * 50, "$(touch x)", "%s%n", "~", "-rf", "\\", "'", '"', "\n", "\r", "*",
    "1e999", "!!python/object:os",
)  # fmt: skip
WORDS = (
    b"\0", b"\xff", b"\n", b"\r", b"[", b"]", b"{", b"}", b'"', b"'", b":", b",", b"- ", b"&a ", b"*a", b"!!", b"<<: ",
    b"0" * 40, b"9" * 5000, b"[" * 3000, b"{" * 3000, b"-" * 200, b"(" * 400, b"\x80\x04", b"\xef\xbb\xbf", b"\x1b[2J",
    b"\t", b"NaN", b"1e999", b"../", b"/etc/passwd", b"rank", b"Error", b"Traceback (most recent call last):\n",
)  # fmt: skip


def bent(data: bytes, chance: random.Random) -> bytes:
    """Bytes with some of them flipped, cut, doubled, moved, or replaced by what parsers do not expect."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(out) + 1)
        end = min(len(out), at + chance.choice((1, 2, 8, 64, 4096)))
        what = chance.randrange(7)
        if what == 0 and out:
            out[at - 1] ^= 1 << chance.randrange(8)
        elif what == 1:
            del out[at:end]
        elif what == 2:
            out[at:at] = chance.choice(WORDS)
        elif what == 3:
            out[at:at] = out[at:end] * chance.choice((1, 2, 50))
        elif what == 4:
            out[at:end] = chance.choice(WORDS)
        elif what == 5:
            piece = out[at:end]
            del out[at:end]
            there = chance.randrange(len(out) + 1)
            out[there:there] = piece
        else:
            del out[at:]
    return bytes(out[: 1 << 20])


def odd(value: Any, chance: random.Random) -> Any:
    """A document with some of its values, keys or rows replaced, dropped or doubled."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        value = _odd(value, chance)
    return value


def _odd(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice([*value])
        found = dict(value)
        what = chance.randrange(12)
        if what == 0:
            del found[key]
        elif what == 1:
            found[str(chance.choice(ODD))] = found.pop(key)
        else:
            found[key] = _odd(found[key], chance)
        return found
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        what = chance.randrange(12)
        if what == 0:
            return value[:at] + value[at + 1 :]
        if what == 1:
            return value[:at] + [value[at]] * chance.choice((2, 20)) + value[at + 1 :]
        return [*value[:at], _odd(value[at], chance), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.3:
        return value + chance.choice((-1, 1, 1 << 20, -(1 << 40)))
    if isinstance(value, str) and value and chance.random() < 0.4:
        return bent(value.encode("utf-8", "surrogatepass"), chance).decode("utf-8", "replace")
    return chance.choice(ODD)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")
