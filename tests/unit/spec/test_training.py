"""The `train:` section says what the runtime reads: the same keys, and what one takes the other takes."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from dtctl.runtime import config
from dtctl.runtime.config import TrainConfig, load
from dtctl.spec import training
from dtctl.spec.section import Section


def keys(cls: type) -> dict[str, Any]:
    """Every key of a dataclass, with a dataclass below it or not."""
    hints = get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        below = [
            option for option in (hints[field.name], *get_args(hints[field.name])) if dataclasses.is_dataclass(option)
        ]
        found[field.name] = keys(below[0]) if below else None  # type: ignore[arg-type]
    return found


def spec_keys(section: type[Section]) -> dict[str, Any]:
    found = {}
    for name, field in section.model_fields.items():
        options = (field.annotation, *get_args(field.annotation))
        below = [option for option in options if isinstance(option, type) and issubclass(option, Section)]
        found[name] = None if not below or name == "strategy" else spec_keys(below[0])
    return found


def test_the_keys_are_those_of_the_runtime() -> None:
    assert spec_keys(training.Train) == keys(TrainConfig)


@pytest.mark.parametrize(
    "values",
    [
        {"checkpointing": 2, "compile": "eager"},
        {"checkpointing": "selective", "compile": False},
        {"ema": {"decay": 0.9}, "on_nan": "rollback", "on_oom": "stop"},
        {"schedule": "wsd", "decay_steps": 5, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "kernel": "foreach"},
    ],
)
def test_what_the_spec_takes_the_runtime_takes(values: dict[str, Any]) -> None:
    settings = training.Train.model_validate(values).settings()
    assert settings == values
    built = load(settings, argv=[], environ={})
    for key, value in values.items():
        found = getattr(built, key)
        assert (dataclasses.asdict(found) | value if isinstance(value, dict) else found) == (
            dataclasses.asdict(found) if isinstance(value, dict) else value
        )
    assert config.TrainConfig() == load(training.Train().settings(), argv=[], environ={})


@pytest.mark.parametrize("place", ["s3://key:hidden@bucket/run", "abfs://box/run?sig=hidden"])
def test_a_secret_in_a_url_is_refused_and_not_shown(place: str) -> None:
    with pytest.raises(ValueError, match="no secrets in it") as caught:
        training.Snapshot(dir=place)
    assert training.Snapshot(dir="abfs://box@account.dfs.core.windows.net/run").dir
    assert "hidden" not in str(caught.value.errors(include_input=False))  # type: ignore[attr-defined]
