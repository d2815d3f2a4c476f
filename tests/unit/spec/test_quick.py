from pathlib import Path

import pytest

from dtctl.errors import SpecError
from dtctl.spec.load import dump_spec, parse_spec
from dtctl.spec.model import Spec
from dtctl.spec.quick import build_quick_spec


def quick(nodes: str, *argv: str, slots: int | None = None, overrides: tuple[str, ...] = ()) -> Spec:
    return build_quick_spec(nodes, slots=slots, argv=argv, overrides=overrides, base_dir=Path("/here"))


def test_a_script() -> None:
    spec = quick("a,gpu[1-2]", "src/train.py", "--lr", "1e-3", "", slots=2, overrides=("job.env.A=1.10",))
    assert (spec.cluster.transport, spec.cluster.nodes, spec.cluster.slots) == ("ssh", ("a", "gpu1", "gpu2"), 2)
    assert (spec.job.name, spec.job.script, spec.job.args) == ("train", "src/train.py", ("--lr", "1e-3", ""))
    assert spec.job.env == {"A": "1.10"}
    assert spec.base_dir == Path("/here")


def test_a_command_on_this_machine() -> None:
    spec = quick("localhost", "hostname", "-f")
    assert spec.cluster.transport == "local"
    assert spec.job.command == ("hostname", "-f")


def test_it_can_be_written_down() -> None:
    spec = quick("a", "x.py", "0x10", "NO", "1_0", "é\n'\"", overrides=("train.lr=1e-5",))
    assert parse_spec(dump_spec(spec), source="spec.yaml", base_dir=Path("/here")) == spec


def test_what_is_wrong() -> None:
    with pytest.raises(SpecError) as nodes:
        quick("gpu[1-", "x.py")
    assert (nodes.value.message, nodes.value.where) == (
        "'gpu[1-' is not a list of nodes: brackets do not match in 'gpu[1-'",
        "--nodes",
    )
    with pytest.raises(SpecError) as word:
        quick("a", "x.py", "\udcff")
    assert (word.value.message, word.value.where) == ("'\\udcff' is not UTF-8 text", "the command line")
    with pytest.raises(SpecError) as slots:
        quick("a", "x.py", slots=0)
    assert (slots.value.message, slots.value.where) == (
        "cluster.slots: expected at least 1 or 'auto', got 0",
        "the command line",
    )
    with pytest.raises(SpecError) as override:
        quick("a", "x.py", overrides=("train.lrr=1",))
    assert override.value.where == "--set train.lrr=1"
