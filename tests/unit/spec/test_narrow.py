"""`--nodes` with a spec: the nodes that remain, and what the spec says about the others."""

from pathlib import Path

import pytest

from dtctl.errors import SpecError
from dtctl.spec.load import dump_spec, parse_spec
from dtctl.spec.model import Spec
from dtctl.spec.narrow import narrow_nodes
from dtctl.spec.nodes import resolve_nodes, resolve_spares
from dtctl.spec.quick import build_quick_spec

REPEATED = "name each node once; `--slots N` sets the number of workers on a node"


def narrowed(cluster: str, text: str, more: str = "", base_dir: Path = Path("/project")) -> Spec:
    spec = parse_spec(f"cluster: {{{cluster}}}\njob: {{script: t.py}}\n{more}", source="dtctl.yaml", base_dir=base_dir)
    return narrow_nodes(spec, text)


def names(spec: Spec) -> list[str]:
    return [node.name for node in resolve_nodes(spec)]


def test_nodes_keep_the_order_and_the_keys_of_the_spec() -> None:
    entry = "{name: 'old[1-2]', slots: 2, python: /py, env: {A: x}}"
    cluster = f"transport: ssh, slots: 4, nodes: ['gpu[1-4]', 'me@big', {entry}]"
    spec = narrowed(cluster, "old2,gpu[3,2],big")
    nodes = {node.name: node for node in resolve_nodes(spec)}
    assert [*nodes] == ["gpu2", "gpu3", "big", "old2"]
    assert (nodes["gpu2"].slots, nodes["big"].user) == (4, "me")
    assert (nodes["old2"].slots, nodes["old2"].python, nodes["old2"].env) == (2, "/py", {"A": "x"})
    assert parse_spec(dump_spec(spec), source="copy", base_dir=Path("/project")) == spec


@pytest.mark.parametrize(
    ("cluster", "text"), [("transport: sandbox, nodes: 3", "node[2-3]"), ("transport: ssh, hostfile: hosts", "b")]
)
def test_nodes_that_the_spec_does_not_write_one_by_one(tmp_path: Path, cluster: str, text: str) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\n")
    spec = narrowed(cluster, text, base_dir=tmp_path)
    assert names(spec) in (["node2", "node3"], ["b"])
    assert resolve_nodes(spec)[0].slots in (3, "auto")
    assert parse_spec(dump_spec(spec), source="copy", base_dir=tmp_path) == spec


def test_what_the_spec_says_about_the_others_goes_with_them() -> None:
    cluster = "transport: ssh, nodes: [a, b, c], spares: [d, e], min_nodes: 3"
    spec = narrowed(cluster, "c,d", "network: {interface: {a: eth0, c: eth1}}")
    assert names(spec) == ["c", "d"]
    assert [node.name for node in resolve_spares(spec)] == ["e"]
    assert (spec.cluster.min_nodes, spec.network.interface) == (2, {"c": "eth1"})


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("gpu1,gpi2", "the spec has no node gpi2", "did you mean gpu2?"),
        ("quite-another", "the spec has no node quite-another", "the nodes are gpu[1-3]"),
        ("gpu1,gpu1", "node gpu1 is given twice", REPEATED),
        ("gpu[1-3],gpu2", "node gpu2 is given twice", REPEATED),
        ("gpu[1-", "'gpu[1-' is not a list of nodes: brackets do not match in 'gpu[1-'", "write it like gpu[01-04,7]"),
    ],
)
def test_unknown_nodes_are_named(text: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        narrowed("transport: ssh, nodes: ['gpu[1-3]']", text)
    if hint == REPEATED:
        with pytest.raises(SpecError, match=message):
            build_quick_spec(text, slots=1, argv=["t.py"], overrides=(), base_dir=Path("/project"))
    assert (caught.value.message, caught.value.where, caught.value.hint) == (message, "--nodes", hint)


def test_slurm_chooses_its_nodes_itself() -> None:
    with pytest.raises(SpecError, match="Slurm chooses the nodes") as caught:
        narrowed("transport: slurm, nodes: 4", "gpu1,gpu2")
    assert caught.value.hint == "`--set cluster.nodes=2 --set 'slurm.nodelist=gpu[1-2]'` asks for these nodes"
