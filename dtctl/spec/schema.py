"""The JSON Schema of a spec, with the documentation of every key, for editors."""

from __future__ import annotations

from typing import Any

from dtctl.spec.model import Spec


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `dtctl.yaml`."""
    schema = Spec.model_json_schema()
    schema["properties"].pop("base_dir", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "dtctl.yaml"}
