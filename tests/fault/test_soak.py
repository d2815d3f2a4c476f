"""A small soak of the kind that `make soak` runs for an hour: see soak.py."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.fault.soak import Shape, soak

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all hosts see."""
    folder = Path(tempfile.mkdtemp(dir=Path.home(), prefix=".dtctl-soak-"))
    yield folder
    shutil.rmtree(folder)


def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_one_left_alone(
    sandbox: Sandbox, shared: Path
) -> None:
    shape = Shape(2, 2, "fsdp", 50)
    straight = soak(sandbox, shared / "run", shape, seed=None, kills=0)
    assert straight.code == 0, straight.said
    killed = soak(sandbox, shared / "run", shape, seed=3, kills=2)
    assert killed.code == 0, killed.said
    assert len(killed.killed) == 2
    assert killed.attempts > 1
    assert killed.digest == straight.digest, killed.killed
    assert (killed.left, killed.bad) == (0, [])
    assert killed.ledger["steps"] == shape.steps
    for ended in (straight, killed):
        phases = ended.ledger["phases_s"]
        assert isinstance(phases, dict)
        assert sum(phases.values()) == pytest.approx(ended.ledger["wall_s"], abs=0.02)
        assert sum(phases.values()) <= ended.wall_s, "the clock outside runs until the interpreter has ended"
        assert phases["useful"] > 0
        assert abs(sum(phases.values()) - ended.ledger["wall_s"]) < 0.01  # type: ignore[operator]
    # A kill right behind a snapshot, or before the first step, loses nothing.
    assert killed.ledger["phases_s"]["lost"] >= straight.ledger["phases_s"]["lost"] == 0  # type: ignore[index]
