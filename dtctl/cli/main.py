"""The entry point of the command line: runs a command and turns errors into exit codes. Nothing else ends dtctl."""

from __future__ import annotations

import errno
import os
import signal
import sys

from dtctl.interrupt import leave, leave_when_interrupted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtctl.errors import DtctlError


_INTERRUPTED = {"watch": "stopped watching; the run continues", "logs": "stopped following; the run is not touched"}
"""Command -> what Ctrl-C has ended, where that is not what the command is about."""


def main(argv: list[str] | None = None) -> None:
    """Run `dtctl ARGV` and end the process with its exit code."""
    leave_when_interrupted()
    import gc

    # Loading modules makes tens of thousands of objects that all stay; looking for garbage among them takes 10 ms.
    gc.set_threshold(200_000)
    arguments = sys.argv[1:] if argv is None else argv
    _open_closed()
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 130 or code == 143:
        # Threads of dropped connections may still wait for a time-out; the user who pressed Ctrl-C should not.
        os._exit(code)
    sys.exit(code)


def _interrupt(number: int, _frame: object) -> None:
    """Let the command end in order; at a second signal, end at once."""
    signal.signal(number, leave)
    raise KeyboardInterrupt


def _open_closed() -> None:
    """Give standard output and error something to write to where the caller has closed them (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process lives


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    import typer

    from dtctl.cli import output
    from dtctl.cli.app import make_app, split_rest
    from dtctl.errors import DtctlError, Interrupted, LaunchError, UsageError

    before, rest = split_rest(arguments)
    app = make_app()
    try:
        if signal.getsignal(signal.SIGINT) is leave:
            signal.signal(signal.SIGINT, _interrupt)
        result = app(before, standalone_mode=False, prog_name="dtctl", obj=rest)
    except Interrupted as exc:
        output.error(exc)
        return 128 + exc.signal
    except DtctlError as exc:
        output.error(exc)
        return _exit_code(exc)
    except (KeyboardInterrupt, typer.Abort):
        output.err(_INTERRUPTED.get(before[0] if before else "", "stopped"))
        return 130
    except Exception as exc:
        # A usage error of the command line library, whichever version of it typer brings along.
        show, code = getattr(exc, "show", None), getattr(exc, "exit_code", None)
        if callable(show) and isinstance(code, int):
            show(file=sys.stderr)
            if before[:1] == ["launch"] and rest is None and len(before) > 1:
                words = " ".join(before[1:])
                output.hint(f"what is meant for the script follows two dashes: `dtctl launch -- {words}`")
            return code
        if isinstance(exc, OSError) and exc.errno == errno.ENAMETOOLONG:  # an argument; the spec's paths are checked
            name = os.fsdecode(exc.filename or "")
            output.error(UsageError(f"a path of {len(name):,} characters is too long", where=f"{name[:60]}..."))
            return UsageError.exit_code
        import traceback

        traceback.print_exc()
        output.error(DtctlError(f"{type(exc).__name__}: {exc}", hint="this is a bug in dtctl; please report it"))
        return DtctlError.exit_code
    if result in (0, None) and output.is_cut() and before[:1] != ["launch"]:
        return LaunchError.exit_code  # a job is worth more than what was to be shown of it; all else is only shown
    if result == 130 and signal.getsignal(signal.SIGINT) is leave:
        # The command line library has made an exit code of Ctrl-C, without a word.
        output.err(_INTERRUPTED.get(before[0] if before else "", "stopped"))
    return result if isinstance(result, int) else 0


def _exit_code(exc: DtctlError) -> int:
    from dtctl.errors import NodeFailures

    if isinstance(
        exc, NodeFailures
    ):  # of several nodes the most severe: an error of the plan before one of a single node
        return min(failure.exit_code for failure in exc.failures.values())
    return exc.exit_code


if __name__ == "__main__":
    main()
