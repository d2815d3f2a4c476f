"""Rules for shell and sbatch files: DT025, DT029, DT035, DT042, and those for batch scripts.

Values that the shell computes are unknown.
"""

from __future__ import annotations

import bisect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from dtctl.lint import batch_files
from dtctl.lint.model import ClusterFacts, Edit, Problem, Severity
from dtctl.lint.rules import load_lint_rules
from dtctl.lint.shell_words import ShellScript, parse_shell_script, said_only
from dtctl.lint.variables import MAX_PORT, NAME, check_variable_setting

_ASSIGNED = re.compile(
    r"(?:^|[\s;&|(])(?:export\s+|-x\s+|--env[ =]|-e\s+)?(?P<name>[A-Z][A-Z0-9_]*)="
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s;&|)]*)"
)
_RELEVANT = re.compile(r"[NR]CCL_|GLOO_|TORCH_FR_|MASTER_|master[_-]|torch\.distributed\.launch|#SBATCH ")
_PYTHON = re.compile(r"(?:\S*/)?python[\d.]*")
# The pattern starts at the beginning of a word: otherwise a long word would be searched from each of its letters.
_LAUNCH = re.compile(r"(?<!\S)\S*python[\d.]*\s+(?:-\S+\s+)*?-m\s+torch\.distributed\.launch\b")
_PORT = re.compile(
    r"(?:\bMASTER_PORT=|--(?:master|main_process)[_-]port[= ])(?P<value>\"[^\"]*\"|\$\(\([^)]{0,500}\)\)|\d+\b)"
)
_SUM = re.compile(r"\$\(\(\s*(?P<base>\d+)\s*\+(?P<rest>.*)\)\)")
_NODES = re.compile(r"#SBATCH\s+(?:--nodes[= ]|-N\s*)(\d+)")
_NNODES = re.compile(r"--nnodes[= ](\d+)")


def check_shell(path: str, text: str, cluster: ClusterFacts) -> list[Problem]:
    """Return the problems of a shell file."""
    if not _RELEVANT.search(text):
        return []
    try:
        script = parse_shell_script(text)
    except RecursionError:  # a thousand nested quotations and substitutions
        script = ShellScript(complete=False)
    several = cluster.multi_node or any(int(count) > 1 for count in _NODES.findall(text))
    read = ShellSource(text, script, several)
    lines = logical_lines(said_only(text, script))
    problems = [problem for line, words in lines for problem in _check_shell_line(path, line, words, read)]
    ends = [match.start() for match in re.finditer("\n", text)]
    for offset, rule, message in batch_files.check_batch_script(path, text, script):
        above = bisect.bisect_left(ends, offset)
        column = offset - (ends[above - 1] + 1 if above else 0)
        problems.append(
            _build_shell_problem(path, above + 1, column, rule, load_lint_rules()[rule].severity, message, "")
        )
    return problems


