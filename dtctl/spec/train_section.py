"""Sections of pydantic with the keys of dtctl/train/config.py, which the workers read.

With them, mistakes below `train:` are reported with their line, together with all other mistakes in a spec.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, StrictBool, create_model

from dtctl.spec.section import Section
from dtctl.train import settings
from dtctl.train.config import TrainConfig


def make_train_section() -> type[Section]:
    """Return pydantic's model of the `train:` section, which is made at the first call."""
    return _section_of(TrainConfig)


@cache
def _section_of(config: type) -> type[Section]:
    """Return the section with the fields of a dataclass as keys; the job's script decides about unset keys."""
    hints = get_type_hints(config)
    keys: dict[str, Any] = {}
    for field in fields(config):
        annotation = _build_field_annotation(hints[field.name], field.metadata)
        # Editors show the default that holds if the script does not set the value.
        schema_extra = {} if field.default is MISSING else {"default": field.default}
        optional = annotation | None if annotation is not Any else Any
        keys[field.name] = (optional, Field(default=None, json_schema_extra=schema_extra))
    return create_model(config.__name__.removesuffix("Config"), __base__=Section, __doc__=config.__doc__, **keys)


def _build_field_annotation(hint: Any, rules: Mapping[str, Any]) -> Any:
    """Return the pydantic type of a field with this hint and `metadata`; see `dtctl.train.settings.build`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return reduce(or_, (_build_field_annotation(option, rules) for option in inner))
    if is_dataclass(hint):
        return _section_of(hint)  # type: ignore[arg-type]
    if origin is Mapping:
        return _section_of(rules["section"]) if "section" in rules else dict[str, _build_field_annotation(inner[1], {})]  # type: ignore[misc]
    if origin is tuple:
        return list[_build_field_annotation(inner[0], rules)]  # type: ignore[misc]
    if hint in (int, float):
        limits = {pydantic: rules[ours] for ours, pydantic in _LIMITS.items() if ours in rules}
        finite = {"allow_inf_nan": False} if hint is float else {"le": settings.MOST}
        return _add_check_validator(Annotated[hint, Field(strict=True, **limits, **finite)], rules)
    if hint is bool:
        return StrictBool
    if hint is str:
        return _add_check_validator(Annotated[str, Field(min_length=1)] if rules.get("not_empty") else str, rules)
    return hint


_LIMITS = {"at_least": "ge", "above": "gt", "below": "lt"}


def _add_check_validator(annotation: Any, rules: Mapping[str, Any]) -> Any:
    check: Callable[[Any], None] | None = rules.get("check")
    if check is None:
        return annotation

    def check_value(value: Any) -> Any:
        check(value)
        return value

    return Annotated[annotation, AfterValidator(check_value)]
