"""What a resume says is true: of programs that keep state wherever they like, and of runs that go on changed."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtctl import names
from dtctl.errors import PlanError, SnapshotError
from dtctl.runtime import TensorData, Trainer
from dtctl.runtime.snapshot import state
from dtctl.runtime.snapshot.format import layout
from tests.facts import raises
from tests.unit.runtime.conftest import Make, network, points, squared
from tests.verdicts import read_verdict

HALF, WHOLE = 6, 12


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Of everything that training has changed."""
    tree = {
        **trainer.model.state_dict(),
        **dict(state.iter_named_tensors(state.optimizer_tree(trainer.model, trainer.optimizer))),
    }
    return {name: bytes(state.view_tensor_bytes(value).numpy()) for name, value in tree.items()}


def halves(
    make: Make, capsys: pytest.CaptureFixture[str], parts: Callable[[], dict[str, Any]], **settings: Any
) -> tuple[bool, str]:
    """Train to the end, and once more from the middle with new objects; whether bits are equal, and what was said."""
    common = {
        "schedule": "constant", "lr": 0.05, "log_every": 4, "steps": WHOLE, **settings,
        "snapshot": {"every_steps": HALF, "keep": 9},
    }  # fmt: skip
    straight = make(common, **parts())
    straight.run()
    shutil.rmtree(layout.build_snapshot_path(Path("snapshots"), WHOLE))
    again = make(common, **parts())
    capsys.readouterr()
    again.run()
    assert again.step == WHOLE
    equal, text = bits(again) == bits(straight), read_verdict(capsys.readouterr().out)
    assert not (equal and text.startswith("not exact")), text
    assert not (not equal and text == "exact"), text
    return equal, text


def go_on(
    make: Make, capsys: pytest.CaptureFixture[str], before: Callable[[], dict[str, Any]], after: dict[str, Any]
) -> str:
    """What is said of a resume with something changed; with `require_exact` one that is not exact is refused."""
    settings = {"steps": WHOLE, "schedule": "constant", **after.pop("settings", {})}
    make({"steps": WHOLE, "schedule": "constant", "snapshot": {"every_steps": HALF}}, **before()).run()
    shutil.rmtree(layout.build_snapshot_path(Path("snapshots"), WHOLE))
    shutil.copytree("snapshots", "kept")
    capsys.readouterr()
    make(settings, **after).run()
    text = read_verdict(capsys.readouterr().out)
    if text.startswith("not exact"):
        shutil.rmtree("snapshots")
        shutil.move("kept", "snapshots")
        with raises(SnapshotError, f"step {HALF + 1} train.require_exact snapshots"):
            make({**settings, "require_exact": True}, **after).run()
    return text


# -- programs that keep state wherever they like --------------------------------------------------------------------


