from pathlib import Path

import pytest

from dtctl.errors import SpecError
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import NodeSpec, resolve_nodes


def resolve(text: str, base_dir: Path = Path("/project")) -> tuple[NodeSpec, ...]:
    return resolve_nodes(parse_spec(text, source="dtctl.yaml", base_dir=base_dir))


def test_entries_win_over_the_cluster() -> None:
    nodes = resolve(
        "cluster:\n  transport: ssh\n  slots: 4\n  user: me\n  nodes:\n"
        "    - gpu[1-2]\n    - {name: big, address: 10.0.0.9, slots: 8, user: you, env: {A: 1}}\n"
    )
    assert [node.name for node in nodes] == ["gpu1", "gpu2", "big"]
    assert [node.slots for node in nodes] == [4, 4, 8]
    assert [node.user for node in nodes] == ["me", "me", "you"]
    assert nodes[2].address == "10.0.0.9"
    assert nodes[2].env == {"A": "1"}


def test_a_name_that_stands_twice_names_both_places() -> None:
    with pytest.raises(SpecError) as caught:
        resolve("cluster: {transport: ssh, nodes: ['gpu[1-3]', gpu2]}")
    assert caught.value.message == "node gpu2 stands twice: in cluster.nodes[0] and in cluster.nodes[1]"


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "../x", "a/b", ".", "", "a\nb", "a\x00b"])
def test_names_that_could_do_harm_are_refused(name: str) -> None:
    import json

    with pytest.raises(SpecError):
        resolve(f"cluster: {{transport: ssh, nodes: [{json.dumps(name)}]}}")


def test_the_local_machine_needs_no_name() -> None:
    (node,) = resolve("cluster: {transport: local}")
    assert (node.name, node.address) == ("localhost", "127.0.0.1")


def test_a_number_of_hosts_is_for_the_sandbox() -> None:
    assert [node.name for node in resolve("cluster: {transport: sandbox, nodes: 2}")] == ["node1", "node2"]
    with pytest.raises(SpecError, match="needs their names"):
        resolve("cluster: {transport: ssh, nodes: 2}")


def test_ssh_without_nodes() -> None:
    with pytest.raises(SpecError, match="needs nodes, and the spec names none"):
        resolve("cluster: {transport: ssh}")


def test_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# the cluster\na slots=4\nb slots=8 max_slots=8  # big\nc:2\nd\n")
    nodes = resolve("cluster: {transport: ssh, hostfile: hosts, slots: 1}", tmp_path)
    assert [(node.name, node.slots) for node in nodes] == [("a", 4), ("b", 8), ("c", 2), ("d", 1)]


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a slots=x\n", "slots=x is not a number of workers", 1),
        ("a\na slots=2\n", "node a stands twice in the hostfile", 2),
        ("a gpus=4\n", "'gpus=4' means nothing in a hostfile", 1),
    ],
)
def test_a_wrong_hostfile(tmp_path: Path, text: str, message: str, line: int) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(SpecError) as caught:
        resolve("cluster: {transport: ssh, hostfile: hosts}", tmp_path)
    assert caught.value.message == message
    assert caught.value.where == f"{tmp_path / 'hosts'}:{line}"


def test_a_hostfile_that_is_not_there_is_an_error_and_not_an_empty_cluster(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the hostfile cannot be read"):
        resolve("cluster: {transport: ssh, hostfile: hosts}", tmp_path)
