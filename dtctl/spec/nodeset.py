"""Ranges of node names: `gpu[01-04,7]-ib[0-1]`. Pure.

The notation is that of Slurm and ClusterShell: lists and ranges in brackets, zero padding kept, `/2` for a step, commas
outside brackets separate names.
"""

from __future__ import annotations

import itertools
import re

from dtctl.errors import SpecError

LIMIT = 65_536
"""Most names that one expression may stand for; more is a slip of the finger."""

_ITEM = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?:/(?P<step>\d+))?)?\Z")


def _fail(text: str, part: str, why: str) -> SpecError:
    return SpecError(f"{text!r} is not a list of nodes: {why} in {part!r}", hint="write it like gpu[01-04,7]")


def expand(text: str) -> list[str]:
    """The names that `text` stands for, in the order in which it writes them.

    Raises:
        SpecError: `text` is not well formed, or stands for too many names.
    """
    names: list[str] = []
    for word in _split(text):
        names.extend(_expand_word(text, word, LIMIT - len(names)))
    return names


def _split(text: str) -> list[str]:
    """`text` cut at commas that are outside brackets."""
    words, depth, word = [], 0, ""
    for character in text:
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            raise _fail(text, word + character, "brackets do not match")
        if character == "," and depth == 0:
            words.append(word.strip())
            word = ""
        else:
            word += character
    if depth:
        raise _fail(text, word, "brackets do not match")
    words.append(word.strip())
    if not all(words):
        raise _fail(text, text, "a name is empty")
    return words


def _expand_word(text: str, word: str, room: int) -> list[str]:
    parts = re.split(r"\[([^\]]*)\]", word)
    choices = [[part] if index % 2 == 0 else _numbers(text, part) for index, part in enumerate(parts)]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > room:
        raise _fail(text, word, f"more than {LIMIT} names")
    return ["".join(pick) for pick in itertools.product(*choices)]


def _numbers(text: str, inside: str) -> list[str]:
    found: list[str] = []
    for item in inside.split(","):
        match = _ITEM.match(item.strip())
        if match is None:
            raise _fail(text, f"[{inside}]", f"{item!r} is not a number or a range")
        first, last, step = match["first"], match["last"] or match["first"], int(match["step"] or 1)
        if int(last) < int(first):
            raise _fail(text, f"[{inside}]", f"the range {item!r} runs backwards")
        if step < 1:
            raise _fail(text, f"[{inside}]", "a step has to be at least 1")
        if (int(last) - int(first)) // step >= LIMIT:
            raise _fail(text, f"[{inside}]", f"more than {LIMIT} names")
        width = len(first) if first.startswith("0") else 0
        found.extend(str(number).zfill(width) for number in range(int(first), int(last) + 1, step))
    return found


def fold(names: list[str]) -> str:
    """A short text that `expand` turns into `names` again: runs of names that differ in their last number."""
    folded: list[str] = []
    for _, group in itertools.groupby(names, key=_stem):
        folded.extend(_fold_group(list(group)))
    return ",".join(folded)


def _stem(name: str) -> tuple[str, str, int]:
    match = re.match(r"(.*?)(\d+)(\D*)\Z", name, re.DOTALL)
    if match is None or "[" in name or "," in name:
        return (name, "", -1)
    digits = match[2]
    return (match[1], match[3], len(digits) if digits.startswith("0") else 0)


def _fold_group(names: list[str]) -> list[str]:
    head, tail, width = _stem(names[0])
    if width < 0 or len(names) == 1:
        return names
    numbers = [int(name[len(head) : len(name) - len(tail)]) for name in names]
    runs: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [str(number).zfill(width) for _, number in run]
        runs.append(members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return [f"{head}[{','.join(runs)}]{tail}"]
