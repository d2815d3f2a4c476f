"""Lines of a worker for the reader of its log: the one place in the runtime that writes to stdout and stderr."""

from __future__ import annotations

import sys

from dtctl.errors import DtctlError


def say(text: str) -> None:
    """Write one line to stdout at once, so that the launcher shows it while the next step runs."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(error: DtctlError) -> None:
    """Write an error to stderr as the command line of dtctl does: the fact, the place, what to do next."""
    lines = [f"error: {error.message}"]
    if error.where:
        lines.append(f"where: {error.where}")
    if error.hint:
        lines.append(f"hint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
