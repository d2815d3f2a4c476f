"""DataLoaders of torch as data of the Trainer: the same samples for any number of workers, exact after a kill."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from dtctl.errors import PlanError, WorkerFailed
from dtctl.runtime import Outcome, Trainer, Worker, load
from dtctl.runtime.data_loading.loaders import SamplerOrder
from dtctl.runtime.randomness import seed_all
from dtctl.runtime.snapshot.format import layout
from tests.facts import raises
from tests.unit.runtime.conftest import Make, points
from tests.unit.runtime.snapshot.gang import gang
from tests.verdicts import read_verdict

pytestmark = pytest.mark.torch

COUNT = 48


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings write their metrics into the working folder."""
    monkeypatch.chdir(tmp_path)


SETTINGS: dict[str, Any] = {"epochs": 2, "steps": None, "log_every": 1, "snapshot": {"every_steps": 4, "keep": 9}}


class Texts(Dataset[torch.Tensor]):
    """Rows of unequal length; each draws noise from every generator that people use."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(3)
        self.lengths = [2 + index % 5 for index in range(COUNT)]
        self.rows = [torch.randn(length, 8, generator=source) for length in self.lengths]
        self.own = np.random.default_rng(4)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(self.own.random())
        return self.rows[index] + noise


def pad(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a batch two tensors: rows of equal length, and how long each was."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


class Bucketed(Sampler[list[int]]):
    """Batches of samples of similar length, in random order: a batch sampler as people write it."""

    def __init__(self, lengths: list[int], size: int) -> None:
        self.lengths, self.size = lengths, size

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.lengths)), key=lambda index: (self.lengths[index], random.random()))
        batches = [order[first : first + self.size] for first in range(0, len(order), self.size)]
        return iter(np.random.permutation(np.array(batches)).tolist())

    def __len__(self) -> int:
        return (len(self.lengths) + self.size - 1) // self.size


class Positioned(IterableDataset[torch.Tensor]):
    """A stream that tells its position; a pass begins there once it was set, as in Hugging Face's data sets."""

    def __init__(self) -> None:
        self.texts, self.at, self.first = Texts(), 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.first = self.first, 0
        while self.at < COUNT:
            self.at += 1
            yield self.texts[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at % COUNT}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]


class Stream(IterableDataset[torch.Tensor]):
    """A stream with a shuffle buffer, divided among the processes that read it."""

    def __init__(self) -> None:
        self.texts = Texts()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        information = get_worker_info()
        every, first = (information.num_workers, information.id) if information else (1, 0)
        buffer: list[torch.Tensor] = []
        for index in range(first, COUNT, every):
            buffer.append(self.texts[index] + self.epoch)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5))
        yield from buffer


def loss(model: nn.Module, batch: Any) -> Any:
    rows, lengths = batch
    told = model(rows.flatten(0, 1)).reshape(rows.shape[:2])
    inside = torch.arange(rows.shape[1]) < lengths[:, None]
    return ((told - 1).square() * inside).sum(), inside.sum()


KINDS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Texts(), batch_size=6, shuffle=True, collate_fn=pad),
    "in order": lambda: DataLoader(Texts(), batch_size=6, collate_fn=pad),
    "weighted": lambda: DataLoader(
        Texts(), batch_size=6, collate_fn=pad,
        sampler=WeightedRandomSampler([1.0 + index for index in range(COUNT)], COUNT),
    ),
    "own generator": lambda: DataLoader(
        Texts(), batch_size=6, collate_fn=pad,
        sampler=RandomSampler(range(COUNT), replacement=True, generator=torch.Generator().manual_seed(1)),
    ),
    "bucketed": lambda: DataLoader(Texts(), batch_sampler=Bucketed(Texts().lengths, 6), collate_fn=pad),
    "batch sampler": lambda: DataLoader(
        Texts(), batch_sampler=BatchSampler(range(COUNT), 6, drop_last=False), collate_fn=pad
    ),
    "stream with a position": lambda: DataLoader(Positioned(), batch_size=6, collate_fn=pad),
    "stream": lambda: DataLoader(Stream(), batch_size=6, collate_fn=pad),
    "processes": lambda: DataLoader(Stream(), batch_size=6, collate_fn=pad, num_workers=2),
    "plain processes": lambda: DataLoader(Texts(), batch_size=6, shuffle=True, collate_fn=pad, num_workers=2),
}  # fmt: skip


