from dtctl.spec.model import Section, Spec
from dtctl.spec.schema import json_schema


def test_every_key_is_documented() -> None:
    undocumented = [
        f"{model.__name__}.{name}"
        for model in Section.__subclasses__()
        for name, field in model.model_fields.items()
        if not field.description and name != "base_dir"
    ]
    assert undocumented == []


def test_the_schema_is_that_of_the_spec() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Spec.model_fields) - {"base_dir"}
    assert "torchrun (default)" in schema["$defs"]["Job"]["properties"]["kind"]["description"]
