"""Shell scripts as commands and words: as much of the grammar as distinguishes commands from mere text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_RESERVED = frozenset("if then elif else fi do done while until for case esac in { } ! time function".split())
_SAYS = frozenset(["echo", "printf", ":", "logger"])
_RUNS = frozenset(["bash", "sh", "dash", "ksh", "zsh", "sbatch", "srun", "ssh"])
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_BLANK = re.compile(r"(?:\\\n|[ \t\r])+")
_HEREDOC = re.compile(r"<<(?P<tabs>-?)[ \t]*(?P<delimiter>'[^'\n]+'|\"[^\"\n]+\"|\\?[\w.-]+)")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, at offsets of the text."""

    text: str
    start: int
    end: int
    plain: bool
    """True if it stands there as it is: nothing is quoted or replaced."""


@dataclass(slots=True)
class Command:
    """A simple command: its words, assignments before it too."""

    words: list[Word] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The index of the first word that is no assignment; the number of words if there is none."""
        return next((at for at, word in enumerate(self.words) if not _ASSIGNMENT.match(word.text)), len(self.words))

    @property
    def name(self) -> str:
        """Return what is run, without its folder; empty for assignments alone."""
        return self.words[self.first].text.rpartition("/")[2] if self.first < len(self.words) else ""


@dataclass(slots=True)
class Script:
    """Words of a script."""

    commands: list[Command] = field(default_factory=list)
    documents: list[tuple[int, int, Command]] = field(default_factory=list)
    """Here-documents: from, to, and the command that reads it."""
    complete: bool = True
    """True if all of it was understood; a quotation may not end."""


def scanned(text: str) -> Script:
    """Return the commands of a script; those inside quotations and substitutions are part of a word."""
    script, command, at = Script(), Command(), 0
    waiting: list[tuple[str, bool, Command]] = []
    while at < len(text):
        char = text[at]
        if blank := _BLANK.match(text, at):
            at = blank.end()
        elif char == "#":
            at = _line_end(text, at)
        elif char == "\n":
            command, at = _ended(script, command), _skip_documents(text, at + 1, waiting, script)
            waiting = []
        elif text.startswith("<<<", at):
            at += 3
        elif char == "<" and (heredoc := _HEREDOC.match(text, at)):
            waiting.append((heredoc["delimiter"].strip("'\"\\"), bool(heredoc["tabs"]), command))
            at = heredoc.end()
        elif char in "<>" or text.startswith("&>", at):
            at += 2 if text[at + 1 : at + 2] in (">", "&") else 1
        elif text.startswith("((", at) and not command.words:
            at = _closed(text, at + 1)
        elif char in ";|&()":
            command, at = _ended(script, command), at + 1
        else:
            end, plain = _word_end(text, at)
            command.words.append(Word(text[at:end], at, end, plain))
            if len(command.words) == 1 and command.words[0].text in _RESERVED:
                command = Command()
            at = end
        if at > len(text):
            script.complete = False
    _ended(script, command)
    return script


def _skip_documents(text: str, at: int, waiting: Sequence[tuple[str, bool, Command]], script: Script) -> int:
    """Take the here-documents that begin here into a script; return where the last one ends."""
    for delimiter, tabs, owner in waiting:
        begin, at = at, _document_end(text, at, delimiter, tabs=tabs)
        script.documents.append((begin, at, owner))
    return at


def said_only(text: str, script: Script) -> str:
    """The text with what is only written or printed made blank: arguments of echo, documents that no shell gets."""
    blank = [(command.words[command.first + 1].start, command.words[-1].end) for command in script.commands
             if command.name in _SAYS and len(command.words) > command.first + 1]  # fmt: skip
    blank += [(begin, end) for begin, end, owner in script.documents if owner.name not in _RUNS]
    pieces, at = [], 0
    for begin, end in sorted(blank):
        pieces += [text[at:begin], re.sub(r"[^\n]", " ", text[max(at, begin) : end])]
        at = max(at, end)
    return "".join([*pieces, text[at:]])


def _ended(script: Script, command: Command) -> Command:
    if command.words:
        script.commands.append(command)
    return Command()


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return end if end >= 0 else len(text)


def _document_end(text: str, at: int, delimiter: str, *, tabs: bool) -> int:
    """Return the offset after a here-document's last line; one more than there is when it has none."""
    while at < len(text):
        end = _line_end(text, at)
        line = text[at:end].rstrip("\r")
        if (line.lstrip("\t") if tabs else line) == delimiter:
            return end
        at = end + 1
    return len(text) + 1


def _word_end(text: str, at: int) -> tuple[int, bool]:
    """The offset after a word, and whether the word is plain; an offset beyond the text if a quotation does not end."""
    plain = True
    while at < len(text) and text[at] not in " \t\r\n;|&()<>":
        char = text[at]
        if text.startswith(("$(", "${"), at):
            at, plain = _closed(text, at + 1), False
        elif char in "\\$`'\"":
            at, plain = _quoted_end(text, at), False
        else:
            array = char == "=" and text[at + 1 : at + 2] == "("
            at, plain = (_closed(text, at + 1), False) if array else (at + 1, plain)
    return at, plain


def _quoted_end(text: str, at: int) -> int:
    """Return the offset after what a backslash, a dollar or a quotation mark begins."""
    char = text[at]
    if char == "$":
        return at + 1
    if char == "\\":
        return at + 2
    end = at + 1
    while end < len(text) and text[end] != char:
        if char == '"' and text.startswith("$(", end):
            end = _closed(text, end + 1)
        else:
            end += 2 if text[end] == "\\" and char != "'" else 1
    return end + 1


def _closed(text: str, at: int) -> int:
    """Return the offset after the bracket that closes the one at an offset."""
    opening = text[at]
    closing, depth = {"(": ")", "{": "}"}[opening], 0
    while at < len(text):
        char = text[at]
        if char in "'\"`\\":
            at = _quoted_end(text, at)
            continue
        depth += (char == opening) - (char == closing)
        at += 1
        if not depth:
            return at
    return len(text) + 1
