"""Models and loops of many kinds, for the zoo: small, but with state of every kind that a training may have.

Each kind is made of options (the file options.json, which nobody but the script reads) and of the configuration. What a
training ends with is written as digests by part, this worker's share of each, so that the part that differs is known.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dtctl.runtime import Outcome, TensorData, TrainConfig, Trainer, Worker, run
from dtctl.runtime.snapshot import Saver, load_optimizer, newest, optimizer_tree

OUT = Path(os.environ.get("ZOO_FOLDER", "."))
WIDTH = 12
OPTIONS: dict[str, Any] = {
    "dropout": 0.1, "activation": "GELU", "data_seed": 5, "samples": 60, "optimizer": "AdamW", "decay": 0.1,
    "declared": True,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "steps": 12, "micro_batch": 4, "lr": 0.01, "log_every": 5, "timeout_s": 20, "seed": 3, "clip_norm": 1.0,
    "snapshot": {"every_steps": 2, "keep": 3, "dir": "snapshots"},
}  # fmt: skip
Altered = Callable[[torch.Tensor], torch.Tensor]
"""The script's own code, which the loss goes through."""


@dataclass(slots=True)
class Parts:
    """What a Trainer is made of."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    data: Any
    more: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Trainer."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What else belongs to the state, for the digest."""


def main(name: str, altered: Altered) -> int:
    """Train one kind in the current folder; the exit code."""
    options = OPTIONS | json.loads(Path("options.json").read_text())
    kind = KINDS[name]
    if kind.own is not None:
        return kind.own(options, altered)

    def train(config: TrainConfig, worker: Worker) -> Outcome:
        assert kind.make
        parts = kind.make(options, config, worker)

        def loss(model: nn.Module, batch: Any) -> Any:
            tick(worker.rank)
            found = parts.loss(model, batch)
            return (altered(found[0]), found[1]) if isinstance(found, tuple) else altered(found)

        trainer = Trainer(config, worker, parts.model, loss, parts.data, **parts.more)
        outcome = trainer.run()
        if outcome is Outcome.FINISHED:
            leave(
                worker.rank, parts.model, trainer.optimizer, {**parts.kept, "ema": trainer.ema and trainer.ema.state()}
            )
        return outcome

    return run(train, defaults={**DEFAULTS, **kind.settings})


def tick(rank: int) -> None:
    """Say that a pass begins, and take a moment: a training of 30 ms is hard to kill in the middle."""
    if rank == 0:
        with (OUT / "progress").open("ab", buffering=0) as file:
            file.write(b".")
    time.sleep(0.003)


def leave(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    """Write the digests of all that a training ends with, as far as this worker has it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = {
        "parameters": {name: _plain(value) for name, value in model.named_parameters()},
        "buffers": {name: _plain(value) for name, value in model.named_buffers()},
        "attributes": {
            f"{name}.{key}": value
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if not key.startswith("_") and isinstance(value, int | float | list | tuple)
        },
        "optimizer state": {
            names.get(id(key), "?"): {name: _plain(value) for name, value in values.items()}
            for key, values in optimizer.state.items()
        },
        "optimizer groups": [
            {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ],
        "random": [torch.get_rng_state(), random.getstate(), str(np.random.get_state())],
        **{name: _state(value) for name, value in kept.items()},
    }
    (OUT / f"final.{rank}.json").write_text(json.dumps({name: digest(part) for name, part in parts.items()}))


def _plain(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    return value.state_dict() if hasattr(value, "state_dict") else value


def digest(tree: Any) -> str:
    """Of values, names and bytes."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = _plain(value).detach().cpu().contiguous()
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            found.update(b"[")
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(tree)
    return found.hexdigest()[:16]


# Data


def regression(options: Mapping[str, Any]) -> TensorData:
    made = torch.Generator().manual_seed(options["data_seed"])
    inputs = torch.randn(options["samples"], WIDTH, generator=made)
    return TensorData(inputs, inputs[:, :1].sin() - inputs[:, 1:2])


def tokens(options: Mapping[str, Any], length: int = 8) -> TensorData:
    made = torch.Generator().manual_seed(options["data_seed"])
    text = torch.randint(0, 12, (options["samples"], length + 1), generator=made)
    return TensorData(text[:, :-1].clone(), text[:, 1:].clone())


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": (model(batch[0]) - batch[1]).pow(2).mean(1)}


# Models


class Block(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.act, self.drop = getattr(nn, options["activation"])(), nn.Dropout(options["dropout"])

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self.drop(self.down(self.act(self.up(self.norm(stream)))))


class Net(nn.Module):
    """Blocks with dropout; `extra` is called with the stream between them."""

    def __init__(self, options: Mapping[str, Any], blocks: int = 2, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(options) for _ in range(blocks))
        self.extra = extra or nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stream = self.extra(self.first(inputs))
        for block in self.blocks:
            stream = block(stream)
        out: torch.Tensor = self.last(stream)
        return out


class Conv(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), getattr(nn, options["activation"])(), nn.Dropout(options["dropout"])
        )
        self.last = nn.Linear(4 * (WIDTH - 2), 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.body(inputs[:, None]).flatten(1))
        return out


class Lstm(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(12, WIDTH),
            nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=options["dropout"]),
        )
        self.last = nn.Linear(WIDTH, 12)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.lstm(self.embed(inputs))[0])
        return out


