"""Common base of all parts of a spec: closed, unchangeable, strict about numbers; and the types of their keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

P = TypeVar("P", str, Path)
_PATH_BYTES = 4095
_NAME_BYTES = 255

# Numbers are strict: pydantic would take `true` for 1 and the text "4" for 4. Where text is required, load.py restores
# numbers as they were typed; the JSON Schema, which editors use, has to allow for that.
Text = Annotated[str, Field(json_schema_extra={"type": ["string", "number", "boolean"]})]
"""Text; a number or a truth value is taken as it was typed."""
Word = Annotated[str, Field(min_length=1)]


def _check_length(path: P) -> P:
    """Refuse what no file system of Linux or macOS has room for, before something is done with it."""
    encoded = os.fsencode(path)
    if len(encoded) > _PATH_BYTES or any(len(name) > _NAME_BYTES for name in encoded.split(b"/")):
        raise ValueError(f"is longer than file systems take ({len(encoded):,} bytes)")
    return path


FilePath = Annotated[Path, AfterValidator(_check_length)]
"""Path of a file on this machine."""
PathText = Annotated[Word, AfterValidator(_check_length)]
"""The same as text, or a path on a node."""
"""Text that is not empty."""
MOST = (1 << 63) - 1
"""No count is larger than what the workers' programs can hold."""
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
        """Return the fields by the keys that a spec has for them: `from` is no name in Python."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, data: Any) -> Any:
        """Return a known key without a value means its default, as if it were absent."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.list_keys()}
