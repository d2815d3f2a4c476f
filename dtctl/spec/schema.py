"""JSON Schema of a spec, with the documentation of every key, for editors."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

from dtctl.spec import model
from dtctl.spec.train_section import make_train_section
from dtctl.train import config, mesh

FIELDS = {"from": "source"}
"""Keys of a spec that are not valid names in Python, with the names of their fields."""


def collect_key_documentation() -> dict[str, dict[str, str]]:
    """Return the texts below the fields: section class -> key -> text on one line.

    pydantic can read these texts itself (`use_attribute_docstrings`), but does so when it makes the classes, which
    happens at every command.
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


def build_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of `dtctl.yaml`."""
    schema = model.Spec.model_json_schema()
    definitions = schema["$defs"]
    # pydantic does not check these sections together with the spec.
    for section in (make_train_section(), model.Slurm, model.Kubernetes, model.Metrics):
        inner = section.model_json_schema()
        definitions |= {**inner.pop("$defs"), section.__name__: inner}
        reference = {"$ref": f"#/$defs/{section.__name__}"}
        schema["properties"][section.__name__.lower()] = {"anyOf": [reference, {"type": "null"}], "default": None}
    schema["$defs"] = dict(sorted(definitions.items()))
    del schema["properties"]["base_dir"]
    texts = collect_key_documentation()
    for name, section in [("Spec", schema), *schema["$defs"].items()]:
        for key, value in section["properties"].items():
            value["description"] = texts[name].get(key) or texts[name][FIELDS[key]]
    # Some sections accept other forms, which they convert before pydantic's checks.
    entry = schema["$defs"]["NodeEntry"]
    entry["properties"]["host"] = {"type": "string", "minLength": 1, "description": "Alias of `name`."}
    entry["oneOf"] = [{"required": entry.pop("required")}, {"required": ["host"]}]
    schema["$defs"]["Cluster"]["properties"]["nodes"]["anyOf"].append({"type": "string", "minLength": 1})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "dtctl.yaml"}
