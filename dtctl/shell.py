"""Quoting for a POSIX shell: the only place in dtctl that turns values into shell text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Late(str):
    """Text with `$NAME` in it that the shell fills in where the script runs. Never made of a user's words."""

    __slots__ = ()


def quote(text: str) -> str:
    """One shell word that means exactly `text`.

    Raises:
        ValueError: `text` holds a NUL character, which no program can be given as an argument.
    """
    if isinstance(text, Late):
        return f'"{text}"'
    if "\0" in text:
        raise ValueError("a NUL character cannot be passed to a program")
    return shlex.quote(text)


def join(argv: Iterable[str]) -> str:
    """A shell command that runs `argv`, word for word."""
    return " ".join(quote(word) for word in argv)


def split(text: str) -> list[str]:
    """The words of a command line as a POSIX shell would split them, without expansion.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    return shlex.split(text)


def is_env_name(name: str) -> bool:
    """Whether a POSIX shell can export a variable of this name."""
    return _ENV_NAME.match(name) is not None
