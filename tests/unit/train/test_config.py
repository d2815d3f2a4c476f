"""The training configuration: layers, strictness, and the three sizes of a batch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dtctl.errors import PlanError, SpecError
from dtctl.names import TRAIN_CONFIG
from dtctl.train.batch import BatchSizes, compute_batch_sizes, compute_training_length
from dtctl.train.config import TrainConfig, load
from tests.facts import raises


def from_spec(values: object) -> dict[str, str]:
    return {TRAIN_CONFIG: json.dumps(values)}


@pytest.mark.parametrize(
    ("value", "message"),
    [("3", "list null"), ("[1.5]", "list null"), ('"x"', "list null")],
)
def test_a_list_is_checked_item_by_item(value: str, message: str) -> None:
    with raises(SpecError, message):
        load(argv=[f"--train.pipeline.split={value}"], environ={})
    assert load(argv=["--train.pipeline.split=[2, 3]"], environ={}).pipeline.split == (2, 3)


def test_nothing_said_is_all_defaults() -> None:
    assert load(argv=[], environ={}) == TrainConfig()


def test_later_layers_win_key_by_key() -> None:
    config = load(
        {"lr": 0.1, "seed": 1, "model": {"layers": 2, "embed": 64}, "snapshot": {"keep": 5}},
        environ=from_spec({"lr": 0.2, "model": {"layers": 3}, "snapshot": {"every_steps": 7}}),
        argv=["--lr", "9", "--train.lr=0.3", "--train.model.heads", "8"],
    )
    assert (config.lr, config.seed) == (0.3, 1)
    assert config.model == {"layers": 3, "embed": 64, "heads": 8}
    assert (config.snapshot.keep, config.snapshot.every_steps) == (5, 7)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "1e3", 1000),
        ("lr", "1", 1.0),
        ("clip_norm", "null", None),
        ("strategy", "ddp", "ddp"),
        ("strategy", '{"dp": 2}', {"dp": 2}),
        ("snapshot.dir", "a b", "a b"),
    ],
)
def test_command_line_values(key: str, text: str, value: object) -> None:
    found: object = load(argv=[f"--train.{key}={text}"], environ={})
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"laerning": 1}, "unknown key `train.laerning`", None),
        ({"mirco_batch": 1}, "unknown key `train.mirco_batch`", "did you mean `micro_batch`?"),
        ({"snapshot": {"evry_steps": 1}}, "unknown key `train.snapshot.evry_steps`", "did you mean `every_steps`?"),
        ({"lr": "fast"}, '`train.lr` is "fast", and a number is expected', None),
        ({"lr": True}, "`train.lr` is true, and a number is expected", None),
        ({"steps": 1.5}, "`train.steps` is 1.5, and a whole number or null is expected", None),
        ({"model": 3}, "`train.model` is 3, and a mapping is expected", None),
        ({"precision": "bf61"}, "one of fp32, bf16, fp16 is expected", "did you mean `bf16`?"),
        ({"micro_batch": 0}, "`train.micro_batch` is 0, and must be at least 1", None),
        ({"lr": 0}, "`train.lr` is 0.0, and must be more than 0", None),
        ({"steps": 3, "epochs": 1}, "steps and epochs are both set; keep one", None),
    ],
)
def test_mistakes_are_named(values: object, message: str, hint: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        load(environ=from_spec(values), argv=[])
    assert message in caught.value.message
    assert caught.value.where == TRAIN_CONFIG
    if hint:
        assert hint in (caught.value.hint or "")


def test_command_line_mistakes_name_the_command_line() -> None:
    with raises(SpecError, "train.setps") as caught:
        load(environ={}, argv=["--train.setps=3"])
    assert caught.value.where == "command line"
    with raises(SpecError, "value"):
        load(environ={}, argv=["--train.steps"])
    with raises(SpecError, "JSON"):
        load(environ={TRAIN_CONFIG: "{"}, argv=[])
    with raises(SpecError, "object expected"):
        load(environ={TRAIN_CONFIG: "[]"}, argv=[])


@pytest.mark.parametrize(
    ("sizes", "workers", "expected"),
    [
        ({}, 3, (8, 1)),
        ({"micro_batch": 4}, 3, (4, 1)),
        ({"accumulate": 2}, 3, (8, 2)),
        ({"global_batch": 12}, 3, (4, 1)),
        ({"global_batch": 24, "accumulate": 2}, 3, (4, 2)),
        ({"global_batch": 24, "micro_batch": 2}, 3, (2, 4)),
        ({"global_batch": 24, "micro_batch": 2, "accumulate": 4}, 3, (2, 4)),
    ],
)
def test_sizes_are_derived(sizes: dict[str, int], workers: int, expected: tuple[int, int]) -> None:
    found = compute_batch_sizes(TrainConfig(**sizes), workers)
    assert (found.micro, found.accumulate) == expected
    assert found.total == found.micro * workers * found.accumulate


@pytest.mark.parametrize(
    ("sizes", "message", "hint"),
    [
        ({"global_batch": 16}, "cannot be divided by 3 workers * accumulate 1 = 3", "15 or 18"),
        ({"global_batch": 20, "micro_batch": 4}, "cannot be divided by micro_batch 4 * 3 workers = 12", "12 or 24"),
        ({"global_batch": 2, "micro_batch": 4}, "cannot be divided", "that can: 12"),
        ({"global_batch": 24, "micro_batch": 4, "accumulate": 1}, "is 12, and global_batch is 24", "leave one"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], message: str, hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        compute_batch_sizes(TrainConfig(**sizes), 3)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_two_sizes_of_the_spec_push_out_the_scripts() -> None:
    config = load({"micro_batch": 12}, environ=from_spec({"global_batch": 48, "accumulate": 2}), argv=[])
    assert compute_batch_sizes(config, 3).micro == 8
    config = load({"epochs": 2}, environ=from_spec({"steps": 9}), argv=[])
    assert (config.steps, config.epochs) == (9, None)


@given(
    samples=st.integers(1, 10_000),
    micro=st.integers(1, 9),
    workers=st.integers(1, 9),
    accumulate=st.integers(1, 4),
    epochs=st.integers(1, 4),
)
def test_length_by_epochs_covers_every_sample(
    samples: int, micro: int, workers: int, accumulate: int, epochs: int
) -> None:
    sizes = BatchSizes(micro=micro, accumulate=accumulate, world_size=workers)
    assume(epochs == 1 or samples >= sizes.total)
    steps, end = compute_training_length(TrainConfig(epochs=epochs), samples=samples, batch=sizes)
    assert end == epochs * samples
    assert (steps - 1) * sizes.total < end <= steps * sizes.total


def test_no_sample_is_twice_in_one_step() -> None:
    sizes = BatchSizes(micro=3, accumulate=2, world_size=4)
    assert compute_training_length(TrainConfig(steps=2), samples=24, batch=sizes) == (2, 48)
    assert compute_training_length(TrainConfig(epochs=1), samples=23, batch=sizes) == (1, 23)
    with raises(PlanError, "samples step"):
        compute_training_length(TrainConfig(epochs=2), samples=23, batch=sizes)
    with raises(PlanError, "23 samples 24"):
        compute_training_length(TrainConfig(steps=2), samples=23, batch=sizes)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (8, 8)),
        ({"accumulate": 5}, (8, 5)),
        ({"pipeline": {"micro_batches": 6}, "global_batch": 24}, (2, 6)),
        ({"micro_batch": 2, "global_batch": 12}, (2, 3)),
    ],
)
def test_micro_batches_are_the_accumulation(settings: dict[str, Any], sizes: tuple[int, int]) -> None:
    found = compute_batch_sizes(load(settings, argv=[], environ={}), 2, stages=4)
    assert (found.micro, found.accumulate) == sizes


def test_two_words_for_one_thing_must_agree() -> None:
    with raises(PlanError, "same"):
        compute_batch_sizes(load({"accumulate": 4, "pipeline": {"micro_batches": 8}}, argv=[], environ={}), 2, stages=2)
