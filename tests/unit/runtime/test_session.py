"""A loop of one's own in a session: what was interrupted at any place ends with the bits of one left alone."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

import dtctl.runtime
from dtctl import names
from dtctl.errors import SnapshotError
from dtctl.runtime import Worker, session
from dtctl.runtime.own_loop.position import DataPosition
from dtctl.runtime.own_loop.session import Session
from dtctl.runtime.randomness import seed_all
from dtctl.runtime.snapshot import newest
from tests.verdicts import read_verdict

EPOCHS = 3
BATCHES = 6


class Crash(Exception):
    """Stands for a kill: the process goes on, and nothing of its training is kept."""


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that draw random numbers each time they are read, of every kind."""

    def __init__(self, count: int = 8 * BATCHES) -> None:
        self.inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
        self.read = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return self.inputs[index] + 0.1 * noise, self.inputs[index].sum()[None]


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same, in one order."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        noisy = Noisy()
        yield from (noisy[index] for index in range(len(noisy)))


class OwnOrder:
    """A sampler of the program's own, with a generator of its own."""

    def __init__(self, data: Noisy) -> None:
        self.data, self.source = data, np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.source.permutation(len(self.data)).tolist())

    def __len__(self) -> int:
        return len(self.data)


class WithState:
    """A loader that knows its position, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.data, self.at = Noisy(), 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < BATCHES:
            self.at += 1
            rows = [self.data[index] for index in range(8 * self.at - 8, 8 * self.at)]
            yield torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Positioned(Stream):
    """A stream that tells its position; a pass begins there once it was set, as in Hugging Face's data sets."""

    def __init__(self) -> None:
        self.data, self.at, self.first = Noisy(), 0, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.at, self.first = self.first, 0
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at % len(self.data)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]


class Endless(Positioned):
    """A stream whose next pass begins where the last one has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.data = Noisy(8 * BATCHES * EPOCHS)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            self.at += 1
            yield self.data[self.at - 1]
            if self.at % (8 * BATCHES) == 0:
                return

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Around(Stream):
    """A stream that transforms another one."""

    def __init__(self) -> None:
        self.inner = Positioned()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from ((inputs * 2, target) for inputs, target in self.inner)


class Batches:
    """A loader of the program's own, which does not tell its position."""

    def __init__(self) -> None:
        self.dataset = Endless()

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.dataset, 8))


class Jitter:
    """A collate function that draws from a generator of its own."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(3)

    def __call__(self, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        jitter = torch.from_numpy(self.source.standard_normal((len(rows), 4))).float()
        return torch.stack([row[0] for row in rows]) + 0.1 * jitter, torch.stack([row[1] for row in rows])


def list_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(DataLoader(Noisy(), 8))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Noisy(), 8),
    "shuffled": lambda: DataLoader(Noisy(), 8, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(Noisy(), 8, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "drawn": lambda: DataLoader(Noisy(), 8, sampler=WeightedRandomSampler([1.0] * 48, 48)),
    "own sampler": lambda: DataLoader(data := Noisy(), 8, sampler=OwnOrder(data)),
    "processes": lambda: DataLoader(Noisy(), 8, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(), 8),
    "stream with a position": lambda: DataLoader(Positioned(), 8),
    "stream that goes on": lambda: DataLoader(Endless(), 8),
    "stream around a stream": lambda: DataLoader(Around(), 8),
    "stream with a position in processes": lambda: DataLoader(Positioned(), 8, num_workers=1),
    "stream and jitter": lambda: DataLoader(Stream(), 8, collate_fn=Jitter()),
    "jitter": lambda: DataLoader(Noisy(), 8, shuffle=True, collate_fn=Jitter()),
    "own loader of a stream": Batches,
    "list": list_batches,
    "with state": WithState,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (names.SNAPSHOT_DIR, names.METRICS, names.TRAIN_CONFIG, names.RUN_DIR, names.WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["train.py"])
    return tmp_path


def train(
    make_loader: Callable[[], Any],
    *,
    where: str = "snapshots",
    crash_at: int | None = None,
    accumulate: int = 1,
    epochs: int = EPOCHS,
    act: Callable[[Session, int], None] = lambda *_: None,
    **more: Any,
) -> tuple[list[torch.Tensor], int]:
    """Train from the newest snapshot; returns the parameters and the steps done."""
    os.environ[names.SNAPSHOT_DIR] = where
    seed_all(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    settings = {"every_steps": 4, "clip": 0.5, "schedule": schedule, "accumulate": accumulate, **more}
    with session(model, optimizer, make_loader(), **settings) as s:
        for _ in s.epochs(epochs):
            torch.randn(3)  # the loop draws, too
            for inputs, targets in s.batches:
                loss = nn.functional.mse_loss(model(inputs), targets)
                s.step(loss)
                if s.steps_done == crash_at:
                    raise Crash
                act(s, s.steps_done)
            model.eval()
            list(DataLoader(Noisy(9), 3))
            model.train()
    return [parameter.detach().clone() for parameter in model.parameters()], s.steps_done


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("crash_at", [6, 13])
def test_an_interrupted_loop_ends_with_the_bits_of_one_left_alone(
    kind: str, crash_at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    calm, steps = train(LOADERS[kind], where="calm")
    assert steps == EPOCHS * BATCHES
    with pytest.raises(Crash):
        train(LOADERS[kind], crash_at=crash_at)
    capfd.readouterr()
    again, steps = train(LOADERS[kind])
    assert steps == EPOCHS * BATCHES
    output = capfd.readouterr().out
    verdict = read_verdict(output)
    assert verdict == "exact", output
    assert all(map(torch.equal, calm, again))


class Plain(Noisy):
    """Samples that draw nothing."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        return self.inputs[index], self.inputs[index].sum()[None]


