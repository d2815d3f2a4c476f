"""Output of the commands that write or submit a job which no launcher follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.spec.model import Spec


def tell_unmeasured(spec: Spec) -> None:
    """Print a note if the spec requests metrics, since only a launcher collects them."""
    if spec.metrics is not None:
        output.print_stderr(
            "note: metrics and alerts (metrics) are sent while a launcher runs, and no launcher follows this job",
            "yellow",
        )