class ScheduleFree(torch.optim.Optimizer):
    """As Schedule-Free and Prodigy do it: what it counts is in its groups, as numbers and as a tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "d": torch.tensor(1e-2), "betas": (0.9, 0.99)})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            group["d"] = group["d"] * 1.1
            for p in group["params"]:
                held = self.state[p].setdefault("master", p.detach().double())
                held -= p.grad.double() * group["lr"] * group["d"] / (group["k"] + group["weight_sum"]) / self.calls
                p.copy_(held)


@dataclass(frozen=True)
class Shape:
    """A configuration that nobody can set."""

    width: int = 8
    scale: float = 1.0


class Counting(nn.Module):
    """State in attributes, in a buffer that is not persistent, in a queue, in a generator, and in the class."""

    total = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.line, self.shape = nn.Linear(8, 1), Shape()
        self.calls, self.last = 0, torch.zeros(1)
        self.queue: deque[torch.Tensor] = deque(maxlen=3)
        self.hidden: tuple[torch.Tensor, ...] | None = None
        self.seen: dict[str, Any] = {"first": torch.zeros(())}
        self.generator, self.noise = torch.Generator().manual_seed(3), np.random.default_rng(4)
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        self.queue.append(inputs.detach().sum())
        type(self).total += 0.5
        self.hidden = (inputs.mean().detach(), *(self.hidden or ())[:2])
        self.seen[str(self.calls % 5)] = [inputs.sum().detach(), self.calls]
        self.seen["first"] = self.seen["first"] + sum(
            value[0] * value[1] for key, value in self.seen.items() if key < "f"
        )
        self.total_of = (self.hidden[0] + self.hidden[-1]) * 0.1 + self.seen["first"] * 1e-3
        found = self.total_of + self.line(inputs - self.mean) * (1 + 0.01 * self.calls) + self.last + self.total
        self.last = found.detach().mean().reshape(1)
        draw = (
            torch.rand(1, generator=self.generator) + float(self.noise.random()) + torch.stack(list(self.queue)).sum()
        )
        return found * draw


def counting() -> dict[str, Any]:
    Counting.total = 0.0
    return {"model": Counting()}


def critic(*, counts: bool) -> dict[str, Any]:
    """A loss with a network and an optimizer of its own, and a generator; a counter and a mean if it `counts`."""
    torch.manual_seed(5)
    judge, calls, numbers = nn.Linear(1, 1), 0, random.Random(2)
    own = torch.optim.Adam(judge.parameters(), lr=0.01)
    momentum = {"mean": torch.zeros(())}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = model(batch[0])
        own.zero_grad()
        (judge(found.detach()) - batch[1]).square().mean().backward()
        own.step()
        momentum["mean"] = 0.9 * momentum["mean"] + 0.1 * found.detach().mean()
        scale = 1.0 + 0.1 * (calls % 5) * counts + numbers.random() + float(np.random.rand()) + random.random()
        return (judge(found) * scale).square().mean() + squared(model, batch) + counts * momentum["mean"]

    return {"loss": loss, "model": nn.Linear(8, 1)}


class Noisy:
    """Draws from every generator there is, its own included."""

    def __init__(self) -> None:
        self.data, self.own, self.torch = points(), np.random.default_rng(1), torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.data)

    def noise(self) -> float:
        own = float(self.own.random()) + float(torch.rand(1, generator=self.torch))
        return own + random.random() + float(np.random.rand()) + float(torch.rand(()))


class NoisyBatches(Noisy):
    def batch(self, indices: Any) -> Any:
        inputs, targets = self.data.batch(indices)
        mix = float(np.random.beta(0.4, 0.4))
        return inputs * mix + inputs.flip(0) * (1 - mix) + self.noise(), targets


class NoisySamples(Noisy):
    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.data.batch(np.array([index]))
        return inputs[0] + self.noise(), targets[0]


class Shuffled(Noisy):
    """A stream with a shuffle buffer, whose generator is the process's."""

    shards = 2

    def open(self, shard: int, epoch: int) -> Any:
        held = list(range(shard, len(self.data), 2))
        while held:
            inputs, targets = self.data.batch(np.array([held.pop(random.randrange(len(held)))]))
            yield inputs[0] + self.noise(), targets[0]


def with_extra() -> dict[str, Any]:
    """State that nothing reaches but the user, who says so."""
    scheduled = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(scheduled, 1, 0.9)
    generator = torch.Generator().manual_seed(1)
    hidden = {"scheduler": scheduler, "generator": generator}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scheduler, generator = _HIDDEN[0]["scheduler"], _HIDDEN[0]["generator"]
        scheduler.optimizer.step()
        scheduler.step()
        return squared(model, batch) * scheduler.get_last_lr()[0] * (1 + torch.rand((), generator=generator))

    _HIDDEN[:] = [hidden]
    return {"loss": loss, "extra_state": hidden}


_HIDDEN: list[dict[str, Any]] = []