@pytest.mark.parametrize("crash_at", [10, 13])
@pytest.mark.parametrize("stay", [True, False])
def test_samples_of_processes_that_draw_nothing_are_repeated(
    stay: bool, crash_at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def make() -> Any:
        return DataLoader(Plain(), 8, shuffle=True, num_workers=1, persistent_workers=stay)

    calm, _ = train(make, where="calm", skip="sampler")
    with pytest.raises(Crash):
        train(make, crash_at=crash_at, skip="sampler")
    again, _ = train(make, skip="sampler")
    assert all(map(torch.equal, calm, again))
    assert ("batches are read again" in capfd.readouterr().out) is stay


@pytest.mark.parametrize(("skip", "read"), [("auto", 8 * 4), ("read", 8 * BATCHES)])
def test_batches_that_were_taken_are_not_read_again(skip: str, read: int) -> None:
    with pytest.raises(Crash):
        train(LOADERS["shuffled"], crash_at=10)
    data = Noisy()
    counts = []
    train(lambda: DataLoader(data, 8, shuffle=True), epochs=2, skip=skip, act=lambda *_: counts.append(data.read))
    assert len(counts) == 4
    assert counts[-1] == read


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_gradients_are_those_of_the_larger_batch(accumulate: int) -> None:
    """Also those of the last, incomplete step of an epoch."""

    def measure(size: int, accumulate: int) -> tuple[list[torch.Tensor], int]:
        seed_all(3)
        os.environ[names.SNAPSHOT_DIR] = f"accumulated-{accumulate}"
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with session(model, optimizer, DataLoader(Plain(), size), accumulate=accumulate, every_steps=1) as s:
            for _ in s.epochs(2):
                for inputs, targets in s.batches:
                    s.step(nn.functional.mse_loss(model(inputs), targets))
        return list(model.parameters()), s.steps_done

    ours, steps = measure(8, accumulate)
    expected, alike = measure(8 * accumulate, 1)
    assert steps == alike == 2 * -(-BATCHES // accumulate)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_an_interrupted_accumulation_is_repeated(accumulate: int) -> None:
    calm, _ = train(LOADERS["shuffled"], where="calm", accumulate=accumulate, every_steps=2)
    with pytest.raises(Crash):
        train(LOADERS["shuffled"], crash_at=5, accumulate=accumulate, every_steps=2)
    again, _ = train(LOADERS["shuffled"], accumulate=accumulate, every_steps=2)
    assert all(map(torch.equal, calm, again))


def test_a_scaler_is_used_and_kept() -> None:
    def run(crash_at: int | None, where: str) -> tuple[list[torch.Tensor], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
        parameters, _ = train(LOADERS["shuffled"], where=where, crash_at=crash_at, scaler=scaler)
        return parameters, scaler.get_scale()

    calm, scale = run(None, "calm")
    assert scale == 8 * 2.0**3
    with pytest.raises(Crash):
        run(7, "snapshots")
    again, alike = run(None, "snapshots")
    assert alike == scale
    assert all(map(torch.equal, calm, again))


def test_a_loop_may_make_its_steps_itself() -> None:
    """A GAN: two models, two optimizers, and a loop that counts steps."""

    def run(where: str, crash_at: int | None = None) -> list[torch.Tensor]:
        os.environ[names.SNAPSHOT_DIR] = where
        seed_all(2)
        maker, critic = nn.Linear(3, 2), nn.Linear(2, 1)
        steps = torch.optim.Adam(maker.parameters(), 1e-2)
        other = torch.optim.Adam(critic.parameters(), 1e-2)
        extra = {"critic": critic, "critic's optimizer": other}
        with session(maker, steps, extra_state=extra, every_steps=4) as s:
            while s.steps_done < 14:
                real, made = torch.randn(8, 2) + 1, maker(torch.randn(8, 3))
                other.zero_grad()
                (critic(made.detach()).mean() - critic(real).mean()).backward()
                other.step()
                steps.zero_grad()
                loss = -critic(made).mean()
                loss.backward()
                steps.step()
                s.end_step(loss)
                if s.steps_done == crash_at:
                    raise Crash
        return [*maker.parameters(), *critic.parameters()]

    calm = run("calm")
    with pytest.raises(Crash):
        run("snapshots", crash_at=11)
    assert all(map(torch.equal, calm, run("snapshots")))


def test_a_loop_without_a_session_has_the_same_bits() -> None:
    calm, _ = train(LOADERS["shuffled"], where="calm")
    seed_all(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    loader = LOADERS["shuffled"]()
    for _ in range(EPOCHS):
        torch.randn(3)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        list(DataLoader(Noisy(9), 3))
    assert all(map(torch.equal, calm, model.parameters()))


# -- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_loop_with_a_snapshot_and_a_record(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    calm, _ = train(LOADERS["shuffled"], where="calm")
    with pytest.raises(SystemExit) as ended:
        train(LOADERS["shuffled"], act=lambda _, step: os.kill(os.getpid(), number) if step == 3 else None)
    assert ended.value.code == names.REQUEUE_EXIT
    stopped = int(capfd.readouterr().out.split("stopped after step ")[1].split(" of 18")[0])
    found = newest("snapshots")
    assert found is not None
    assert found.step == stopped
    again, _ = train(LOADERS["shuffled"])
    assert f"exact: steps {stopped + 1} to {stopped + 2} repeated" in capfd.readouterr().out
    assert all(map(torch.equal, calm, again))


@pytest.mark.parametrize("step", [1, BATCHES, EPOCHS * BATCHES])
def test_a_signal_in_the_first_step_and_in_the_last_one_of_an_epoch(step: int) -> None:
    calm, _ = train(LOADERS["shuffled"], where="calm")

    def run() -> list[torch.Tensor]:
        return train(
            LOADERS["shuffled"], act=lambda _, done: os.kill(os.getpid(), signal.SIGTERM) if done == step else None
        )[0]

    if step < EPOCHS * BATCHES:
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == names.REQUEUE_EXIT
        again, _ = train(LOADERS["shuffled"])
    else:  # nothing is left to do
        again = run()
    assert all(map(torch.equal, calm, again))


def test_leaving_an_epoch_early_goes_on_with_the_next(capfd: pytest.CaptureFixture[str]) -> None:
    def run(where: str, crash_at: int | None = None) -> tuple[list[torch.Tensor], list[int]]:
        os.environ[names.SNAPSHOT_DIR] = where
        seed_all(3)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        with session(model, optimizer, DataLoader(Noisy(), 8, shuffle=True), every_steps=3) as s:
            for epoch in s.epochs(4):
                for inputs, targets in s.batches:
                    s.step(nn.functional.mse_loss(model(inputs), targets))
                    seen.append(epoch)
                    if s.steps_done == crash_at:
                        raise Crash
                    if s.batch == 4:
                        break
        return list(model.parameters()), seen

    calm, seen = run("calm")
    assert seen == [epoch for epoch in range(4) for _ in range(4)]
    with pytest.raises(Crash):
        run("snapshots", crash_at=10)
    again, seen = run("snapshots")
    assert seen == [2, 2, 2, *[3] * 4]
    assert all(map(torch.equal, calm, again))


def test_a_loop_that_has_left_its_epochs_has_ended(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        model = nn.Linear(4, 1)
        with session(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(Noisy(), 8)) as s:
            for _ in s.epochs(4):
                for inputs, targets in s.batches:
                    s.step(nn.functional.mse_loss(model(inputs), targets))
                break
        return s.steps_done

    assert run() == run() == BATCHES
    assert "nothing is left to do: the loop has left its epochs early" in capfd.readouterr().out


def test_more_epochs_go_on_from_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    calm, _ = train(LOADERS["shuffled"], where="calm", epochs=5)
    train(LOADERS["shuffled"], epochs=3)
    again, steps = train(LOADERS["shuffled"], epochs=5)
    assert steps == 5 * BATCHES
    assert all(map(torch.equal, calm, again))
    assert "not confirmed" not in capfd.readouterr().out


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_loop_is_the_programs_and_saves_nothing() -> None:
    with pytest.raises(Crash):
        train(LOADERS["in order"], crash_at=6)
    found = newest("snapshots")
    assert found is not None
    assert found.step == 4
    assert not list(Path("snapshots").glob(".lease-*"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def fail(capfd: pytest.CaptureFixture[str], run: Callable[[], Any], code: int) -> str:
    """What it writes to stderr."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == code
    text = capfd.readouterr().err
    assert text.startswith("error: ")
    assert "\nwhere: " in text
    assert "\nhint: " in text
    return text


def small(width: int = 1, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **more: Any) -> Session:
    model = nn.Linear(4, width)
    return session(model, optimizer(model.parameters(), lr=0.1), **more)


def test_another_model_or_optimizer_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with small() as s:
        s.end_step()
    assert "another model" in fail(capfd, lambda: small(2).__enter__(), 10)
    text = fail(capfd, lambda: small(optimizer=torch.optim.Adam).__enter__(), 10)
    assert "optimizer of the snapshot is torch.optim.sgd.SGD" in text
    assert "step-00000001" in text


def test_a_shorter_loader_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Crash):
        train(LOADERS["in order"], crash_at=6)
    text = fail(capfd, lambda: train(lambda: DataLoader(Noisy(16), 8)), 10)
    assert "made after batch 4 of an epoch, and the loader has 2 now" in text


def test_a_step_without_a_batch_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        with small(loader=DataLoader(Noisy(), 8)) as s:
            s.end_step()

    assert "without a batch of `s.batches`" in fail(capfd, run, 4)


def test_epochs_need_a_loader(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        with small() as s:
            list(s.epochs(2))

    assert "epochs() needs the loader" in fail(capfd, run, 4)


def test_a_loss_that_is_not_finite_is_in_no_snapshot(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        with small(every_steps=1) as s:
            s.end_step(torch.tensor(1.0))
            s.end_step(torch.tensor(float("nan")))

    assert "the loss of step 2 is not finite on rank 0" in fail(capfd, run, 8)
    found = newest("snapshots")
    assert found is not None
    assert found.step == 1


def test_objects_without_a_state_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    text = fail(capfd, lambda: small(extra_state={"words": {}}).__enter__(), 4)
    assert "extra_state.words is a dict" in text
    assert "where: dtctl.runtime.session" in text


def test_snapshots_of_a_trainer_are_refused_and_the_other_way_round(
    capfd: pytest.CaptureFixture[str], make: Any
) -> None:
    make({"steps": 4}).run()
    text = fail(capfd, lambda: small().__enter__(), 10)
    assert "was made by a Trainer, and a session cannot continue" in text


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_the_spec_take_precedence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"snapshot": {"every_steps": 5, "dir": "of-spec"}, "log_every": 3, "strategy": "fsdp"}
    monkeypatch.setenv(names.TRAIN_CONFIG, json.dumps(given))
    train(LOADERS["in order"], every_steps=2)
    output = capfd.readouterr().out
    assert "snapshots every 5 steps in of-spec; a lost worker restarts all: a session has no live recovery" in output
    assert "a session does not follow train.strategy" in output
    found = newest("of-spec")
    assert found is not None
    assert found.step == EPOCHS * BATCHES
    rows = [json.loads(line) for line in Path(names.METRICS_FILE).read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18]
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 and row["samples_per_s"] > 0 for row in rows)


def test_it_stays_a_function_once_its_module_was_imported() -> None:
    assert callable(dtctl.runtime.session)
    assert "session" in dtctl.runtime.__all__


def seek(workers: int, now: int, batch: int, *, dealt: bool = True) -> int:
    """Batches that each of `now` workers leaves out."""
    data = Noisy(8 * 12 * 6)
    cpu = torch.device("cpu")
    worker = Worker(
        rank=0, local_rank=0, world_size=now, local_world_size=now, node_rank=0, device=cpu, backend=None
    )  # fmt: skip
    sampler = DistributedSampler(data, num_replicas=now, rank=0) if dealt else None
    position = DataPosition(DataLoader(data, 8, sampler=sampler), worker, skip="auto")
    then = {"epoch": 1, "batch": batch, "batches": 72 // workers, "workers": workers, "batch_size": 8}
    position.seek(then, None)
    return position.batch


def test_other_numbers_of_workers_continue_where_samples_were_dealt_out_alike() -> None:
    assert seek(4, 2, 5) == 10
    assert seek(2, 3, 3) == 2
    assert seek(2, 3, 0, dealt=False) == 0
    assert seek(4, 3, 18) == 24, "all of an epoch"
    with pytest.raises(SnapshotError, match="2 workers had taken 5 batches; 3 workers cannot continue there"):
        seek(2, 3, 5)
    with pytest.raises(SnapshotError, match="cannot continue there"):
        seek(4, 2, 5, dealt=False)
