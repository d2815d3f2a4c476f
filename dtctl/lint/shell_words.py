"""Commands and words of shell scripts, by the part of the grammar that distinguishes commands from mere text."""

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
class ShellWord:
    """Word of a command, with its offsets in the text."""

    text: str
    start: int
    end: int
    plain: bool
    """True if the word has no quotes and no substitutions."""


@dataclass(slots=True)
class ShellCommand:
    """Simple command: its words, with the assignments before it."""

    words: list[ShellWord] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Return the index of the first word that is not an assignment; the number of words if all are assignments."""
        return next((at for at, word in enumerate(self.words) if not _ASSIGNMENT.match(word.text)), len(self.words))

    @property
    def name(self) -> str:
        """Return the name of the program without its folder; empty if there are only assignments."""
        return self.words[self.first].text.rpartition("/")[2] if self.first < len(self.words) else ""


@dataclass(slots=True)
class ShellScript:
    """Commands and here-documents of a script."""

    commands: list[ShellCommand] = field(default_factory=list)
    documents: list[tuple[int, int, ShellCommand]] = field(default_factory=list)
    """Here-documents: start, end, and the command that reads the document."""
    complete: bool = True
    """True if the whole script was parsed; False if, for example, a quotation does not end."""


def parse_shell_script(text: str) -> ShellScript:
    """Return the commands of a script; commands inside quotations and substitutions are part of a word."""
    script, command, at = ShellScript(), ShellCommand(), 0
    waiting: list[tuple[str, bool, ShellCommand]] = []
    while at < len(text):
        char = text[at]
        if blank := _BLANK.match(text, at):
            at = blank.end()
        elif char == "#":
            at = _find_shell_line_end(text, at)
        elif char == "\n":
            command, at = _close_command(script, command), _skip_documents(text, at + 1, waiting, script)
            waiting = []
        elif text.startswith("<<<", at):
            at += 3
        elif char == "<" and (heredoc := _HEREDOC.match(text, at)):
            waiting.append((heredoc["delimiter"].strip("'\"\\"), bool(heredoc["tabs"]), command))
            at = heredoc.end()
        elif char in "<>" or text.startswith("&>", at):
            at += 2 if text[at + 1 : at + 2] in (">", "&") else 1
        elif text.startswith("((", at) and not command.words:
            at = _find_closing_bracket(text, at + 1)
        elif char in ";|&()":
            command, at = _close_command(script, command), at + 1
        else:
            end, plain = _word_end(text, at)
            command.words.append(ShellWord(text[at:end], at, end, plain))
            if len(command.words) == 1 and command.words[0].text in _RESERVED:
                command = ShellCommand()
            at = end
        if at > len(text):
            script.complete = False
    _close_command(script, command)
    return script


def _skip_documents(text: str, at: int, waiting: Sequence[tuple[str, bool, ShellCommand]], script: ShellScript) -> int:
    """Add the here-documents that begin here to a script; return the offset after the last one."""
    for delimiter, tabs, owner in waiting:
        begin, at = at, _document_end(text, at, delimiter, tabs=tabs)
        script.documents.append((begin, at, owner))
    return at


def said_only(text: str, script: ShellScript) -> str:
    """Return the text with blanks instead of text that is only printed or written: echo's arguments, documents."""
    blank = [(command.words[command.first + 1].start, command.words[-1].end) for command in script.commands
             if command.name in _SAYS and len(command.words) > command.first + 1]  # fmt: skip
    blank += [(begin, end) for begin, end, owner in script.documents if owner.name not in _RUNS]
    pieces, at = [], 0
    for begin, end in sorted(blank):
        pieces += [text[at:begin], re.sub(r"[^\n]", " ", text[max(at, begin) : end])]
        at = max(at, end)
    return "".join([*pieces, text[at:]])


def _close_command(script: ShellScript, command: ShellCommand) -> ShellCommand:
    if command.words:
        script.commands.append(command)
    return ShellCommand()


def _find_shell_line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return end if end >= 0 else len(text)


def _document_end(text: str, at: int, delimiter: str, *, tabs: bool) -> int:
    """Return the offset after a here-document's last line; one more than the text's length if it has no end."""
    while at < len(text):
        end = _find_shell_line_end(text, at)
        line = text[at:end].rstrip("\r")
        if (line.lstrip("\t") if tabs else line) == delimiter:
            return end
        at = end + 1
    return len(text) + 1


def _word_end(text: str, at: int) -> tuple[int, bool]:
    """Return the offset after a word, and True if it is plain; an offset after the text means no end."""
    plain = True
    while at < len(text) and text[at] not in " \t\r\n;|&()<>":
        char = text[at]
        if text.startswith(("$(", "${"), at):
            at, plain = _find_closing_bracket(text, at + 1), False
        elif char in "\\$`'\"":
            at, plain = _quoted_end(text, at), False
        else:
            array = char == "=" and text[at + 1 : at + 2] == "("
            at, plain = (_find_closing_bracket(text, at + 1), False) if array else (at + 1, plain)
    return at, plain


def _quoted_end(text: str, at: int) -> int:
    """Return the offset after the text that a backslash, a dollar or a quotation mark begins."""
    char = text[at]
    if char == "$":
        return at + 1
    if char == "\\":
        return at + 2
    end = at + 1
    while end < len(text) and text[end] != char:
        if char == '"' and text.startswith("$(", end):
            end = _find_closing_bracket(text, end + 1)
        else:
            end += 2 if text[end] == "\\" and char != "'" else 1
    return end + 1


def _find_closing_bracket(text: str, at: int) -> int:
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
