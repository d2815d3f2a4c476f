"""Entry point of the command line: it runs a command and turns errors into exit codes. No other module ends dtctl."""

from __future__ import annotations

import errno
import os
import signal
import sys

from dtctl.interrupt import exit_immediately, leave_when_interrupted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from dtctl.errors import DtctlError


_INTERRUPTED = {"watch": "stopped watching; the run continues", "logs": "stopped following; the run continues"}
"""Command -> message about what Ctrl-C has ended, for commands that only display a run."""


def main(argv: list[str] | None = None) -> None:
    """Run `dtctl ARGV` and end the process with its exit code."""
    leave_when_interrupted()
    import gc

    # Imports make tens of thousands of objects that are never freed; collecting garbage among them takes 10 ms.
    gc.set_threshold(200_000)
    arguments = sys.argv[1:] if argv is None else argv
    _open_closed()
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 130 or code == 143:
        # Threads of dropped connections may still wait for a time-out; a user who pressed Ctrl-C should not wait for
        # them.
        os._exit(code)
    # At its end, Python collects garbage among all objects several times; the end of the process frees them at once.
    gc.freeze()
    sys.exit(code)


def _handle_interrupt(number: int, _frame: object) -> None:
    """Let the command end in an orderly way; at a second signal, end the process immediately."""
    signal.signal(number, exit_immediately)
    raise KeyboardInterrupt


def _open_closed() -> None:
    """Open the null device as standard output and error if the caller has closed them (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process lives


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    import typer

    from dtctl.cli import output
    from dtctl.cli.app import make_app, split_rest
    from dtctl.errors import DtctlError, Interrupted, LaunchError

    before, rest = split_rest(arguments)
    app = make_app()
    try:
        if signal.getsignal(signal.SIGINT) is exit_immediately:
            signal.signal(signal.SIGINT, _handle_interrupt)
        result = app(before, standalone_mode=False, prog_name="dtctl", obj=rest)
    except Interrupted as exc:
        output.print_error_with_hint(exc)
        return 128 + exc.signal
    except DtctlError as exc:
        output.print_error_with_hint(exc)
        return _exit_code(exc)
    except (KeyboardInterrupt, typer.Abort):
        output.print_stderr(_INTERRUPTED.get(before[0] if before else "", "stopped"))
        return 130
    except Exception as exc:
        return _report_other_error(exc, before, has_rest=rest is not None)
    if result in (0, None) and output.is_cut() and before[:1] != ["launch"]:
        # Lost output must not change the result of a launch; all other commands exist for their output.
        return LaunchError.exit_code
    if result == 130 and signal.getsignal(signal.SIGINT) is exit_immediately:
        # The command line library has turned Ctrl-C into an exit code without a message.
        output.print_stderr(_INTERRUPTED.get(before[0] if before else "", "stopped"))
    return result if isinstance(result, int) else 0


def _report_other_error(exc: Exception, before: list[str], *, has_rest: bool) -> int:
    """Print an error that dtctl has not raised itself; return the exit code."""
    from dtctl.cli import output
    from dtctl.errors import DtctlError, LaunchError, UsageError

    # A usage error of the command line library, independent of the version that typer depends on.
    show, code = getattr(exc, "show", None), getattr(exc, "exit_code", None)
    if callable(show) and isinstance(code, int):
        show(file=sys.stderr)
        if hint := _suggest_usage(exc, before, has_rest=has_rest):
            output.print_hint(hint)
        return code
    if isinstance(exc, OSError) and _is_refused_help(exc):
        # The command line library prints help texts itself, without the handling of errors in `output`.
        output.warn_of_lost_output(exc)
        return LaunchError.exit_code
    # The path is an argument of the command line; paths of the spec are checked elsewhere.
    if isinstance(exc, OSError) and exc.errno == errno.ENAMETOOLONG:
        name = os.fsdecode(exc.filename or "")
        output.print_error_with_hint(
            UsageError(f"a path of {len(name):,} characters is too long", where=f"{name[:60]}...")
        )
        return UsageError.exit_code
    import traceback

    traceback.print_exception(exc)
    output.print_error_with_hint(
        DtctlError(f"{type(exc).__name__}: {exc}", hint="this is a bug in dtctl; please report it")
    )
    return DtctlError.exit_code


def _is_refused_help(error: OSError) -> bool:
    """Return whether the command line library failed while it printed a help text: none of dtctl's commands ran."""
    import traceback
    from pathlib import Path

    package = str(Path(__file__).parents[1])
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return error.errno == errno.ENOSPC and bool(files) and not any(file.startswith(package) for file in files)


def _suggest_usage(exc: Exception, before: list[str], *, has_rest: bool) -> str:
    """Return the correct command for a usage error of the command line library; empty if it is not known."""
    from dtctl.cli.app import find_command

    wanted = getattr(exc, "option_name", None)  # an option that lacks its value
    words, command = find_command(before)
    for option in command.params if wanted is not None else ():
        if wanted in option.opts and not option.is_flag:
            value = option.metavar or option.name.upper()
            return f"`{' '.join(['dtctl', *words])} {wanted} {value}`: {option.help or ''}".rstrip(": ")
    if before[:1] == ["launch"] and not has_rest:
        return _suggest_two_dashes(exc, before[1:], {name for option in command.params for name in option.opts})
    return ""


def _suggest_two_dashes(exc: Exception, words: list[str], options: Collection[str]) -> str:
    """Return the launch whose unknown words go to the script; empty if a word may be an option written wrongly.

    Options that dtctl knows stay where they are: behind the dashes `--dry-run` is the script's, and the job starts.
    """
    import difflib
    import shlex

    option, message = getattr(exc, "option_name", None), str(getattr(exc, "message", ""))
    if option is not None:
        if difflib.get_close_matches(option, getattr(exc, "possibilities", None) or (), cutoff=0.8):
            return ""
        at = next((number for number, word in enumerate(words) if word.partition("=")[0] == option), None)
    else:  # "Got unexpected extra argument (a b)"
        extra = message.rpartition("(")[2].rstrip(")").split() if "extra argument" in message else []
        at = len(words) - len(extra) if extra and words[-len(extra) :] == extra else None
    if at is None or any(word.partition("=")[0] in options for word in words[at:]):
        return ""
    # The spec names the program, so a program in front of its arguments is left out.
    known = [word for word in words[:at] if word.startswith("-") or not word.endswith(".py")]
    command = shlex.join(["dtctl", "launch", *known, "--", *words[at:]])
    return f"arguments of the script come after two dashes: `{command}`"


def _exit_code(exc: DtctlError) -> int:
    from dtctl.errors import NodeFailures

    if isinstance(
        exc, NodeFailures
    ):  # among several nodes the most severe error counts: one of the plan before one of a single node
        return min(failure.exit_code for failure in exc.failures.values())
    return exc.exit_code


if __name__ == "__main__":
    main()