def settings_of(kind: str) -> dict[str, Any]:
    is_stream = "stream" in kind or kind == "processes"
    return {**SETTINGS, "micro_batch": None, **({"epochs": None, "steps": 16} if is_stream else {})}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double().float()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_ends_with_the_bits_of_a_calm_one(
    make: Make, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> Trainer:
        trainer = make(settings_of(kind), model=network(), loss=loss, samples=KINDS[kind]())
        assert trainer.run() is Outcome.FINISHED
        return trainer

    calm = train()
    assert calm.step == 16, "two epochs of 8 batches"
    printed = capsys.readouterr().out
    assert "data: " in printed
    for step, path in layout.list_step_folders(Path("snapshots")):
        if step > 12:
            shutil.rmtree(path)
    killed = train()
    assert read_verdict(capsys.readouterr().out) == "exact"
    assert all(torch.equal(one, other) for one, other in zip(weights(calm), weights(killed), strict=True))


def train_as(worker: Worker, kind: str, folder: str) -> list[float]:
    """Train on some workers with the same global batch, and return the weights."""
    own = settings_of(kind) | {"steps": 8, "epochs": None, "strategy": "ddp" if worker.world_size > 1 else "single"}
    own |= {"snapshot": {"dir": folder}}
    if kind in ("bucketed",):
        own["accumulate"] = 2 // worker.world_size
    else:
        own |= {"micro_batch": 6 // worker.world_size}
    config = load(own, argv=[], environ={})
    seed_all(0)
    trainer = Trainer(config, worker, network().double(), partial(loss_in_double), KINDS[kind]())
    trainer.run()
    return [value for parameter in weights(trainer) for value in parameter.flatten().tolist()]


def loss_in_double(model: nn.Module, batch: Any) -> Any:
    return loss(model, (batch[0].double(), batch[1]))


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "bucketed", "stream"])
def test_two_workers_see_the_batches_of_one(kind: str, tmp_path: Path) -> None:
    alone = gang(1, tmp_path, lambda worker: train_as(worker, kind, str(tmp_path / "one")))[0]
    both = gang(2, tmp_path, lambda worker: train_as(worker, kind, str(tmp_path / "two")))[0]
    assert np.abs(np.array(alone) - np.array(both)).max() < 1e-12


def test_a_weighted_sampler_is_obeyed(make: Make) -> None:
    """Samples of weight zero are never seen."""
    seen: list[int] = []

    def noting(model: nn.Module, batch: Any) -> torch.Tensor:
        (index,) = batch
        seen.extend(index.tolist())
        return model(index[:, None].float().expand(-1, 8)).square().mean()

    loader = DataLoader(
        TensorDataset(torch.arange(COUNT)), batch_size=6,
        sampler=WeightedRandomSampler([float(index % 2) for index in range(COUNT)], COUNT),
    )  # fmt: skip
    make(settings_of("weighted"), model=network(), loss=noting, samples=loader).run()
    assert seen, "the loss function saw batches"
    assert all(index % 2 for index in seen)


def test_epochs_differ_and_a_sampler_is_told_of_them() -> None:
    class Told(Sampler[int]):
        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch, *torch.randperm(5).tolist()])

    order = SamplerOrder(Told(), 0)
    epochs = [order.list_epoch(epoch) for epoch in range(3)]
    assert [epoch[0] for epoch in epochs] == [0, 1, 2]
    assert len({tuple(epoch[1:]) for epoch in epochs}) == 3
    assert order.list_epoch(0) == epochs[0], "an earlier epoch is the same when it is drawn again"


