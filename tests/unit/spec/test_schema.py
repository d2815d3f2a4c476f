from dtctl.spec.model import Section, Spec
from dtctl.spec.schema import documentation, json_schema


def test_every_key_is_documented() -> None:
    texts = documentation()
    undocumented = [
        f"{model.__name__}.{name}"
        for model in Section.__subclasses__()
        for name in model.model_fields
        if not texts[model.__name__].get(name) and name != "base_dir"
    ]
    assert undocumented == []


def test_the_schema_is_that_of_the_spec() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Spec.model_fields) - {"base_dir"}
    assert "torchrun (default)" in schema["$defs"]["Job"]["properties"]["kind"]["description"]
