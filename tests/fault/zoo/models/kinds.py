"""The kinds of trainings, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtctl.runtime import TrainConfig, Worker
from tests.fault.zoo.models.assembly import (
    attribute,
    averaged,
    curriculum,
    evaluated,
    generator,
    hooked,
    rated,
    scheduled,
    simple,
    torched,
    unfreezing,
    using,
    with_layer,
)
from tests.fault.zoo.models.data import Cached, Drawing, Map, Random, Shards, regression, tokens
from tests.fault.zoo.models.losses import by_tokens, contrast, counted_globally, mixed, next_token
from tests.fault.zoo.models.networks import (
    Conv,
    Counter,
    Lora,
    Lstm,
    Net,
    Optional,
    Pair,
    Queue,
    Routed,
    Shadow,
    Target,
    Tied,
    gpt,
    spectral,
)
from tests.fault.zoo.models.optimizers import Ahead, Free, Grouped, Lion, Prodigal, Sharp
from tests.fault.zoo.models.own_loop import gan
from tests.fault.zoo.models.parts import Altered, Parts


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
    "running mean": Kind(make=with_layer(Shadow)),
    "hidden mean": Kind(make=with_layer(lambda: Shadow(persistent=False))),
    "queue": Kind(make=with_layer(Queue)),
    "step buffer": Kind(make=with_layer(lambda: Counter(buffer=True))),
    "hidden step buffer": Kind(make=with_layer(lambda: Counter(buffer=True, persistent=False))),
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
