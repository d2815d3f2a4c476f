"""The `train:` section of a spec.

Most jobs have none: its keys, and pydantic's classes for them, are loaded when a spec has the section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from dtctl.errors import SpecError

if TYPE_CHECKING:
    from dtctl.train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Train:
    """The `train:` section: what the spec sets, and what that means where the job's script sets nothing itself."""

    values: Mapping[str, Any]
    """The keys that are set, plain data."""
    config: TrainConfig
    """The same with dtctl's defaults for all others."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Train:
        """Return the section that sets these keys.

        Raises:
            SpecError: a key or a value is wrong, or keys exclude each other.
        """
        from dtctl.train import settings
        from dtctl.train.config import TrainConfig

        return cls(values, settings.build(TrainConfig, values, at="train", where="the spec"))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the section key by key, then as a whole."""
        return core_schema.no_info_plain_validator_function(
            _check_train,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda train: dict(train.values)),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Leave the place to schema.py, which puts the classes that check the section there."""
        return {}


def _check_train(values: object) -> Train:
    """Return the section; pydantic puts the place of `train:` before those of the mistakes."""
    from dtctl.spec.train_section import make_train_section

    section = make_train_section().model_validate(values)
    try:
        return Train.of(section.model_dump(exclude_none=True, exclude_unset=True))
    except SpecError as exc:  # pydantic requires a ValueError, and adds the place
        raise ValueError(exc.message) from None
