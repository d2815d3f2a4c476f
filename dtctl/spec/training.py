"""The `train:` section of a spec.

Most jobs have none: its keys, and pydantic's classes for them, are only loaded when a spec has the section.
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
    """Section `train` of a spec: the keys that it sets, and the configuration that follows from them."""

    values: Mapping[str, Any]
    """Keys that the section sets, as plain data."""
    config: TrainConfig
    """Configuration of the training run, with dtctl's defaults for all keys that are not set."""

    @classmethod
    def build_section(cls, values: Mapping[str, Any]) -> Train:
        """Return the section that sets these keys.

        Raises:
            SpecError: a key or a value is wrong, or keys exclude each other.
        """
        from dtctl.train import settings
        from dtctl.train.config import TrainConfig

        return cls(values, settings.build(TrainConfig, values, at="train", where="the spec"))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that checks the section key by key, then as a whole."""
        return core_schema.no_info_plain_validator_function(
            _check_train,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda train: dict(train.values)),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return an empty schema, which schema.py replaces by the classes that check the section."""
        return {}


def _check_train(values: object) -> Train:
    """Return the checked section; pydantic prefixes its problems with `train`."""
    from dtctl.spec.train_section import make_train_section

    section = make_train_section().model_validate(values)
    try:
        return Train.build_section(section.model_dump(exclude_none=True, exclude_unset=True))
    except SpecError as exc:  # pydantic requires a ValueError, and adds the key
        raise ValueError(exc.message) from None
