"""Common base class of the sections of a spec, which is strict about keys and numbers, and types of keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

P = TypeVar("P", str, Path)
_PATH_BYTES = 4095
_NAME_BYTES = 255

# Numbers are strict: pydantic would read `true` as 1 and the text "4" as 4. Where text is required, load.py restores
# numbers in the user's notation; the JSON Schema, which editors use, has to allow numbers there.
Text = Annotated[str, Field(json_schema_extra={"type": ["string", "number", "boolean"]})]
"""Text; a number or a truth value becomes text in the user's notation."""
Word = Annotated[str, Field(min_length=1)]
"""Text that is not empty."""


def _check_length(path: P) -> P:
    """Refuse a path that is too long for every file system of Linux and macOS, before it is used."""
    encoded = os.fsencode(path)
    if len(encoded) > _PATH_BYTES or any(len(name) > _NAME_BYTES for name in encoded.split(b"/")):
        raise ValueError(f"is longer than file systems take ({len(encoded):,} bytes)")
    return path


FilePath = Annotated[Path, AfterValidator(_check_length)]
"""Path of a file on this machine."""
PathText = Annotated[Word, AfterValidator(_check_length)]
"""Path as text, on this machine or on a node."""
MOST = (1 << 63) - 1
"""Largest count, which the programs of the workers can still represent."""
Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
"""A whole number from 1."""
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=MOST)]
"""A whole number from 0."""
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
"""A TCP port."""
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
"""A number above 0."""
PositiveOrZero = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
"""A number from 0."""
Share = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
"""A number from 0 and below 1."""


class Section(BaseModel):
    """A part of the spec: closed, unchangeable, documented field by field (see schema.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def list_keys(cls) -> dict[str, FieldInfo]:
        """Return the fields by their keys in a spec; `from` is a keyword of Python, so its field has another name."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, data: Any) -> Any:
        """Drop known keys without a value, which then have their default."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.list_keys()}


class _CheckedOnDemand:
    """Marker of a section with its own validator, which pydantic builds when a spec has the section."""

    def __get_pydantic_core_schema__(self, section: type[Section], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema with the section's own validator; pydantic prefixes its problems with the key."""
        return core_schema.no_info_plain_validator_function(section.model_validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return an empty schema, which schema.py replaces by the schema of the section."""
        return {}


SectionType = TypeVar("SectionType", bound=Section)
RareSection = Annotated[SectionType, _CheckedOnDemand()]
"""A section that few specs have. Building its validator takes longer than reading a spec."""
