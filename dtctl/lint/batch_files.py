"""Rules about scripts that sbatch and srun run: DT041, DT062, DT063."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from dtctl.lint.shell_words import ShellScript, ShellWord

_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(?P<options>\S[^\n]*)", re.MULTILINE)
_OWN_OF_TASK = re.compile(r"\$\{?(SLURM_NODEID|SLURM_PROCID|SLURM_LOCALID)\b")
_TASKS = re.compile(r"--ntasks-per-node[= ](\d+)")
_OUTPUT = re.compile(r"(?:--output[= ]|--error[= ]|-[oe] ?)(?P<path>\S+)")
_NODES = re.compile(r"(?:--nodes[= ]|-N[ =]?)(\d+)")
_BATCH = (".sbatch", ".slurm")

Finding = tuple[int, str, str]
"""Problem of a batch script: (offset, rule, message)."""


def check_batch_script(path: str, text: str, script: ShellScript) -> Iterator[Finding]:
    """Yield problems of a batch script, with their offsets in the text."""
    directives = list(_DIRECTIVE.finditer(text))
    if not directives:
        return
    if not text.startswith("#!"):
        if PurePath(path).suffix in _BATCH or not text.lstrip().startswith("#!"):
            yield 0, "DT041", "the first line does not begin with #!, and sbatch refuses the script"
        else:
            yield 0, "DT041", "#! is not in the very first line, and sbatch refuses the script"
    first = min((command.words[0].start for command in script.commands), default=len(text))
    yield from _check_directives(script, directives, first)
    yield from _check_output_folder(script, directives)
    yield from _check_srun_steps(script, " ".join(match["options"] for match in directives if match.start() < first))


def _check_directives(script: ShellScript, directives: list[re.Match[str]], first: int) -> Iterator[Finding]:
    """Yield directives that sbatch does not read, or reads differently than intended.

    Args:
        script: parsed script.
        directives: all lines of the script that look like a directive.
        first: offset of the first command.
    """
    for match in directives:
        if any(begin <= match.start() < end for begin, end, _ in script.documents):
            continue
        options = match["options"].partition(" #")[0].strip()
        variable = re.search(r"\$\{?[A-Za-z_]\w*\}?", options)
        if match.start() > first:
            yield match.start(), "DT062", f"`#SBATCH {options}` comes after a command, and sbatch does not read it"
        elif variable is not None and "--wrap" not in options:
            yield (
                match.start(),
                "DT062",
                f"`{variable[0]}` in a directive is taken literally: sbatch replaces no variables",
            )


def _check_output_folder(script: ShellScript, directives: list[re.Match[str]]) -> Iterator[Finding]:
    """Yield a folder for the job's output that the job itself creates: Slurm opens the output file earlier."""
    made = " ".join(word.text for command in script.commands if command.name == "mkdir" for word in command.words[1:])
    for match in directives:
        option = _OUTPUT.search(match["options"])
        folder = option["path"].rpartition("/")[0] if option is not None else ""
        if (
            folder
            and "%" not in folder
            and re.search(rf"(?:^|[\s\"'/]){re.escape(folder.removeprefix('./'))}/?(?:$|[\s\"'])", made)
        ):
            yield match.start(), "DT062", f"Slurm opens its output in `{folder}` before the job makes that folder"
            return


def _check_srun_steps(script: ShellScript, directives: str) -> Iterator[Finding]:
    """Yield problems of commands that srun starts once per task."""
    per_node, nodes = _TASKS.search(directives), _NODES.search(directives)
    for command in script.commands:
        if command.name != "srun":
            continue
        words = command.words[command.first + 1 :]
        launcher = next((word for word in words if re.fullmatch(r"(?:\S*/)?torchrun|torch\.distributed\.(?:run|launch)",
                                                                word.text)), None)  # fmt: skip
        own = " ".join(word.text for word in words)
        tasks = _TASKS.search(own) or (per_node if not re.search(r"--ntasks\b|(?:^| )-n[ =]?\d", own) else None)
        if launcher is not None and tasks is not None and int(tasks[1]) > 1:
            yield (
                launcher.start, "DT063",
                f"srun starts torchrun {tasks[1]} times on each node, and each of them starts a process for every GPU",
            )  # fmt: skip
        for word in words:
            variable = _find_task_variable(word)
            if variable and (nodes is None or int(nodes[1]) > 1) and launcher is not None:
                yield (
                    word.start,
                    "DT063",
                    f"the batch script replaces ${variable} before srun runs: all tasks get the same",
                )


def _find_task_variable(word: ShellWord) -> str | None:
    """Return the task variable in a word, outside of single quotes; None without one."""
    bare = re.sub(r"'[^']*'", "", word.text) if not word.text.startswith('"') else word.text
    match = _OWN_OF_TASK.search(bare)
    escaped = match is not None and bare[: match.start()].endswith("\\")
    return match[1] if match is not None and not escaped else None
