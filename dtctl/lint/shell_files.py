"""Rules for shell and sbatch files: DT025, DT029, DT035. What the shell computes is unknown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from dtctl.lint.model import Cluster, Edit, Problem, Severity
from dtctl.lint.rules import rules
from dtctl.lint.variables import NAME, judge

_ASSIGNED = re.compile(
    r"(?:^|[\s;&|(])(?:export\s+|-x\s+|--env[ =]|-e\s+)?(?P<name>[A-Z][A-Z0-9_]*)="
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s;&|)]*)"
)
_LAUNCH = re.compile(r"\S*python[\d.]*\s+(?:-\S+\s+)*?-m\s+torch\.distributed\.launch\b")
_NODES = re.compile(r"#SBATCH\s+(?:--nodes[= ]|-N\s*)(\d+)")
_NNODES = re.compile(r"--nnodes[= ](\d+)")


def check_shell(path: str, text: str, cluster: Cluster) -> list[Problem]:
    """Problems of a shell file."""
    return [problem for line, words in logical_lines(text) for problem in _line(path, line, words, text, cluster)]


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations joined, comments left out; with the number of the first.

    The backslash becomes a blank, so that positions in the first line stay.
    """
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first, joined = number + 1, lines[number]
        while joined.endswith("\\") and not joined.lstrip().startswith("#") and number + 1 < len(lines):
            number += 1
            joined = joined[:-1] + " " + lines[number]
        number += 1
        if not joined.lstrip().startswith("#"):
            yield first, joined


def _line(path: str, line: int, words: str, text: str, cluster: Cluster) -> Iterator[Problem]:
    code = _without_comment(words)
    several = cluster.several or any(int(one) > 1 for one in (*_NODES.findall(text), *_NNODES.findall(code)))
    found = _LAUNCH.search(code)
    if found is not None:
        yield _problem(
            path, line, found.start(), "DT025", "warning",
            "torch.distributed.launch is deprecated, and passes --local-rank, which scripts may not know",
            "use torchrun, and read LOCAL_RANK in the script", _torchrun(line, code, found, text),
        )  # fmt: skip
    for match in _ASSIGNED.finditer(code):
        name, value = match["name"], match["value"].strip("\"'")
        at = match.start("name")
        if NAME.match(name):
            judged = judge(name, None if "$" in value else value)
            if judged is not None:
                yield _problem(path, line, at, "DT029", *judged)
        elif name == "MASTER_ADDR" and value in ("localhost", "127.0.0.1", "::1") and several:
            yield _problem(
                path, line, at, "DT035", "error", f"MASTER_ADDR={value} on several nodes: every node meets itself only",
                "the address of the first node: $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)",
            )  # fmt: skip
    address = re.search(r"--master[_-]addr[= ]\"?(localhost|127\.0\.0\.1)\b", code)
    if address is not None and several and _NNODES.search(code):
        yield _problem(
            path, line, address.start(), "DT035", "error", f"{address[0]} on several nodes: each meets itself only",
            "the address of the first node",
        )  # fmt: skip


def _torchrun(line: int, code: str, found: re.Match[str], text: str) -> tuple[Edit, ...]:
    """The edit to torchrun. Only with --use_env: without it the script is told its local rank by an argument."""
    use_env = re.search(r"[ \t]--use[_-]env\b", code)
    first = text.split("\n")[line - 1]
    if use_env is None or found.end() > len(first) or use_env.end() > len(first):
        return ()
    return (
        Edit((line, len(code[: found.start()].encode())), (line, len(code[: found.end()].encode())), "torchrun"),
        Edit((line, len(code[: use_env.start()].encode())), (line, len(code[: use_env.end()].encode())), ""),
    )


def _without_comment(line: str) -> str:
    """A line up to its comment."""
    if "#" not in line:
        return line
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quotation that goes on in the next line
        return line
    at = 0
    for word in words:
        at = line.index(word, at)
        if word.startswith("#"):
            return line[:at]
        at += len(word)
    return line


def _problem(
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
        fix=fix or rules()[rule].fix,
        end_line=line,
        edits=edits,
    )
