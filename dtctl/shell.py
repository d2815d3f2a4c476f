"""Quoting for a POSIX shell: the only place in dtctl that turns values into shell text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import pairwise

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Late(str):
    """Text with `$NAME` in it that the shell fills in where the script runs, ready to stand in double quotes."""

    __slots__ = ()


def quote(text: str) -> str:
    """Return one shell word that means exactly `text`.

    Raises:
        ValueError: `text` holds a NUL character, which no program can be given as an argument.
    """
    if isinstance(text, Late):
        return f'"{text}"'
    if "\0" in text:
        raise ValueError("a NUL character cannot be passed to a program")
    return shlex.quote(text)


_HOME = re.compile(r"(?P<home>\$HOME(?!\w)|\$\{HOME\})|\\(?P<kept>\$HOME(?!\w)|\$\{HOME\})|'[^']*'")
_TILDE = re.compile(r"(?P<option>--?[\w.-]+=)?(?P<kept>\\?)~(?=/|\Z)")
_SPECIAL = re.compile(r'[\\"$`]')


def expand_home(text: str) -> str:
    r"""Return a user's text with the home folder of the place where the script runs for `~` and `$HOME`.

    `~` counts at the beginning, and after the `=` of an option, where `/` or nothing follows. What is in single quotes
    stays as it is; `\~` and `\$HOME` stand for these very characters.
    """
    pieces: list[tuple[str, bool]] = []
    at = 0
    if tilde := _TILDE.match(text):
        pieces += [(tilde["option"] or "", False), ("~", not tilde["kept"])]
        at = tilde.end()
    for match in _HOME.finditer(text, at):
        pieces += [(text[at : match.start()], False), (match["kept"] or match[0], bool(match["home"]))]
        at = match.end()
    pieces.append((text[at:], False))
    if not any(is_home for _, is_home in pieces):
        return "".join(piece for piece, _ in pieces)
    return Late("".join("${HOME}" if is_home else _SPECIAL.sub(r"\\\g<0>", piece) for piece, is_home in pieces))


def program(path: str) -> str:
    """One shell word that names a program: as `quote`, but that `~/` at its beginning is the home folder there."""
    return f"~/{quote(path[2:])}" if path.startswith("~/") else quote(path)


def words(argv: Iterable[str]) -> list[str]:
    """Return each word of a command as shell text; the first one names a program."""
    return [quote(word) if at else program(word) for at, word in enumerate(argv)]


def join(argv: Iterable[str]) -> str:
    """Return a shell command that runs `argv`, word for word."""
    return " ".join(words(argv))


def split(text: str) -> list[str]:
    """Return the words of a command line as a POSIX shell would split them, without expansion.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    return shlex.split(text)


_OPERATOR = re.compile(r"&&|\|\||\|&|&>>?|>>|>&|<<|[<>&|;()\n*]")
_EXPANSION = re.compile(r"\$\(|\$\{?[\w@*#?$!-]+\}?|`")
_AT_A_WORD = re.compile(r"~(?=[/\s]|\Z)|#")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*(?=\s)")


def shell_syntax(line: str) -> str:
    """The first part of a line that only a shell would act upon: `&&`, `>`, `$HOME`, `*`; empty if there is none.

    What is quoted, or follows a backslash, is as plain to a shell as it is without one.
    """
    line = line.strip()
    if assignment := _ASSIGNMENT.match(line):
        return assignment[0]
    at, quotation, after_blank = 0, "", False
    while at < len(line):
        sign, match = line[at], None
        if sign == "\\" and quotation != "'":
            at += 1
        elif sign in ("'", '"') and quotation in ("", sign):
            quotation = "" if quotation else sign
        elif quotation != "'":
            match = _EXPANSION.match(line, at)
            if not (match or quotation):
                match = _OPERATOR.match(line, at) or (_AT_A_WORD.match(line, at) if after_blank else None)
        if match:
            return match[0].replace("\n", "a line break")
        after_blank = sign.isspace()
        at += 1
    return ""


OPERATORS = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1", "&>", "|&"})


def operator_among(argv: Sequence[str]) -> str:
    """The first word of a command that is an operator of a shell and not the value of an option; empty without one.

    `cut -d '|'` has none, nor has `find ... -exec ... ;`.
    """
    for before, word in pairwise(argv):
        if word in OPERATORS and not before.startswith("-") and not (word == ";" and "-exec" in argv):
            return word
    return ""


def is_env_name(name: str) -> bool:
    """Return whether a POSIX shell can export a variable of this name."""
    return _ENV_NAME.match(name) is not None
