"""Output of a worker for readers of its log; no other module of the runtime writes to stdout and stderr."""

from __future__ import annotations

import sys

from dtctl.errors import DtctlError


def say(text: str) -> None:
    """Write one line to stdout at once, so that the launcher shows it while the next step runs."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_error_to_stderr(error: DtctlError) -> None:
    """Write an error to stderr in the form of dtctl's command line: fact, place, hint."""
    lines = [f"error: {error.message}"]
    if error.where:
        lines.append(f"where: {error.where}")
    if error.hint:
        lines.append(f"hint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