@dataclass(frozen=True, slots=True)
class ShellSource:
    """Shell file, with facts about the place where it runs."""

    text: str
    script: ShellScript
    several: bool
    """True if there are several nodes, by the spec or by the script's own directives."""


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with joined continuations and without comments, with the number of the first line.

    Backslash and line end become blanks, so that positions, counted from the beginning of the first line, are
    unchanged.
    """
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first, parts = number, [lines[number]]
        blank, is_comment = not parts[0].strip(" \t\\"), parts[0].lstrip().startswith("#")
        while parts[-1].endswith("\\") and not is_comment and number + 1 < len(lines):
            number += 1
            parts[-1] = parts[-1][:-1]
            parts.append(lines[number])
            is_comment = blank and parts[-1].lstrip().startswith("#")
            blank = blank and not parts[-1].strip(" \t\\")
        number += 1
        if not is_comment:
            yield first + 1, "  ".join(parts)


def _check_shell_line(path: str, line: int, words: str, read: ShellSource) -> Iterator[Problem]:
    code = _without_comment(words)
    several = read.several or any(int(count) > 1 for count in _NNODES.findall(code))
    launcher = _LAUNCH.search(code)
    if launcher is not None:
        yield _build_shell_problem(
            path, line, launcher.start(), "DT025", "info",
            "torch.distributed.launch is deprecated, and passes --local-rank, which scripts may not know",
            "use torchrun, and read LOCAL_RANK in the script", _build_torchrun_edits(read, line, launcher.start()),
        )  # fmt: skip
    for match in _ASSIGNED.finditer(code):
        name, value = match["name"], match["value"].strip("\"'")
        at = match.start("name")
        if NAME.match(name):
            judged = check_variable_setting(name, None if "$" in value else value)
            if judged is not None:
                yield _build_shell_problem(path, line, at, "DT029", *judged)
        elif name == "MASTER_ADDR" and value in ("localhost", "127.0.0.1", "::1") and several:
            yield _build_shell_problem(
                path, line, at, "DT035", "error", f"MASTER_ADDR={value} on several nodes: each connects to itself",
                "the address of the first node: $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)",
            )  # fmt: skip
    yield from _check_shell_ports(path, line, code, read)
    address = re.search(r"--master[_-]addr[= ]\"?(localhost|127\.0\.0\.1)\b", code)
    if address is not None and several and _NNODES.search(code):
        yield _build_shell_problem(
            path, line, address.start(), "DT035", "error", f"{address[0]} on several nodes: each connects to itself",
            "the address of the first node",
        )  # fmt: skip


def _check_shell_ports(path: str, line: int, code: str, read: ShellSource) -> Iterator[Problem]:
    """Yield ports that do not exist, and ports that all jobs of a batch script share."""
    for match in _PORT.finditer(code):
        value, at = match["value"].strip("\"'"), match.start("value")
        if value.isdigit():
            if int(value) > MAX_PORT:
                yield _build_shell_problem(
                    path, line, at, "DT042", "error", f"there is no port {value}: the last is {MAX_PORT}", ""
                )
            elif "#SBATCH" in read.text:
                yield _build_shell_problem(
                    path, line, at, "DT035", "info", f"port {value} for all jobs: two of them on one node collide",
                    "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
                )  # fmt: skip
        elif (sum_of := _SUM.match(value)) and re.fullmatch(r"\s*\$?\{?SLURM_JOB_?ID\}?\s*", sum_of["rest"]):
            message = f"the port is {sum_of['base']} + the job's number, which grows beyond {MAX_PORT}"
            yield _build_shell_problem(
                path, line, at, "DT042", "warning", message, "take the number modulo 10000: % 10000"
            )


def _build_torchrun_edits(read: ShellSource, line: int, column: int) -> tuple[Edit, ...]:
    """Return edits to torchrun, or to its module if the command names another interpreter or a wrapper.

    There are edits only with --use_env, since otherwise the script gets its local rank as an argument, and only in a
    simple command, since the use of a quoted word or an array is unknown.
    """
    if not read.script.complete:
        return ()
    at = sum(len(text_line) + 1 for text_line in read.text.split("\n")[: line - 1]) + column
    for command in read.script.commands:
        index = next((number for number, text_line in enumerate(command.words) if text_line.start == at), None)
        if index is not None:
            break
    else:
        return ()
    texts = [text_line.text if text_line.plain else "" for text_line in command.words]
    if not _PYTHON.fullmatch(texts[index]) or "torch.distributed.launch" not in texts[index:]:
        return ()
    module = texts.index("torch.distributed.launch", index)
    if texts[module - 1] != "-m" or not all(texts[index:module]):
        return ()
    options = next((number for number in range(module + 1, len(texts)) if _is_script(command.words[number].text)), None)
    use_env = next((number for number in range(module + 1, options or len(texts))
                    if texts[number] in ("--use_env", "--use-env")), None)  # fmt: skip
    if use_env is None:
        return ()
    bare = index == command.first and module == index + 2 and texts[index] in ("python", "python3")
    start, word = command.words[index if bare else module].start, command.words[use_env]
    blank = read.text[word.start - 1] in " \t"
    return (
        _build_text_edit(read.text, start, command.words[module].end, "torchrun" if bare else "torch.distributed.run"),
        _build_text_edit(read.text, word.start - blank, word.end, ""),
    )


def _is_script(word: str) -> bool:
    """Return whether a word of the launcher names the script; later options are not the launcher's."""
    return word in ("-m", "--module") or word.strip("\"'").endswith(".py")


def _build_text_edit(text: str, start: int, end: int, instead: str) -> Edit:
    places = []
    for offset in (start, end):
        before = text[:offset]
        places.append((before.count("\n") + 1, len(before.rpartition("\n")[2].encode())))
    return Edit(places[0], places[1], instead)


def _without_comment(line: str) -> str:
    """Return a line without its comment."""
    if "#" not in line:
        return line
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quotation continues in the next line
        return line
    at = 0
    for word in words:
        at = line.index(word, at)
        if word.startswith("#"):
            return line[:at]
        at += len(word)
    return line


def _build_shell_problem(
    path: str,
    line: int,
    column: int,
    rule: str,
    severity: Severity,
    message: str,
    fix: str,
    edits: tuple[Edit, ...] = (),
) -> Problem:
    return Problem(
        rule=rule,
        severity=severity,
        path=path,
        line=line,
        column=column + 1,
        message=message,
        fix=fix or load_lint_rules()[rule].fix,
        end_line=line,
        edits=edits,
    )
