"""The JSON Schema of a spec, with the documentation of every key, for editors."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from dtctl.spec import model


def documentation() -> dict[str, dict[str, str]]:
    """Section class -> key -> the text under the field in model.py.

    pydantic can read these texts itself (`use_attribute_docstrings`), but does so whenever the classes are made, which
    would be at every command.
    """
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(model)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found.setdefault(node.name, {})
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                fields[field.target.id] = inspect.cleandoc(text.value.value)
    return found


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `dtctl.yaml`."""
    schema = model.Spec.model_json_schema()
    schema["properties"].pop("base_dir", None)
    texts = documentation()
    for name, section in [("Spec", schema), *schema["$defs"].items()]:
        for key, value in section.get("properties", {}).items():
            if key in texts.get(name, {}):
                value["description"] = texts[name][key]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "dtctl.yaml"}
