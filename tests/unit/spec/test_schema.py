from typing import Any

from dtctl.spec.model import Spec
from dtctl.spec.schema import build_json_schema, collect_key_documentation
from dtctl.spec.section import Section

SCHEMA = build_json_schema()


def properties(section: str) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA["$defs"][section]["properties"]
    return found


def test_every_key_is_documented() -> None:
    texts = collect_key_documentation()
    undocumented = [
        f"{model.__name__}.{name}"
        for model in Section.__subclasses__()
        for name in model.model_fields
        if not texts[model.__name__].get(name, "").endswith(".") and name != "base_dir"
    ]
    assert undocumented == []


def test_the_schema_is_that_of_the_spec() -> None:
    assert set(SCHEMA["properties"]) == set(Spec.model_fields) - {"base_dir"}
    assert SCHEMA["additionalProperties"] is False
    assert set(SCHEMA["$defs"]) == {model.__name__ for model in Section.__subclasses__()} - {"Spec"}
    assert "torchrun (default)" in properties("Job")["kind"]["description"]
    assert SCHEMA["properties"]["train"]["description"] == "Read by `dtctl.runtime` in the workers."


def test_editors_accept_what_dtctl_accepts() -> None:
    assert properties("Job")["env"]["additionalProperties"]["type"] == ["string", "number", "boolean"]
    assert {"type": "string", "minLength": 1} in properties("Cluster")["nodes"]["anyOf"]
    assert properties("Job")["command"]["anyOf"][0]["type"] == ["array", "string"]
    assert SCHEMA["$defs"]["NodeEntry"]["oneOf"] == [{"required": ["name"]}, {"required": ["host"]}]
    assert properties("NodeEntry")["host"]["description"] == "Alias of `name`."
