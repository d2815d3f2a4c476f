"""What is said of a mesh when it is chosen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from dtctl.runtime import strategies
from dtctl.runtime.distributed.worker import Worker
from dtctl.train.batch import BatchSizes
from dtctl.train.config import load
from dtctl.train.mesh import Degrees


class Enough(Exception):
    pass


@pytest.mark.parametrize(("local", "tp", "said"), [(8, 16, True), (8, 8, False), (16, 16, False)])
def test_matrices_that_are_split_over_nodes_are_told_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    worker: Worker,
    local: int,
    tp: int,
    said: bool,
) -> None:
    def stop(*_: object) -> None:
        raise Enough

    monkeypatch.setattr(strategies, "build_device_mesh", stop)
    first = dataclasses.replace(worker, world_size=16, local_world_size=local, backend="gloo")
    batch = BatchSizes(micro=1, accumulate=1, world_size=16 // tp)
    with pytest.raises(Enough):
        strategies.build_strategy(
            load({}, argv=[], environ={}), first, Degrees(tp=tp, fsdp=16 // tp), batch, nn.Linear(1, 1),
            lambda _: torch.zeros(()),
        )  # fmt: skip
    assert (f"tp {tp} reaches over nodes of {local} workers" in capsys.readouterr().out) is said
