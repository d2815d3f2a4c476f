"""A few launches of the kind that `make soak` makes by the hundred: see last_second.py."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.fault.last_second import strike

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_a_launch_ends_whoever_is_killed_in_its_last_second(sandbox: Sandbox) -> None:
    folder = Path(tempfile.mkdtemp(dir=Path.home(), prefix=".dtctl-last-"))  # that all hosts see
    try:
        ended = strike(sandbox, folder / "run", range(10))
    finally:
        shutil.rmtree(folder)
    assert [(one.seed, one.struck) for one in ended if not one.is_fine] == []
