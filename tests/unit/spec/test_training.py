"""The `train:` section: checked with the spec by the schema that the workers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtctl.errors import SpecError
from dtctl.spec.load import parse_spec
from dtctl.spec.train_section import make_train_section
from dtctl.spec.training import Train
from dtctl.train.config import TrainConfig, load

SCRIPT = "job: {script: train.py}\n"


def parse(train: str) -> Train:
    found = parse_spec(f"{SCRIPT}train: {train}\n", source="dtctl.yaml", base_dir=Path()).train
    assert found is not None
    return found


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"strategy": {"dp": 2, "fsdp": -1}, "snapshot": {"keep": 2}},
        {"checkpointing": 2, "compile": "eager"},
        {"checkpointing": "selective", "compile": False, "pipeline": {"split": [1, 2]}},
        {"ema": {"decay": 0.9}, "on_nan": "rollback", "on_oom": "stop"},
        {"schedule": "wsd", "decay_steps": 5, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "kernel": "foreach"},
    ],
)
def test_what_is_set_is_handed_to_the_workers_and_nothing_else(values: dict[str, Any]) -> None:
    found = parse(str(values).replace("False", "false"))
    assert found.values == values
    assert found.config == load(found.values, argv=[], environ={})


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ("{strategy: {sp: 2}}", "train.strategy.sp"),
        ("{strategy: {dp: 0}}", "train.strategy.dp"),
        ("{strategy: dpp}", "train.strategy"),
        ("{lr: 0}", "train.lr"),
        ("{lr: .inf}", "train.lr"),
        ("{beta1: 1}", "train.beta1"),
        ("{steps: true}", "train.steps"),
        ("{steps: 99999999999999999999}", "train.steps"),
        ("{snapshot: {kep: 1}}", "train.snapshot.kep"),
        ("{pipeline: {split: [2, 0]}}", "train.pipeline.split[1]"),
        ("{wandb: ''}", "train.wandb"),
        ("{steps: 1, epochs: 1}", "train"),
    ],
)
def test_a_mistake_is_refused_at_its_key(train: str, key: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(train)
    assert caught.value.key == key


def test_all_mistakes_are_told_at_once_with_their_lines() -> None:
    text = SCRIPT + "train:\n  lr: 0\n  ema: {decay: 2}\ncluster: {slots: 0}\n"
    with pytest.raises(SpecError) as caught:
        parse_spec(text, source="dtctl.yaml", base_dir=Path())
    assert [f"dtctl.yaml:{line}:" in caught.value.message for line in (3, 4, 5)] == [True] * 3


@pytest.mark.parametrize("place", ["s3://key:hidden@bucket/run", "abfs://box/run?sig=hidden"])
def test_a_secret_in_a_url_is_refused_and_not_shown(place: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(f"{{snapshot: {{dir: '{place}'}}}}")
    assert caught.value.key == "train.snapshot.dir"
    assert "hidden" not in caught.value.message
    assert parse("{snapshot: {dir: 'abfs://box@account.dfs.core.windows.net/run'}}").config.snapshot.dir


SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["", "auto", "x", "ddp"])
KEYS = st.sampled_from(["strategy", "lr", "steps", "clip_norm", "compile", "checkpointing", "data_workers", "wandb"])


@example({"lr": float(2**63)})
@given(st.dictionaries(KEYS, SCALARS | st.dictionaries(st.sampled_from(["dp", "tp", "x"]), SCALARS, max_size=2)))
def test_what_the_spec_takes_the_workers_take(values: dict[str, Any]) -> None:
    try:
        section = make_train_section().model_validate(values).model_dump(exclude_none=True, exclude_unset=True)
    except ValueError:
        return
    assert Train.build_section(section).config == load(section, argv=[], environ={})
    assert TrainConfig() == load({}, argv=[], environ={})