def hooks_that_remember() -> dict[str, Any]:
    """Hooks with state in their closure, and flags that training changes."""
    model, seen = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)), [0.0]

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen[0] += 1.0
        module.weight.requires_grad_(seen[0] > 3)
        model[1].train(seen[0] < 5)
        return output * (1 + seen[0] * 0.1)

    model[0].register_forward_hook(watch)
    return {"model": model, "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)}


def drawing() -> dict[str, Any]:
    """A loss that draws from an iterator, as adversarial trainings do from a second loader."""
    noise = iter([float(number) for number in range(1000)])
    return {"loss": lambda model, batch: squared(model, batch) * next(noise)}


PROGRAMS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], str]] = {
    "an optimizer that counts": (lambda: {"optimizer": lambda model: ScheduleFree(model.parameters())}, {}, "update"),
    "attributes": (counting, {}, "loss"),
    "a loss with a critic": (lambda: critic(counts=False), {}, "exact"),
    "a loss that counts": (lambda: critic(counts=True), {}, "loss"),
    "hooks and flags": (hooks_that_remember, {}, "loss"),
    "an iterator": (drawing, {}, "loss"),
    "batches": (lambda: {"samples": NoisyBatches()}, {}, "exact"),
    "batches by a process": (lambda: {"samples": NoisyBatches()}, {"data_workers": 1}, "exact"),
    "samples": (lambda: {"samples": NoisySamples()}, {}, "exact"),
    "samples by processes": (lambda: {"samples": NoisySamples()}, {"data_workers": 2}, "exact"),
    "a stream": (lambda: {"samples": Shuffled()}, {}, "exact"),
    "a stream by a process": (lambda: {"samples": Shuffled()}, {"data_workers": 1}, "exact"),
    "a rate": (lambda: {"rate": lambda step: 0.1 / (1 + step)}, {}, "exact"),
    "extra state": (with_extra, {}, "exact"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_said_of_a_resume_is_true(program: str, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    parts, settings, said = PROGRAMS[program]
    said_so = said if said == "exact" else f"not exact: the {said}"
    equal, text = halves(make, capsys, parts, **settings)
    assert (equal, text.split(" of step")[0]) == (said == "exact", said_so)


def test_a_rate_by_epochs_goes_on(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "schedule": "constant", "epochs": 1, "steps": None, "micro_batch": 5, "snapshot": {"every_steps": 6, "keep": 9}
    }  # fmt: skip
    make(settings, rate=lambda step: 0.1 / (1 + step)).run()
    shutil.rmtree(layout.build_snapshot_path(Path("snapshots"), 10))
    again = make(settings, rate=lambda step: 0.1 / (1 + step))
    again.run()
    assert read_verdict(capsys.readouterr().out) == "exact"
    assert again.training.trained.rate(9) == 0.01


@pytest.mark.parametrize("kind", [NoisyBatches, NoisySamples, Shuffled])
def test_who_reads_changes_no_bit(kind: Any, make: Make) -> None:
    found = []
    for workers in (0, 2):
        trainer = make({"data_workers": workers, "snapshot": {"dir": f"by-{workers}"}}, samples=kind(), loss=noisy_loss)
        trainer.run()
        found.append(bits(trainer))
    assert found[0] == found[1]


def noisy_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared(model, batch) * (1 + random.random() + float(np.random.rand()))


class Forgetful(Noisy):
    """What it returns depends on how often it was asked."""

    asked = 0

    def batch(self, indices: Any) -> Any:
        self.asked += 1
        inputs, targets = self.data.batch(indices)
        return inputs * self.asked, targets


@pytest.mark.parametrize(
    ("parts", "settings", "reason"),
    [
        (lambda: {"samples": Forgetful()}, {}, "the data set gives another sample 0 at each call"),
        (lambda: {"samples": NoisyBatches()}, {"data_workers": "thread"}, "draws random numbers in a thread"),
    ],
)
def test_what_cannot_be_kept_is_no_exact_resume(
    parts: Any, settings: Any, reason: str, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = halves(make, capsys, parts, **settings)
    assert text != "exact"
    assert re.search(reason, text), text


def test_extra_state_must_have_a_state(make: Make) -> None:
    with raises(PlanError, "extra_state.number"):
        make(extra_state={"number": 3})


# -- going on with something changed --------------------------------------------------------------------------------


def loss_with(weight: float) -> Any:
    return lambda model, batch: weight * squared(model, batch)


def dropout(share: float) -> nn.Module:
    model = network()
    model[2].p = share
    return model


def hooked() -> nn.Module:
    model = network()
    model[0].register_forward_hook(lambda *args: args[-1] * 1.0)
    return model


def adam(**settings: Any) -> Any:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)


def other_points() -> TensorData:
    inputs, targets = points().tensors
    return TensorData(inputs * 1.5, targets)


CHANGES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], str]] = {
    "decay": (
        lambda: {"optimizer": adam(weight_decay=0.1)}, {"optimizer": adam(weight_decay=0.5)},
        r"not exact: the update .*param_groups\[0\].weight_decay changed from 0.1 to 0.5",
    ),
    "betas": (
        lambda: {"optimizer": adam()}, {"optimizer": adam(betas=(0.8, 0.9))},
        r"not exact: the update .*betas changed from \(0.9, 0.999\) to \(0.8, 0.9\)",
    ),
    "dropout": (dict, {"model": dropout(0.5)}, "not exact: the loss"),
    "activation": (dict, {"model": nn.Sequential(*network()[:3], nn.Tanh(), network()[4])}, "not exact: the loss"),
    "a hook that changes nothing": (dict, {"model": hooked()}, "exact"),
    "loss": (lambda: {"loss": loss_with(1.0)}, {"loss": loss_with(2.0)}, "not exact: the loss"),
    "loss code that changes nothing": (dict, {"loss": lambda model, batch: squared(model, batch) + 0.0}, "exact"),
    "data": (dict, {"samples": other_points()}, "not exact: the loss .*sample 0 of the data has other contents"),
    "length": (dict, {"samples": points(60)}, r"not exact: .*samples changed from 50 to 60"),
    "rate": (lambda: {"rate": lambda _: 0.1}, {"rate": lambda _: 0.2}, "not exact: the update"),
    "extra": (dict, {"extra_state": {"more": torch.Generator()}}, r"not confirmed: .* no state of the program"),
    "setting": (dict, {"settings": {"clip_norm": 1e-3}}, r"not exact: the update .*clip_norm changed from None"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_another_is_said(change: str, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, said = CHANGES[change]
    text = go_on(make, capsys, before, dict(after))
    assert re.match(said, text), text


@pytest.mark.parametrize("other", [torch.optim.RMSprop, torch.optim.SGD])
def test_another_optimizer_is_refused(other: Any, make: Make) -> None:
    make({"steps": HALF}, optimizer=adam()).run()
    with raises(SnapshotError, f"torch.optim.adamw.AdamW {other.__name__}"):
        make({"steps": WHOLE}, optimizer=lambda model: other(model.parameters(), lr=0.1)).run()


def test_switches_of_libraries_count(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make({"steps": HALF}).run()
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    make({"steps": HALF}).run()
    assert read_verdict(capsys.readouterr().out) == "known to differ: NCCL_ALGO changed from unset to Tree"


def broken_off(until: int | None, every: int, where: str) -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if trainer_step() == until:
            raise KeyboardInterrupt
        if trainer_step() % every == 0:
            print("a line")
            with open(os.devnull, "a") as file:
                file.write(where)
        return squared(model, batch)

    return loss


def trainer_step() -> int:
    return 0


def test_what_has_no_say_in_the_loss_may_be_another(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make({"steps": HALF}, loss=broken_off(100, 3, "here")).run()
    make({"steps": HALF}, loss=broken_off(None, 5, "there")).run()
    assert read_verdict(capsys.readouterr().out) == "nothing known differs"


def test_nothing_is_begun_anew_in_silence(make: Make) -> None:
    make({"steps": HALF}).run()
    for path in Path("snapshots").glob("*/model.safetensors"):
        path.write_bytes(b"x")
    with raises(SnapshotError, "step-00000006"):
        make({"steps": WHOLE}).run()


class Recorded(nn.Linear):
    """Notes what it has seen in a buffer that is called whatever it likes."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(8, 1)
        self.register_buffer("whatever", torch.zeros(()), persistent=persistent)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.whatever += inputs.sum()
        return super().forward(inputs)


class Remembering(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.source = torch.Generator().manual_seed(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * torch.rand((), generator=self.source)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Recorded(persistent=True), "buffer whatever training"),
        (Recorded(persistent=False), "buffer whatever training"),
        (Remembering(8, 1), "model.source training"),
    ],
)
def test_shards_go_with_nothing_that_a_worker_remembers(make: Make, model: nn.Module, reason: str) -> None:
    with raises(PlanError, f"{reason}"):
        make({"exact": "elastic", "global_batch": 8, "micro_batch": 4}, model=model).run()


def test_an_evaluation_leaves_the_random_numbers_of_training_alone(make: Make) -> None:
    def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        torch.rand(3), random.random(), np.random.rand()
        return {"loss": (model(batch[0]) - batch[1]).square().mean(1)}

    found = []
    for number, every in enumerate((1, 5)):
        settings = {"eval_every": every, "snapshot": {"dir": f"every-{number}"}}
        trainer = make(settings, loss=noisy_loss, validation=points(20), score=score)
        trainer.run()
        found.append(bits(trainer))
    assert found[0] == found[1]


def test_two_trainings_do_not_share_a_folder(make: Make) -> None:
    script = "import sys; from pathlib import Path; from dtctl.runtime.snapshot.storage.lease import Lease\n"
    script += "Lease(Path('snapshots')).acquire(); print('held', flush=True); sys.stdin.readline()"
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout
    assert other.stdout.readline() == "held\n"
    with raises(SnapshotError, f"{other.pid}"):
        make().run()
    other.communicate("\n")
    make().run()


def test_a_folder_that_cannot_be_written_is_known_before_the_first_step(make: Make) -> None:
    Path("snapshots").write_text("no folder")
    trainer = make()
    with raises(SnapshotError, "snapshots written"):
        trainer.run()
    assert trainer.step == 0


def test_a_run_whose_snapshots_have_vanished_does_not_begin_anew(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(names.RUN_DIR, str(tmp_path))
    make({"steps": HALF}).run()
    shutil.rmtree("snapshots")
    with raises(SnapshotError, "step 6"):
        make({"steps": WHOLE}).run()
    make({"steps": WHOLE, "snapshot": {"dir": "elsewhere"}}).run()


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("", "tf32"), ("cuda.matmul", "tf32"), ("cudnn", "tf32"), ("cudnn.conv", "tf32"), ("mkldnn", "tf32"),
        ("mkldnn.matmul", "bf16"),
    ],
)  # fmt: skip
def test_precisions_of_parts_are_read_whatever_was_set(part: str, value: str) -> None:
    """torch refuses to read the setting of all once a part has its own."""
    script = (
        "import functools, torch\n"
        "from dtctl.runtime.exactness.run_conditions import read_fp32_precision\n"
        f"where = functools.reduce(getattr, filter(None, {part!r}.split('.')), torch.backends)\n"
        f"where.fp32_precision = {value!r}\n"
        "after = read_fp32_precision()\n"
        f"assert after[{part!r} and {part + '.'!r} + 'fp32_precision' or 'fp32_precision'] == {value!r}, after\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
