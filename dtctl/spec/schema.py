"""The JSON Schema of a spec, with the documentation of every key, for editors."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

from dtctl.spec import model
from dtctl.spec.train_section import make_train_section
from dtctl.train import config, mesh

FIELDS = {"from": "source"}
"""Keys that are no names in Python, and their fields."""


def documentation() -> dict[str, dict[str, str]]:
    """Section class -> key -> the text under the field, on one line.

    pydantic can read these texts itself (`use_attribute_docstrings`), but does so whenever the classes are made, which
    would be at every command.
    """
    keys: dict[str, dict[str, str]] = {}
    for module in (model, config, mesh):
        for section in ast.parse(inspect.getsource(module)).body:
            if not isinstance(section, ast.ClassDef):
                continue
            fields = keys.setdefault(section.name.removesuffix("Config"), {})
            for field, below in pairwise(section.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        fields[name] = " ".join(text.split())
    return keys


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `dtctl.yaml`."""
    schema = model.Spec.model_json_schema()
    train = make_train_section().model_json_schema()
    definitions = {**schema["$defs"], **train.pop("$defs"), "Train": train}
    schema["$defs"] = dict(sorted(definitions.items()))
    schema["properties"]["train"] = {"anyOf": [{"$ref": "#/$defs/Train"}, {"type": "null"}], "default": None}
    del schema["properties"]["base_dir"]
    texts = documentation()
    for name, section in [("Spec", schema), *schema["$defs"].items()]:
        for key, value in section["properties"].items():
            value["description"] = texts[name].get(key) or texts[name][FIELDS[key]]
    # What the sections take in other words and put right before pydantic sees it.
    entry = schema["$defs"]["NodeEntry"]
    entry["properties"]["host"] = {"type": "string", "minLength": 1, "description": "Alias of `name`."}
    entry["oneOf"] = [{"required": entry.pop("required")}, {"required": ["host"]}]
    schema["$defs"]["Cluster"]["properties"]["nodes"]["anyOf"].append({"type": "string", "minLength": 1})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "dtctl.yaml"}