class Tied(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed, self.drop, self.mix = (
            nn.Embedding(12, WIDTH),
            nn.Dropout(options["dropout"]),
            nn.Linear(WIDTH, WIDTH),
        )
        self.last = nn.Linear(WIDTH, 12, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(torch.tanh(self.mix(self.embed(inputs)))))
        return out


class Lora(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.base = Net({**options, "dropout": 0.0})
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.drop = nn.Dropout(options["dropout"])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(inputs + self.up(self.down(self.drop(inputs))))
        return out


class Shadow(nn.Module):
    """A moving average of the stream that it moves, in a buffer."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(stream.detach().float().mean(0), 0.1)
        return stream - 0.5 * self.mean.clone()


class Counter(nn.Module):
    """Counts passes and does more with every one of them: in a buffer, or in an attribute."""

    def __init__(self, *, buffer: bool, persistent: bool = True) -> None:
        super().__init__()
        self.passes: Any = 0
        if buffer:
            del self.passes
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64), persistent=persistent)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return stream * (1 + 0.02 * (float(self.passes) if torch.is_tensor(self.passes) else self.passes))

    # What the Trainer is told of an attribute, where it is.
    def counted(self) -> Counted:
        return Counted(self)


class Counted:
    """The state of a counter as an object with a state."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._counter.passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counter.passes = int(state["passes"])


class Queue(nn.Module):
    """Keys of earlier batches, and a place in them, as MoCo has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        against = stream @ self.queue.clone().to(stream.dtype).T
        if self.training:
            place, count = int(self.place), len(stream)
            rows = torch.arange(place, place + count) % len(self.queue)
            self.queue[rows] = stream.detach().float()
            self.place[0] = (place + count) % len(self.queue)
        return stream + 0.01 * against.mean(1, keepdim=True)


class Target(nn.Module):
    """A student and the moving average of its weights, which it is compared with; the user's own, in buffers."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.student = Net(options)
        for name, value in self.student.named_parameters():
            self.register_buffer(f"average_{name.replace('.', '_')}", value.detach().clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for name, value in self.student.named_parameters():
                    self.get_buffer(f"average_{name.replace('.', '_')}").lerp_(value, 0.1)
        out: torch.Tensor = self.student(inputs) * (1 + 0.1 * self.average_last_weight.mean())
        return out


class Routed(nn.Module):
    """Experts, one for each sample."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(Block(options) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs)
        kinds = (inputs[:, 0] * 3).long().remainder(3)
        out = stream.clone()
        for number, expert in enumerate(self.experts):
            rows = (kinds == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_copy(0, rows, expert(stream[rows]))
        found: torch.Tensor = self.last(out)
        return found


class Optional(nn.Module):
    """A part that only every other pass uses, and one that none does."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.net, self.side, self.never = Net(options), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(inputs)
        return out + self.side(inputs) if float(inputs[0, 0]) > 0 else out


class Noisy(nn.Module):
    """Noise from a generator of the user's own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.__dict__["generator"] = generator

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return stream
        return stream + 0.1 * torch.randn(stream.shape, generator=self.__dict__["generator"])


# Optimizers


class Free(torch.optim.Optimizer):
    """Schedule-free SGD: what it counts is in its groups (Defazio et al. 2024)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weight_sum": 0.0, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            weight = group["lr"] ** 2 * group["k"]
            group["weight_sum"] += weight
            share = weight / group["weight_sum"] if group["weight_sum"] else 0.0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, share * (1 - group["beta"]) + 0.1 / group["k"])


class Prodigal(torch.optim.Optimizer):
    """A step size that is estimated on the way, a float in the group (as in D-Adaptation and Prodigy)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "d": 0.1, "d_numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grown = 0.0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                begun = state.setdefault("begun", parameter.detach().clone())
                grown += float(_plain((parameter.grad * (begun - parameter)).sum()))
                parameter.sub_(parameter.grad, alpha=group["lr"] * group["d"])
            group["k"] += 1
            group["d_numerator"] = 0.9 * group["d_numerator"] + abs(grown)
            group["d"] *= 1 + 0.1 * math.tanh(group["d_numerator"] + 0.1)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(mean.lerp(parameter.grad, 1 - one).sign(), alpha=group["lr"] * 0.1)
                mean.lerp_(parameter.grad, 1 - two)


class Ahead(torch.optim.SGD):
    """Slow weights that are moved every third step (Lookahead); counts in an attribute of itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if self.taken % 3 == 0:
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "taken": self.taken}

    def load_state_dict(self, state: Any) -> None:
        self.taken = state.get("taken", self.taken)
        super().load_state_dict({key: value for key, value in state.items() if key != "taken"})


class Grouped(torch.optim.Optimizer):
    """A tensor in the group: a running scale of all gradients of it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "scale": torch.ones(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    size = _plain(parameter.grad).abs().mean()
                    group["scale"] = group["scale"] * 0.95 + size * 0.05
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (0.1 + float(group["scale"])))


class Sharp(torch.optim.SGD):
    """Goes uphill first and back with the next gradient (a SAM without a closure, of two steps)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["up"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["up"]:
                    self.state[parameter]["was"] = parameter.detach().clone()
                    parameter.add_(parameter.grad, alpha=0.01)
                elif "was" in self.state[parameter]:
                    parameter.copy_(self.state[parameter].pop("was"))
                    parameter.sub_(parameter.grad, alpha=group["lr"])
            group["up"] = not group["up"]


def chosen(options: Mapping[str, Any], config: TrainConfig) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """An optimizer of torch, as the options have it."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kind = getattr(torch.optim, options["optimizer"])
        found: torch.optim.Optimizer = kind(wanted, lr=config.lr, weight_decay=options["decay"], foreach=True)
        return found

    return made


def using(kind: Any) -> Callable[..., Parts]:
    """A net with an optimizer of the user's own."""

    def make(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
        wanted = lambda model: kind([p for p in model.parameters() if p.requires_grad], lr=config.lr)  # noqa: E731
        return Parts(Net(options), squares, regression(options), {"optimizer": wanted})

    return make


# Data of other kinds


class Random(TensorData):
    """Batches with noise of all three generators."""

    def batch(self, indices: Any) -> Any:
        inputs, targets = super().batch(indices)
        noise = torch.randn(inputs.shape) + torch.from_numpy(np.random.randn(*inputs.shape)).float()
        return inputs + 0.1 * noise + 0.01 * random.random(), targets


class Map:
    """Sample by sample, with augmentation."""

    def __init__(self, data: TensorData) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        inputs, target = (tensor[index] for tensor in self._data.tensors)
        return inputs * (1 + 0.1 * random.random()) + 0.05 * torch.randn(WIDTH) * float(np.random.rand()), target


class Shards:
    """Read one after the other."""

    shards = 2

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.data_seed, self.samples = options["data_seed"], options["samples"]

    def open(self, shard: int, epoch: int) -> Iterator[Any]:
        made = torch.Generator().manual_seed(self.data_seed * 1000 + shard * 100 + epoch)
        for _ in range(self.samples):
            inputs = torch.randn(WIDTH, generator=made)
            yield inputs, inputs[:1].sin()


def mixed(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mixup that draws from torch, NumPy and Python."""
    share = float(np.random.beta(0.4, 0.4)) if random.random() < 0.8 else 1.0
    order = torch.randperm(len(batch[0]))
    return share * squares(model, batch) + (1 - share) * squares(model, (batch[0], batch[1][order]))


class Everyone(torch.autograd.Function):
    """Embeddings of all workers, one after the other."""

    @staticmethod
    def forward(_: Any, own: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Pair(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.one, self.two = Net(options), Net(options)
        self.one.last, self.two.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.one(inputs), self.two(inputs * 0.9), self.temperature.exp()


def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    one, two, temperature = model(batch[0])
    if dist.is_initialized():
        one, two = Everyone.apply(one), Everyone.apply(two)  # type: ignore[no-untyped-call]
    return nn.functional.cross_entropy(one @ two.T * temperature, torch.arange(len(one)))


def by_tokens(model: nn.Module, batch: Any) -> Any:
    targets = torch.where(batch[0].cumsum(1) % 3 < 1, -100, batch[1])
    logits = model(batch[0]).transpose(1, 2)
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def gpt(options: Mapping[str, Any]) -> nn.Module:
    """The GPT of the examples."""
    name = "example_gpt_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[3] / "examples" / "gpt" / "model.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    module = sys.modules[name]
    config = module.GPTConfig(layers=2, heads=2, embed=16, context=8, dropout=options["dropout"])
    made: nn.Module = module.GPT(config)
    return made


# Kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model and a loop."""

    make: Callable[[Mapping[str, Any], TrainConfig, Worker], Parts] | None = None
    own: Callable[[Mapping[str, Any], Altered], int] | None = None
    """A loop of one's own, without a Trainer."""
    strategies: tuple[str, ...] = ("single", "ddp", "zero1", "fsdp", "elastic")
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    """What can be changed, beside what every kind has."""
    options: Mapping[str, Any] = field(default_factory=dict)


def simple(model: Callable[..., nn.Module], loss: Any = squares, data: Any = regression, **more: Any) -> Any:
    """Parts of a model that is made of options alone."""
    return lambda options, *_: Parts(model(options), loss, data(options), **more)


def _extra(make: Callable[[], nn.Module]) -> Any:
    return lambda options, *_: Parts(Net(options, extra=make()), squares, regression(options))


def attribute(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    counter = Counter(buffer=False)
    more = {"extra_state": {"counter": counter.counted()}} if options["declared"] else {}
    return Parts(Net(options, extra=counter), squares, regression(options), more)


def generator(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    own = torch.Generator().manual_seed(1)
    python, numbers = random.Random(1), np.random.default_rng(1)
    kept = {"own": own, "python": python, "numbers": numbers}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return squares(model, batch) * (1 + 0.1 * python.random() + 0.1 * float(numbers.random()))

    more = {"extra_state": kept} if options["declared"] else {}
    return Parts(Net(options, extra=Noisy(own)), loss, regression(options), more, kept)


def rated(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """A rate of the user's own."""
    return Parts(Net(options), squares, regression(options), {"rate": lambda step: config.lr / (1 + step % 4)})


def scheduled(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """A scheduler of torch, with a state, that decides by what it is told."""
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(stand_in, factor=0.7, patience=1)
    seen: list[float] = []

    class Both:
        def state_dict(self) -> dict[str, Any]:
            return {"plateau": plateau.state_dict(), "lr": stand_in.param_groups[0]["lr"], "seen": list(seen)}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            plateau.load_state_dict(dict(state["plateau"]))
            stand_in.param_groups[0]["lr"] = state["lr"]
            seen[:] = state["seen"]

    both = Both()

    def rate(step: int) -> float:
        plateau.step(abs(math.sin(step)))
        seen.append(step)
        return float(stand_in.param_groups[0]["lr"]) / (1 + len(seen) % 3)

    more: dict[str, Any] = {"rate": rate}
    if options["declared"]:
        more["extra_state"] = {"schedule": both}
    return Parts(Net(options), squares, regression(options), more, {"schedule": both})


def evaluated(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    return Parts(
        Net(options),
        squares,
        regression(options),
        {"validation": regression(options | {"samples": 13}), "score": score},
    )


def torched(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    return Parts(Net(options), squares, regression(options), {"optimizer": chosen(options, config)})


CALLS = {"seen": 0}
"""What a loss function of the zoo counts in a global variable."""


def counted_globally(model: nn.Module, batch: Any) -> torch.Tensor:
    CALLS["seen"] += 1
    return squares(model, batch) * (1 + 0.02 * CALLS["seen"])


def curriculum(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """A loss function that counts in its closure."""
    seen = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return squares(model, batch) / (1 + 0.05 * seen)

    return Parts(Net(options), loss, regression(options))


class Unfreezing(nn.Module):
    """The first layer is trained from the sixth pass on."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.net, self.passes = Net(options), 0
        self.net.first.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes == 6:
            self.net.first.requires_grad_(True)
        out: torch.Tensor = self.net(inputs)
        return out


def unfreezing(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)  # noqa: E731
    return Parts(Unfreezing(options), squares, regression(options), {"optimizer": optimizer})


class Cached(Map):
    """Keeps what it has read, which changes nothing."""

    def __init__(self, data: TensorData) -> None:
        super().__init__(data)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = tuple(tensor[index] for tensor in self._data.tensors)
        return self.cache[index]


class Drawing(Map):
    """Augments with a generator of its own."""

    def __init__(self, data: TensorData) -> None:
        super().__init__(data)
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> Any:
        inputs, target = (tensor[index] for tensor in self._data.tensors)
        return inputs + 0.1 * torch.randn(WIDTH, generator=self.generator), target


def spectral(options: Mapping[str, Any]) -> nn.Module:
    """Power iterations in buffers (spectral norm), and lengths apart from directions (weight norm)."""
    net = Net(options)
    net.first = nn.utils.parametrizations.spectral_norm(net.first)
    net.last = nn.utils.parametrizations.weight_norm(net.last)
    return net


def hooked(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """Noise on gradients, and a list that a hook fills."""
    net, seen = Net(options), []  # type: ignore[var-annotated]

    def watch(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append(float(out.detach().mean()))
        return out + 0.01 * sum(seen[-3:])

    net.first.register_forward_hook(watch)
    net.first.weight.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))
    return Parts(net, squares, regression(options))


def averaged(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """torch's own moving average of a model, updated by the loss function, which compares with it."""
    net = Net(options)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        average.update_parameters(net)
        with torch.no_grad():
            wanted = average(batch[0])
        return squares(model, batch) + 0.1 * nn.functional.mse_loss(model(batch[0]), wanted)

    more = {"extra_state": {"average": average}} if options["declared"] else {}
    return Parts(net, loss, regression(options), more, {"average": average})


def gan(options: Mapping[str, Any], altered: Altered) -> int:
    """Two models and two optimizers in a loop of one's own."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    data = regression(options).tensors[0]
    maker, judge = nn.Sequential(nn.Linear(4, 16), nn.Dropout(options["dropout"]), nn.Linear(16, WIDTH)), Net(options)
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    first = torch.optim.Adam(maker.parameters(), lr=0.01)
    second = getattr(torch.optim, options["optimizer"])(judge.parameters(), lr=0.01, weight_decay=options["decay"])
    schedule = torch.optim.lr_scheduler.StepLR(second, 3)
    folder = Path("snapshots")
    with Saver(folder, keep=2) as saver:
        step = 0
        if found := newest(folder):
            step = found.step
            both.load_state_dict(found.parts["model"])
            load_optimizer(maker, first, found.parts["first"])
            load_optimizer(judge, second, found.parts["second"])
            schedule.load_state_dict(found.facts["schedule"])
            for group, lr in zip(second.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = lr
            torch.set_rng_state(found.parts["random"].clone())
            print(f"resumed at step {step}: exact", flush=True)
        while step < 12:
            tick(0)
            real = data[torch.randint(0, len(data), (8,))]
            fake = maker(torch.randn(8, 4))
            true, false = nn.functional.softplus(-judge(real)), nn.functional.softplus(judge(fake.detach()))
            second.zero_grad()
            altered(true.mean() + false.mean()).backward()  # type: ignore[no-untyped-call]
            second.step()
            first.zero_grad()
            altered(nn.functional.softplus(-judge(fake)).mean()).backward()  # type: ignore[no-untyped-call]
            first.step()
            schedule.step()
            step += 1
            if step % 2 == 0:
                state = {"first": optimizer_tree(maker, first), "second": optimizer_tree(judge, second)}
                parts = {"model": both.state_dict(), **state, "random": torch.get_rng_state()}
                saver.save(step, parts, facts={"schedule": schedule.state_dict()})
    leave(0, both, second, {"first": first, "schedule": schedule})
    return 0


ALL = ("single", "ddp", "zero1", "fsdp", "elastic", "tp", "cp", "pipeline")
SIDE = ("dropout", "activation")
KINDS: dict[str, Kind] = {
    "net": Kind(make=simple(Net), changes=SIDE),
    "lstm": Kind(make=simple(Lstm, next_token, tokens), changes=("dropout",)),
    "batchnorm": Kind(make=simple(Conv), strategies=("single", "ddp", "zero1", "fsdp"), changes=SIDE),
    "tied": Kind(make=simple(Tied, next_token, tokens), changes=("dropout",)),
    "gpt": Kind(make=simple(gpt, next_token, tokens), strategies=ALL, changes=("dropout",)),
    "gpt checkpointed": Kind(
        make=simple(gpt, next_token, tokens), strategies=ALL, settings={"checkpointing": "full", "accumulate": 2}
    ),
    "tokens": Kind(
        make=simple(gpt, by_tokens, tokens), strategies=("single", "ddp", "zero1", "fsdp", "tp", "pipeline")
    ),
    "ema": Kind(make=simple(Net), settings={"ema": {"decay": 0.8}}),
    "own ema": Kind(make=simple(Target), strategies=("single", "ddp", "zero1")),
    "gan": Kind(own=gan, strategies=("single",)),
    "lora": Kind(make=simple(Lora)),
    "contrast": Kind(make=simple(Pair, contrast), strategies=("single", "ddp", "zero1", "fsdp")),
    "mixture": Kind(
        make=simple(Routed),
        strategies=("single", "ddp", "zero1", "fsdp", "elastic"),
        settings={"ddp": {"find_unused_parameters": True}},
    ),
    "optional": Kind(make=simple(Optional), settings={"ddp": {"find_unused_parameters": True}}),
    "running mean": Kind(make=_extra(Shadow)),
    "hidden mean": Kind(make=_extra(lambda: Shadow(persistent=False))),
    "queue": Kind(make=_extra(Queue)),
    "step buffer": Kind(make=_extra(lambda: Counter(buffer=True))),
    "hidden step buffer": Kind(make=_extra(lambda: Counter(buffer=True, persistent=False))),
    "attribute": Kind(make=attribute),
    "undeclared attribute": Kind(make=attribute, options={"declared": False}),
    "generator": Kind(make=generator),
    "undeclared generator": Kind(make=generator, options={"declared": False}),
    "schedule-free": Kind(make=using(Free)),
    "prodigal": Kind(make=using(Prodigal)),
    "lion": Kind(make=using(Lion)),
    "lookahead": Kind(make=using(Ahead), strategies=("single", "ddp", "zero1")),
    "tensor in a group": Kind(make=using(Grouped)),
    "sharp": Kind(make=using(Sharp)),
    "optimizer of torch": Kind(make=torched, changes=("optimizer", "decay")),
    "rate": Kind(make=rated),
    "schedule": Kind(make=scheduled),
    "undeclared schedule": Kind(make=scheduled, options={"declared": False}),
    "stream": Kind(make=simple(Net, data=Shards)),
    "random batches": Kind(make=simple(Net, data=lambda options: Random(*regression(options).tensors))),
    "map": Kind(make=simple(Net, data=lambda options: Map(regression(options)))),
    "mixup": Kind(make=simple(Net, mixed)),
    "fp16": Kind(make=simple(Net), settings={"precision": "fp16"}, strategies=("single", "ddp", "zero1", "fsdp")),
    "bf16": Kind(make=simple(Net), settings={"precision": "bf16"}),
    "compiled": Kind(make=simple(Net), settings={"compile": "eager"}, strategies=("single", "ddp", "fsdp")),
    "compiled by aot": Kind(make=simple(Net), settings={"compile": "aot_eager"}, strategies=("single", "ddp")),
    "evaluated": Kind(make=evaluated, settings={"eval_every": 3, "best": {}}),
    "loss that counts": Kind(make=simple(Net, counted_globally)),
    "curriculum": Kind(make=curriculum),
    "unfreezing": Kind(make=unfreezing, strategies=("single",)),
    "cache": Kind(make=simple(Net, data=lambda options: Cached(regression(options)))),
    "generator in the data": Kind(make=simple(Net, data=lambda options: Drawing(regression(options)))),
    "norms": Kind(make=simple(spectral), strategies=("single", "ddp", "zero1")),
    "hooks": Kind(make=hooked, strategies=("single", "ddp", "zero1")),
    "average": Kind(make=averaged, strategies=("single", "ddp", "zero1")),
    "undeclared average": Kind(make=averaged, strategies=("single", "ddp", "zero1"), options={"declared": False}),
    "selective": Kind(make=simple(Net), settings={"checkpointing": "selective", "accumulate": 2}),
}