def test_drawing_an_order_leaves_the_generators_alone() -> None:
    own = torch.Generator().manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), own.get_state()
    order = SamplerOrder(RandomSampler(range(9), replacement=True, generator=own), 0)
    order.list_epoch(3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert torch.equal(before[2], own.get_state())


def test_a_sampler_that_is_shorter_in_a_later_epoch_is_refused() -> None:
    class Shrinking(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(10 - self.epoch))

    with raises(WorkerFailed, "Shrinking 8 2 10"):
        SamplerOrder(Shrinking(), 0).list_epoch(2)


def test_a_sampler_that_counts_is_named(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    class Counting(Sampler[int]):
        calls = 0

        def __len__(self) -> int:
            return COUNT

        def __iter__(self) -> Iterator[int]:
            self.calls += 1
            return iter(np.random.default_rng(self.calls).permutation(COUNT).tolist())

    def train() -> None:
        loader = DataLoader(Texts(), batch_size=6, collate_fn=pad, sampler=Counting())
        make(settings_of("weighted"), model=network(), loss=loss, samples=loader).run()

    train()
    shutil.rmtree(layout.build_snapshot_path(Path("snapshots"), 16))
    capsys.readouterr()
    train()
    assert "Counting yields another order at each call" in capsys.readouterr().out


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_stands_for_the_order_of_all(make: Make, shuffle: bool) -> None:
    data = points(COUNT)
    pairs = TensorDataset(*data.tensors)
    sampler: Any = DistributedSampler(pairs, num_replicas=2, rank=1, shuffle=shuffle)
    trainer = make({**SETTINGS, "epochs": 1, "micro_batch": 6}, samples=DataLoader(pairs, 6, sampler=sampler))
    trainer.run()
    assert trainer.step == COUNT // 6, "all samples, and not this rank's half"


def test_workers_whose_data_differ_are_refused(tmp_path: Path) -> None:
    class Own(IterableDataset[torch.Tensor]):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(self.rank, 99, 2).float()[:, None].expand(-1, 8))

    def train(worker: Worker, samples: Any) -> str:
        config = load({"steps": 2, "snapshot": {"dir": str(tmp_path / "s")}}, argv=[], environ={})
        try:
            Trainer(config, worker, network(), lambda model, batch: model(batch).mean(), samples(worker.rank))
        except PlanError as exc:
            return exc.message
        return ""

    def sampled(rank: int) -> Any:
        return DataLoader(TensorDataset(*points(16).tensors), 2, sampler=list(range(rank, 16, 2)))

    for samples in (Own, sampled):
        assert (
            gang(2, tmp_path, partial(train, samples=samples))
            == ["the workers get different samples from the same positions of the data"] * 2
        )


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        (lambda: DataLoader(Texts(), 4, worker_init_fn=print), {}, "worker_init_fn"),
        (
            lambda: DataLoader(Texts(), batch_sampler=Bucketed([1] * 8, 2)),
            {"micro_batch": 4},
            "micro_batch 4 DataLoader",
        ),
        (Stream, {"data_workers": 2}, "data_workers 2 IterableDataset"),
        (lambda: iter(range(9)), {}, "range_iterator position"),
        (lambda: None, {}, "NoneType position"),
    ],
)  # fmt: skip
def test_what_has_no_position_is_refused(make: Make, samples: Any, settings: dict[str, Any], message: str) -> None:
    with raises(PlanError, message):
        make({"micro_batch": None, **settings}, samples=samples())


def test_settings_of_the_spec_take_precedence(make: Make) -> None:
    trainer = make({"micro_batch": 3, "steps": 2}, samples=DataLoader(TensorDataset(*points().tensors), 10))
    assert trainer.training.position.batch.micro == 3
    trainer = make({"micro_batch": None, "steps": 2}, samples=DataLoader(TensorDataset(*points().tensors), 10))
    assert trainer.training.position.batch.micro == 10


def test_an_evaluation_uses_the_function_that_makes_batches(make: Make) -> None:
    def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        _, lengths = batch
        return {"length": lengths.float()}

    validation = DataLoader(Texts(), batch_size=7, collate_fn=pad, shuffle=True)
    trainer = make(
        settings_of("shuffled"), model=network(), loss=loss, samples=KINDS["shuffled"](), validation=validation,
        score=score,
    )  # fmt: skip
    trainer.run()
    assert trainer.evaluate()["val_length"] == pytest.approx(sum(Texts().lengths) / COUNT)
    with raises(PlanError, "evaluation index DataLoader"):
        make(validation=DataLoader(Stream(), 4), score=score)
