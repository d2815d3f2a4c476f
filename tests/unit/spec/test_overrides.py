from pathlib import Path
from typing import Any

import pytest

from dtctl.errors import SpecError
from dtctl.spec.load import parse_spec
from dtctl.spec.model import NodeEntry, Spec

TEXT = "cluster: {transport: ssh, nodes: [a, {name: b}], slots: 1}\njob: {script: a.py, args: [x, y]}\n"


def parse(*overrides: str, text: str = TEXT) -> Spec:
    return parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"), overrides=overrides)


def train(*overrides: str) -> dict[str, Any]:
    return dict(parse(*overrides).settings)


def test_values_are_yaml() -> None:
    found = train("train.lr=1e-3", "train.steps=1e5", "train.model={layers: 4, act: gelu}", "train.model.heads=2")
    assert found == {"lr": 0.001, "steps": 100_000, "model": {"layers": 4, "act": "gelu", "heads": 2}}
    assert parse("job.args=[--a, 1.10]").job.args == ("--a", "1.10")
    assert parse("job.args[1]=z").job.args == ("x", "z")
    assert parse("job.files.push=false").job.files.push is False


def test_text_is_taken_as_typed() -> None:
    assert parse("job.env.A=1.10", "job.env.B=", "job.env.C=a=b", "job.env.D=010").job.env == {
        "A": "1.10",
        "B": "",
        "C": "a=b",
        "D": "010",
    }


def test_what_the_file_typed_does_not_outlive_an_override() -> None:
    text = "job: {script: a.py, args: [1.10, 2.20]}"
    assert parse("job.args=[7, z]", text=text).job.args == ("7", "z")
    assert parse("job.args[0]=3.30", text=text).job.args == ("3.30", "2.20")


def test_the_last_one_wins_and_null_is_the_default() -> None:
    assert parse("cluster.slots=2", "cluster.slots=3").cluster.slots == 3
    assert parse("cluster.slots=null").cluster.slots == "auto"
    assert train("train.steps=5", "train.steps=null", "train.epochs=1") == {"epochs": 1}


def test_nodes_get_keys_of_their_own() -> None:
    nodes = parse("cluster.nodes[0].slots=2", "cluster.nodes[1].env.A=1").cluster.nodes
    assert nodes == (NodeEntry(name="a", slots=2), NodeEntry(name="b", env={"A": "1"}))
    assert parse("cluster.nodes=c[1-2]").cluster.nodes == ("c[1-2]",)


def test_a_strategy_may_become_degrees() -> None:
    assert train("train.strategy=ddp", "train.strategy.dp=2", "train.strategy.pp=4")["strategy"] == {"dp": 2, "pp": 4}


def test_one_place_of_an_anchor_is_changed_and_not_the_others() -> None:
    text = "cluster: {nodes: [{name: a, env: &env {A: x}}, {name: b, env: *env}], transport: ssh}"
    a, b = parse("cluster.nodes[0].env.A=y", text=text).cluster.nodes  # type: ignore[misc]
    assert (a.env, b.env) == ({"A": "y"}, {"A": "x"})  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "train.lrr: unknown key; did you mean `lr`?"),
        ("train.lr=fast", "train.lr: expected a number, got 'fast'"),
        ("cluster.nodes[7].slots=1", "`cluster.nodes` has 2 entries, counted from 0, and no [7]"),
        ("cluster.nodes[2]=c", "`cluster.nodes` has 2 entries, counted from 0, and no [2]"),
        ("cluster.nodes.x=c", "`cluster.nodes` has 2 entries, counted from 0, and no [x]"),
        ("cluster.spares[0]=c", "`cluster.spares` has 0 entries, counted from 0, and no [0]"),
        ("cluster[0]=c", "`cluster` is not a list, and has no [0]"),
        ("job.script.x=1", "`job.script` has no keys, and so no `x`"),
        ("job.script.x.y=1", "`job.script` has no keys, and so no `x`"),
        ("job.env.A=[", "'[' is not a value: did not find expected node content"),
        ("job.env.A=a: b: c", "'a: b: c' is not a value: mapping values are not allowed in this context"),
        ("job.env.A=\udcff", "'\\udcff' is not a value: this is not UTF-8 text"),
        (
            "base_dir=/x",
            "base_dir: unknown key; allowed here: cluster, job, kubernetes, metrics, network, slurm, train",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_override(override: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(override)
    assert caught.value.message == message
    assert caught.value.where == f"--set {override}"


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("train.lr", "'train.lr' has no `=`", "write --set train.lr=1e-3"),
        ("train..lr=1", "'train..lr' is not a key", "write it like train.lr or cluster.nodes[0].slots"),
        ("=1", "'' is not a key", "write it like train.lr or cluster.nodes[0].slots"),
    ],
)
def test_what_is_no_override(override: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(override)
    assert (caught.value.message, caught.value.where, caught.value.hint) == (message, "--set", hint)
