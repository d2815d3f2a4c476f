"""The commands and their modules. The module of a command is imported when that command is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

import dtctl

HELP = """Check a cluster, launch PyTorch training on all its nodes, and leave nothing behind.

Start with `dtctl init my-project`, then `cd my-project` and `dtctl launch`.
"""

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Run": {
        "init": "Make a new project from a template.",
        "launch": "Run a job on all its nodes, or show what would be run.",
        "stop": "End a run on all its nodes, and prove that nothing is left.",
        "sbatch": "Write the job as an sbatch file, or submit it.",
        "render": "Write the job for Kubernetes, or hand it to kubectl.",
    },
    "Look": {
        "runs": "List runs: state, exit code, command or cause.",
        "status": "Show a run: step, nodes, restarts, first failure.",
        "logs": "Print what the workers have printed.",
        "watch": "Follow a run on one screen until it ends.",
        "report": "Write a page with plots of what runs did.",
        "fetch": "Fetch files that a run has written on its nodes.",
        "exec": "Run a command, or a shell, inside a run on a node.",
    },
    "Check": {
        "validate": "Check a spec without touching any node.",
        "doctor": "Find the faulty node or pair, the cause and the fix.",
        "lint": "Find mistakes in distributed training code.",
        "bench": "Measure collectives over the nodes of a spec.",
    },
    "Plan": {
        "advise": "Recommend how to parallelize a training.",
        "nccl": "Explain variables of NCCL, and choose those of a cluster.",
    },
    "Tools": {
        "clean": "Show old runs, trees and sandboxes, and remove them.",
        "sandbox": "Virtual hosts on this machine, with faults on demand.",
        "snapshot": "List, verify, export and prune snapshots.",
    },
}
"""Commands of the help in groups, with one sentence each. A command is the function of its name in
dtctl/cli/NAME.py."""
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "init": ("dtctl init my-gpt --launcher sandbox", "dtctl init my-job --template script --launcher ssh"),
    "launch": (
        "dtctl launch --dry-run",
        "dtctl launch --set train.lr=1e-3 -- --flag-of-the-script",
        "dtctl launch --nodes gpu01,gpu02 --slots 8 -- train.py --lr 1e-3",
        "dtctl launch --detach --name first",
    ),
    "stop": ("dtctl stop", "dtctl stop gpt-1122-093012-k7"),
    "sbatch": ("dtctl sbatch --out job.sbatch", "dtctl sbatch --submit"),
    "render": ("dtctl render --out job.yaml", "dtctl render --apply"),
    "runs": ("dtctl runs", "dtctl runs --json"),
    "status": ("dtctl status", "dtctl status gpt-1122-093012-k7 --json"),
    "logs": (
        "dtctl logs -f",
        "dtctl logs --node gpu02 --rank 9 --tail 50",
        "dtctl logs --attempt -1 --grep 'loss|nan'",
    ),
    "watch": ("dtctl watch",),
    "report": ("dtctl report", "dtctl report run-a run-b -o compare.html"),
    "fetch": ("dtctl fetch", "dtctl fetch gpt-1122-093012-k7 out/checkpoint-40"),
    "exec": ("dtctl exec gpt-1122-093012-k7 gpu02 -- nvidia-smi", "dtctl exec gpt-1122-093012-k7 gpu02"),
    "validate": ("dtctl validate", "dtctl validate --schema > dtctl.schema.json"),
    "doctor": ("dtctl doctor", "dtctl doctor --quick", "dtctl doctor --log slurm-123.out logs/"),
    "lint": ("dtctl lint train.py", "dtctl lint . --format sarif", "dtctl lint --explain DT011"),
    "bench": ("dtctl bench --op all_reduce --sizes 1K:64M",),
    "clean": ("dtctl clean --older 30d", "dtctl clean --larger 1G --yes"),
    "advise": ("dtctl advise --params 7B --gpus 16 --gpu A100 --batch 64", "dtctl advise --write"),
}
"""Examples below the help of a command."""
GROUPS = ("sandbox", "snapshot", "nccl")
"""Commands with subcommands: `app` in dtctl/cli/NAME.py."""
COMMANDS = tuple(name for section in SECTIONS.values() for name in section if name not in GROUPS)
"""Commands without subcommands, in the order of the help."""
HIDDEN = ("take-up",)
"""Commands that only dtctl itself calls; they have the form of `COMMANDS`."""


class _Commands(TyperGroup):
    """Group of all commands, which imports a command when it is used, and prints the help in sections."""

    def __init__(self, **options: Any) -> None:
        """Register the names of all commands without importing any."""
        super().__init__(**options)
        self.commands = dict.fromkeys((*COMMANDS, *HIDDEN, *GROUPS))  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a command, after its import if necessary; None if no command has this name."""
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load_command(cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ARG002
        """Write the sections of the help, with one sentence for each command."""
        for title, helps in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(helps.items()))


def _load_command(name: str) -> Any:
    """Import the file of a command, and return the command that typer makes of it."""
    python_name = name.replace("-", "_")
    module = import_module(f"dtctl.cli.{python_name}")
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_parse_root_options)  # typer makes no group of a single command without a callback
    if name in GROUPS:
        app.add_typer(module.app, name=name)
    else:
        function = getattr(module, python_name, None) or getattr(module, f"{python_name}_")
        app.command(name, hidden=name in HIDDEN, epilog=_format_command_examples(name))(function)
    return get_group(app).commands[name]


def _format_command_examples(name: str) -> str | None:
    """Return the examples at the end of a command's help; a mark keeps their lines as they are."""
    lines = EXAMPLES.get(name)
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) if lines else None


def _print_version(show: bool) -> None:
    if show:
        typer.echo(f"dtctl {dtctl.__version__}")
        raise typer.Exit


def _parse_root_options(
    version: bool = typer.Option(
        False, "--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def split_rest(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments of `dtctl launch` or `exec` before the first `--` and after it; None without `--`.

    The parser drops the dashes, and `launch -- train.py` could not be distinguished from `launch train.py` afterwards.
    """
    if arguments[:1] in (["launch"], ["exec"]) and "--" in arguments:
        at = arguments.index("--")
        return arguments[:at], arguments[at + 1 :]
    return arguments, None


def find_command(arguments: list[str]) -> tuple[list[str], Any]:
    """Return the words of a command line that name its command, and that command as an object of the library."""
    command: Any = get_group(make_app())
    words: list[str] = []
    for word in arguments:
        if word not in getattr(command, "commands", ()):
            break
        command = command.get_command(None, word)
        words.append(word)
    return words, command


def make_app() -> typer.Typer:
    """Return the command line; no command is imported yet."""
    app = typer.Typer(
        name="dtctl",
        cls=_Commands,
        help=HELP,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,  # rich takes longer to import than the help takes to read
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_parse_root_options)
    return app
