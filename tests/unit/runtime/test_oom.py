"""Memory that runs out: the step is done again in smaller passes, over the same samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.oom import smaller
from dtctl.train.batch import Batch
from tests.unit.runtime.conftest import Make, squared


def limited(samples: int, seen: list[list[float]] | None = None) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A loss that has memory for so many samples."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = squared(model, batch)
        if len(batch[0]) > samples:
            raise torch.OutOfMemoryError("injected")
        if seen is not None:
            seen.append(batch[0][:, 0].tolist())
        return value

    return loss


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


@pytest.mark.parametrize(("micro", "parts"), [(8, [4, 2, 1]), (12, [6, 3, 1]), (15, [5, 1]), (7, [1])])
def test_micro_batches_are_cut_down_to_one(micro: int, parts: list[int]) -> None:
    sizes = Batch(micro=micro, accumulate=2, world_size=3)
    for part in parts:
        sizes = smaller(sizes)
        assert (sizes.micro, sizes.total) == (part, micro * 6)
    with pytest.raises(PlanError, match="micro batch of one"):
        smaller(sizes)


def test_the_step_is_repeated_over_the_same_samples(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    ends, orders, start = [], [], network().state_dict()
    for folder, settings, limit in (("a", {"micro_batch": 8}, 3), ("b", {"micro_batch": 2, "accumulate": 4}, 99)):
        seen: list[list[float]] = []
        trainer = make({**settings, "snapshot": {"dir": folder}}, model=network(), loss=limited(limit, seen))
        trainer.model.load_state_dict(start)
        trainer.run()
        ends.append(trainer.model.state_dict())
        orders.append(seen)
    assert orders[0] == orders[1]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    out = capsys.readouterr().out
    assert "out of memory on rank 0 in step 1: again with global batch 8 = 4 x 1 x 2" in out
    assert "out of memory on rank 0 in step 1: again with global batch 8 = 2 x 1 x 4" in out


def test_a_resumed_training_keeps_what_was_learnt(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make({"micro_batch": 8, "steps": 4}, loss=limited(4)).run()
    capsys.readouterr()
    trainer = make({"micro_batch": 8, "steps": 8}, loss=limited(4))
    trainer.run()
    assert (trainer.batch.micro, trainer.batch.accumulate) == (4, 2)
    assert "out of memory" not in capsys.readouterr().out
    other = make({"micro_batch": 6, "steps": 9}, loss=limited(9))
    other.run()
    assert (other.batch.micro, other.batch.accumulate) == (6, 1)


def test_stop_is_stop(make: Make) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        make({"on_oom": "stop"}, loss=limited(1)).run()
    with pytest.raises(PlanError, match="micro batch of one sample"):
        make(model=network(), loss=limited(0)).run()
