"""The last lines of a launch say why it failed, whatever is known of it."""

from __future__ import annotations

import pytest

from dtctl.cli.common.launcher import show_end
from dtctl.launch.control.controller import Result
from dtctl.launch.control.failure import Failure


@pytest.mark.parametrize("exit_code", [None, 181])
def test_a_failure_without_output_shows_its_summary(exit_code: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(
        node="node1", rank=None, exit_code=exit_code, signal=None, time=0.0, summary="do the nodes see it?"
    )
    show_end(
        Result(
            run="r", failure=failure, stopped_by=None, asked_to_stop=False, attempts=1, launch_s=None, duration_s=0.5,
            left_behind=0, nodes=1, goodput=None,
        )
    )  # fmt: skip
    assert "do the nodes see it?" in capsys.readouterr().err
