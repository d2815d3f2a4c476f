"""Memory that runs out: the step is done again in smaller passes, over the same samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import PlanError, WorkerFailed
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.guards import oom
from dtctl.runtime.guards.oom import OomGuard, reduce_micro_batch
from dtctl.train.batch import BatchSizes
from tests.facts import raises
from tests.unit.runtime.conftest import Make, points, squared


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
    sizes = BatchSizes(micro=micro, accumulate=2, world_size=3)
    for part in parts:
        sizes = reduce_micro_batch(sizes)
        assert (sizes.micro, sizes.total) == (part, micro * 6)
    with raises(PlanError, "micro batch"):
        reduce_micro_batch(sizes)


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
    assert (trainer.training.position.batch.micro, trainer.training.position.batch.accumulate) == (4, 2)
    assert "out of memory" not in capsys.readouterr().out
    other = make({"micro_batch": 6, "steps": 9}, loss=limited(9))
    other.run()
    assert (other.training.position.batch.micro, other.training.position.batch.accumulate) == (6, 1)


def test_stop_is_stop(make: Make) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        make({"on_oom": "stop"}, loss=limited(1)).run()
    with raises(PlanError, "batch sample"):
        make(model=network(), loss=limited(0)).run()


class Wrapped(nn.Module):
    """Stands for DistributedDataParallel, which has no SyncBatchNorm on CPUs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_model_that_exchanges_in_its_passes_is_not_begun_anew(
    monkeypatch: pytest.MonkeyPatch, worker: Worker
) -> None:
    monkeypatch.setattr(oom, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(Wrapped, "register_forward_pre_hook", lambda *_: None)
    one_of_two = dataclasses.replace(worker, world_size=2, backend="gloo")
    for norm, can in ((nn.BatchNorm1d(8), True), (nn.SyncBatchNorm(8), False)):
        model = nn.Sequential(nn.Linear(8, 8), norm)
        watch = OomGuard(Wrapped(model), list(model.parameters()), one_of_two, wanted=True)
        assert watch.can_recover is can

    def fails() -> torch.Tensor:
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(torch.OutOfMemoryError):
        watch.attempt(fails, lambda: pytest.fail("its peers wait in another layer"))


@pytest.mark.parametrize(
    ("error", "halves"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("NCCL error: unhandled cuda error; Failed to CUDA malloc, out of memory"), False),
    ],
)
def test_libraries_that_allocate_past_torch(make: Make, error: RuntimeError, halves: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) > 2:
            raise error
        return squared(model, batch)

    trainer = make({"micro_batch": 4, "steps": 2}, model=network(), loss=loss)
    if halves:
        trainer.run()
        assert trainer.training.position.batch.micro == 2
    else:
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            trainer.run()


def test_the_optimizer_s_state_that_does_not_fit(make: Make) -> None:
    trainer = make(model=network())

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer.optimizer.register_step_pre_hook(run_out)
    with raises(WorkerFailed, "optimizer 1 CUDA memory") as failed:
        trainer.run()
    assert "zero1" in str(failed.value.hint)


class FromGpu:
    """A parameter on a GPU, whose gradient nobody may look at."""

    device = torch.device("cuda", 0)

    @property
    def grad(self) -> torch.Tensor:
        pytest.fail("to look at it waits for the GPU")


def test_on_gpus_the_processes_ask_each_other(monkeypatch: pytest.MonkeyPatch, worker: Worker) -> None:
    one_of_three = dataclasses.replace(worker, rank=1, world_size=3, backend="cpu:gloo,cuda:nccl")
    monkeypatch.setattr(oom, "DistributedDataParallel", Wrapped)
    watch = OomGuard(Wrapped(network()), [FromGpu()], one_of_three, wanted=True)  # type: ignore[list-item]
    told: list[list[int]] = []

    def from_rank_2(_: Worker, flags: torch.Tensor) -> torch.Tensor:
        told.append(flags.tolist())
        return flags + torch.tensor([0, 0, 1])

    monkeypatch.setattr(Worker, "sum", from_rank_2)
    loss, short = watch.attempt(lambda: torch.zeros(()), lambda: None)
    assert (loss is not None, short, told) == (True, [2], [[0, 0, 0]])


def test_an_evaluation_that_does_not_fit(make: Make) -> None:
    def score(*_: Any) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with raises(WorkerFailed, "evaluation 12") as failed:
        make(model=network(), validation=points(), score=score).run()
    assert "micro_batch" in str(failed.value.hint)
