"""Errors and outputs are judged by the facts that they state, so that a sentence may be worded anew.

    with raises(PlanError, "24 5 workers"):
        ...
    assert not missing(done.stderr, "train.steps 24")

Facts are words with blanks between them: numbers, names, keys, paths, and nouns where there is nothing else to go by.
Each has to stand as a word of its own, in whatever order, all of them in one line of an output or in one error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from dtctl.errors import DtctlError

E = TypeVar("E", bound=BaseException)

PROSE = re.compile(
    "a|an|and|are|as|at|be|been|but|by|cannot|does|for|from|has|have|in|is|it|its|must|no|nor|not|of|on|or|so|than|that|"
    "the|their|there|these|they|this|to|was|were|which|will|with|would"
)
"""Words of which sentences are made: who asks for one of them is about to match on a sentence."""


def missing(text: str, facts: str) -> list[str]:
    """The facts that no line of a text states together; those that the line with most of them lacks."""
    words = facts.split()
    assert words, "no fact is asked for"
    assert not any(map(PROSE.fullmatch, words)), f"a sentence and no facts: {facts}"
    patterns = [re.compile(rf"(?<!\w){re.escape(word)}(?!\w)") for word in words]
    lacking = [[one.pattern for one in patterns if not one.search(line)] for line in text.splitlines() or [""]]
    return min(lacking, key=len)


@contextmanager
def raises(kind: type[E] | tuple[type[E], ...], facts: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """An error of a class that states these facts: in its message, its place or its hint."""
    with pytest.raises(kind) as caught:
        yield caught
    assert missing(_text(caught.value), facts) == [], _text(caught.value)


def _text(error: Any) -> str:
    if not isinstance(error, DtctlError):
        return str(error).replace("\n", " ")
    return " ".join(str(part) for part in (error.message, error.where, error.hint) if part).replace("\n", " ")
