"""Ranges of node names: `gpu[01-04,7]-ib[0-1]`. Pure.

The notation is that of Slurm and ClusterShell: lists and ranges stand in brackets, zero padding is kept, `/2` is a
step, and commas outside brackets separate names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from dtctl.errors import SpecError

LIMIT = 65_536
"""Largest number of names in one expression; a larger number is a typing error."""

_ITEM = re.compile(r"(?P<first>[0-9]{1,200})(?:-(?P<last>[0-9]{1,200})(?:/(?P<step>[0-9]{1,9}))?)?\Z")
_TOO_MANY = f"more than {LIMIT:,} names"


def _build_nodeset_error(text: str, part: str, reason: str) -> SpecError:
    return SpecError(
        f"{_format_short_text(text)} is not a list of nodes: {reason} in {_format_short_text(part)}",
        hint="write it like gpu[01-04,7]",
    )


def _format_short_text(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def expand_nodeset(text: str) -> list[str]:
    """Return the names of a node set, in the order of the text.

    Raises:
        SpecError: `text` is not well formed, or has too many names.
    """
    names: list[str] = []
    for word in _split_nodeset_words(text):
        names.extend(_expand_word(text, word, LIMIT - len(names)))
    return names


def _split_nodeset_words(text: str) -> list[str]:
    """Split `text` at commas outside brackets."""
    words, start, inside = [], 0, False
    for match in re.finditer(r"[\[\],]", text):
        mark = match[0]
        if mark == "," and not inside:
            words.append(text[start : match.start()].strip())
            start = match.end()
        elif mark != ",":
            if inside == (mark == "["):
                raise _build_nodeset_error(text, text[start : match.end()], "brackets do not match")
            inside = not inside
    if inside:
        raise _build_nodeset_error(text, text[start:], "brackets do not match")
    words.append(text[start:].strip())
    if not all(words):
        raise _build_nodeset_error(text, text, "a name is empty")
    return words


def _expand_word(text: str, word: str, limit: int) -> Iterable[str]:
    choices: list[list[str]] = []
    for index, part in enumerate(re.split(r"\[([^\]]*)\]", word)):
        choices.append([part] if index % 2 == 0 else _expand_number_ranges(text, part, limit))
        limit //= len(choices[-1])
        if limit == 0:
            raise _build_nodeset_error(text, word, _TOO_MANY)
    return map("".join, itertools.product(*choices))


def _expand_number_ranges(text: str, inside: str, limit: int) -> list[str]:
    numbers: list[str] = []
    for item in inside.split(","):
        match = _ITEM.match(item.strip())
        if match is None:
            raise _build_nodeset_error(text, f"[{inside}]", f"{_format_short_text(item)} is not a number or a range")
        first, last, step = match["first"], match["last"] or match["first"], int(match["step"] or 1)
        if int(last) < int(first):
            raise _build_nodeset_error(text, f"[{inside}]", f"the range {_format_short_text(item)} runs backwards")
        if step < 1:
            raise _build_nodeset_error(text, f"[{inside}]", "a step has to be at least 1")
        if last.startswith("0") and len(last) != len(first):
            raise _build_nodeset_error(
                text,
                f"[{inside}]",
                f"the range {_format_short_text(item)} mixes numbers of {len(first)} and {len(last)} digits",
            )
        if (int(last) - int(first)) // step >= limit - len(numbers):
            raise _build_nodeset_error(text, f"[{inside}]", _TOO_MANY)
        width = len(first) if first.startswith("0") else 0
        numbers.extend(str(number).zfill(width) for number in range(int(first), int(last) + 1, step))
    return numbers


def find_repeated_name(names: Iterable[str]) -> str:
    """Return the first name of a host that appears earlier in the list, too; empty if each appears once."""
    seen = set[str]()
    for name in names:
        host = normalize_host_name(name)
        if host in seen:
            return name
        seen.add(host)
    return ""


def normalize_host_name(name: str) -> str:
    """Return a host's name without a user and in lower case, as names are compared.

    Host names are case-insensitive, and so are the file systems of macOS.
    """
    return name.rpartition("@")[2].casefold()


def fold_node_names(names: Sequence[str]) -> str:
    """Return a short text that `expand_nodeset` expands to `names`.

    Names that differ only in their last number become ranges.

    Args:
        names: names of nodes, without brackets and commas.
    """
    folded: list[str] = []
    for _, group in itertools.groupby(names, key=lambda name: _split_last_number(name)[::2]):
        members = [_split_last_number(name) for name in group]
        head, digits, tail = members[0]
        if len(members) == 1 or not digits:
            folded.extend("".join(member) for member in members)
        else:
            folded.append(f"{head}[{','.join(_fold_number_runs([digits for _, digits, _ in members]))}]{tail}")
    return ",".join(folded)


def _split_last_number(name: str) -> tuple[str, str, str]:
    """Split a name at its last number: `gpu07-ib` into gpu, 07, -ib."""
    match = re.match(r"(.*?)([0-9]{1,200})([^0-9]*)\Z", name, re.DOTALL)
    return (match[1], match[2], match[3]) if match else (name, "", "")


def _fold_number_runs(numbers: list[str]) -> list[str]:
    """Return `["08", "09", "10", "12"]` as `["08-10", "12"]`; `_expand_number_ranges` reverses this."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs:
            first, last = runs[-1][0], runs[-1][-1]
            width = len(first) if first.startswith("0") else 0
            if number == str(int(last) + 1).zfill(width):
                runs[-1].append(number)
                continue
        runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
