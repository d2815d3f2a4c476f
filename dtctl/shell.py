"""Quoting for a POSIX shell: the only module of dtctl that turns values into shell text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import pairwise

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class ShellExpansion(str):
    """Text with `$NAME` that the shell expands where the script runs, quoted for use inside double quotes."""

    __slots__ = ()


def quote_word(text: str) -> str:
    """Return one shell word that means exactly `text`.

    Raises:
        ValueError: `text` has a NUL character, which cannot be part of an argument.
    """
    if isinstance(text, ShellExpansion):
        return f'"{text}"'
    if "\0" in text:
        raise ValueError("a NUL character cannot be passed to a program")
    return shlex.quote(text)


_HOME = re.compile(r"(?P<home>\$HOME(?!\w)|\$\{HOME\})|\\(?P<kept>\$HOME(?!\w)|\$\{HOME\})|'[^']*'")
_TILDE = re.compile(r"(?P<option>--?[\w.-]+=)?(?P<kept>\\?)~(?=/|\Z)")
_SPECIAL = re.compile(r'[\\"$`]')


def expand_home(text: str) -> str:
    r"""Return a user's text as a shell word in which `~` and `$HOME` become the home folder where the script runs.

    `~` counts at the beginning, and after the `=` of an option, if `/` or nothing follows. Text in single quotes is
    unchanged; `\~` and `\$HOME` stand for the literal text.
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
    return ShellExpansion(
        "".join("${HOME}" if is_home else _SPECIAL.sub(r"\\\g<0>", piece) for piece, is_home in pieces)
    )


def quote_program(path: str) -> str:
    """Return the shell word for a program like `quote_word`; `~/` at the beginning is the home folder on the node."""
    return f"~/{quote_word(path[2:])}" if path.startswith("~/") else quote_word(path)


def quote_words(argv: Iterable[str]) -> list[str]:
    """Return each word of a command as shell text; the first word is the name of a program."""
    return [quote_word(word) if at else quote_program(word) for at, word in enumerate(argv)]


def join_command(argv: Iterable[str]) -> str:
    """Return a shell command that runs `argv`, word for word."""
    return " ".join(quote_words(argv))


def split_command(text: str) -> list[str]:
    """Split a command line into words like a POSIX shell, without expansion.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    return shlex.split(text)


_OPERATOR = re.compile(r"&&|\|\||\|&|&>>?|>>|>&|<<|[<>&|;()\n*]")
_EXPANSION = re.compile(r"\$\(|\$\{?[\w@*#?$!-]+\}?|`")
_AT_A_WORD = re.compile(r"~(?=[/\s]|\Z)|#")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*(?=\s)")


def find_shell_syntax(line: str) -> str:
    """Return the first part of a line that only a shell would interpret: `&&`, `>`, `$HOME`, `*`; empty without one.

    Quoted text and characters after a backslash do not count, since a shell does not interpret them either.
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


def find_shell_operator(argv: Sequence[str]) -> str:
    """Return the first word that is an operator of a shell and not the value of an option; empty without one.

    `cut -d '|'` has none, nor has `find ... -exec ... ;`.
    """
    for before, word in pairwise(argv):
        if word in OPERATORS and not before.startswith("-") and not (word == ";" and "-exec" in argv):
            return word
    return ""


def is_env_name(name: str) -> bool:
    """Return whether a POSIX shell can export a variable of this name."""
    return _ENV_NAME.match(name) is not None
