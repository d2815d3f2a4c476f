import json
import sys
from pathlib import Path

import pytest

from dtctl.errors import SpecError
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import NodeSpec, join_gres, resolve_nodes


def resolve(text: str, base_dir: Path = Path("/project")) -> tuple[NodeSpec, ...]:
    return resolve_nodes(parse_spec(text, source="dtctl.yaml", base_dir=base_dir))


def ssh(nodes: str, more: str = "") -> str:
    return f"cluster:\n  transport: ssh\n  nodes:{nodes}\n{more}"


def error(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        resolve(text)
    assert caught.value.exit_code == 3
    return caught.value


def test_entries_win_over_the_cluster() -> None:
    plain, _, big = resolve(
        "cluster: {transport: ssh, slots: 4, user: me, port: 2222, python: /py, workdir: /data, nodes: [gpu[1-2], "
        "{name: big, address: 10.0.0.9, slots: 8, user: you, port: 22, python: /other, workdir: /big, env: {A: 1.10}}]}"
        .replace("gpu[1-2]", "'gpu[1-2]'")
    )  # fmt: skip
    assert plain == NodeSpec(
        name="gpu1", address="gpu1", slots=4, user="me", port=2222, python="/py", workdir="/data", env={}
    )
    assert big == NodeSpec(
        name="big", address="10.0.0.9", slots=8, user="you", port=22, python="/other", workdir="/big", env={"A": "1.10"}
    )


def test_a_range_with_keys_and_the_other_word_for_name() -> None:
    nodes = resolve(ssh(" [{host: 'gpu[08-10]', slots: 2}, {name: c}]"))
    assert [(node.name, node.slots) for node in nodes] == [("gpu08", 2), ("gpu09", 2), ("gpu10", 2), ("c", "auto")]


def test_one_text_stands_for_a_list() -> None:
    assert [node.name for node in resolve(ssh(" a,gpu[1-2]"))] == ["a", "gpu1", "gpu2"]


def test_numbers_are_names_as_they_are_typed() -> None:
    assert [node.name for node in resolve(ssh(" [07, 8, 1.10, {host: 9}]"))] == ["07", "8", "1.10", "9"]


def test_a_user_before_the_name() -> None:
    nodes = resolve(ssh(" ['me@gpu[1-2]', gpu3]", "  user: you\n"))
    assert [(node.user, node.name, node.address) for node in nodes] == [
        ("me", "gpu1", "gpu1"),
        ("me", "gpu2", "gpu2"),
        ("you", "gpu3", "gpu3"),
    ]


def test_a_name_that_stands_twice_names_both_places() -> None:
    found = error(ssh('\n    - "gpu[1-3]"\n    - x\n    - {name: gpu2}'))
    assert found.message == (
        "node gpu2 is listed twice: in cluster.nodes[0] (dtctl.yaml:4) and in cluster.nodes[2] (dtctl.yaml:6)"
    )
    assert (found.where, found.key) == ("dtctl.yaml:6", "cluster.nodes[2]")
    assert found.hint == "give the number of workers on a node as `slots`"
    assert error(ssh(" [a, A]")).key == "cluster.nodes[1]"
    assert error(ssh(" [a, me@a]")).key == "cluster.nodes[1]"


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=x", "a b", "../x", "a/b", "a\\b", ".", ".hidden", "a\nb", "a\x7fb", "a\u200bb", "a\u202eb",
     "a\xa0b", "@", "me@", "é" * 150],
)  # fmt: skip
def test_names_that_could_do_harm_are_refused(name: str) -> None:
    found = error(ssh(f"\n  - x\n  - {json.dumps(name)}"))
    assert found.message == f"{name.rpartition('@')[2]!r} cannot be the name of a node"
    assert (found.where, found.key) == ("dtctl.yaml:5", "cluster.nodes[1]")
    assert (
        found.hint
        == "a name begins with a letter or a digit and has no space, slash, bracket, comma or control character"
    )


@pytest.mark.parametrize("name", ["a", "gpu-1.example.org", "10.0.0.1", "fe80::1%eth0", "_x", "größe", "a;b", "node'1"])
def test_names_that_can_be_used(name: str) -> None:
    assert resolve(ssh(f" [{json.dumps(name)}]"))[0].name == name


@pytest.mark.parametrize(("key", "value"), [("address", "-oX=y"), ("address", "a b"), ("user", "-l"), ("user", "a\tb")])
def test_words_that_programs_would_take_for_options(key: str, value: str) -> None:
    found = error(ssh(f"\n  - {{name: a, {key}: {json.dumps(value)}}}"))
    assert found.message == f"{value!r} cannot be the {key} of a node"
    assert (found.where, found.key) == ("dtctl.yaml:4", f"cluster.nodes[0].{key}")


def test_a_range_that_is_wrong() -> None:
    found = error(ssh("\n  - a\n  - gpu[3-1]"))
    assert found.message == "'gpu[3-1]' is not a list of nodes: the range '3-1' runs backwards in '[3-1]'"
    assert (found.where, found.key, found.hint) == ("dtctl.yaml:5", "cluster.nodes[1]", "write it like gpu[01-04,7]")


def test_one_address_for_a_range() -> None:
    found = error(ssh("\n  - {name: 'a[1-2]', address: 10.0.0.1}"))
    assert found.message == "one address cannot belong to a range of nodes"
    assert (found.where, found.key) == ("dtctl.yaml:4", "cluster.nodes[0].address")


def test_the_local_machine_needs_no_name() -> None:
    (node,) = resolve("cluster: {transport: local}")
    assert (node.name, node.address, node.python) == ("localhost", "127.0.0.1", sys.executable)


def test_a_number_of_hosts_is_for_the_sandbox() -> None:
    assert [node.name for node in resolve("cluster: {transport: sandbox, nodes: 2}")] == ["node1", "node2"]
    assert [node.name for node in resolve("cluster: {transport: sandbox}")] == ["node1", "node2", "node3"]
    found = error(ssh(" 2"))
    assert found.message == "a number of nodes is for the sandbox; transport ssh needs their names"
    assert (found.where, found.key) == ("dtctl.yaml:3", "cluster.nodes")
    assert found.hint == "use `transport: sandbox` for virtual hosts on this machine"


def test_the_sandbox_has_fewer_hosts_than_slurm() -> None:
    found = error("cluster: {transport: sandbox, nodes: 251}")
    assert found.message == "the sandbox has at most 250 hosts, and the spec wants 251"
    assert len(resolve("cluster: {transport: slurm, nodes: 1000}")) == 1000


def test_ssh_without_nodes() -> None:
    found = error("job: {script: a.py}\ncluster: {transport: ssh}")
    assert found.message == "transport ssh needs nodes, and the spec names none"
    assert (found.where, found.key) == ("dtctl.yaml:2", "cluster.nodes")
    assert found.hint == 'for example `nodes: ["gpu[01-04]"]`'


def test_a_hostfile_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# the cluster\na slots=4\nb slots=8 max_slots=8  # big\nc:2\nme@d\n")
    nodes = resolve("cluster: {transport: ssh, hostfile: hosts, slots: 1}", tmp_path)
    assert [(node.name, node.slots, node.user) for node in nodes] == [
        ("a", 4, None),
        ("b", 8, None),
        ("c", 2, None),
        ("d", 1, "me"),
    ]


def test_a_name_that_stands_twice_in_a_hostfile_in_other_letters(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\nA\n")
    with pytest.raises(SpecError) as caught:
        resolve("cluster: {transport: ssh, hostfile: hosts}", tmp_path)
    assert caught.value.message == (
        f"node A is listed twice: in cluster.hostfile ({tmp_path}/hosts:1) and in cluster.hostfile ({tmp_path}/hosts:3)"
    )


def test_nodes_and_a_hostfile() -> None:
    found = error(ssh(" [a]", "  hostfile: hosts\n"))
    assert found.message == "`cluster.nodes` and `cluster.hostfile` are both set"
    assert (found.where, found.key, found.hint) == ("dtctl.yaml:4", "cluster.hostfile", "keep one of the two")


def test_an_interface_for_a_node_that_is_not_there() -> None:
    found = error(ssh(" ['gpu[1-2]']", "network: {interface: {gpu1: eth0, gpu3: eth1}}\n"))
    assert found.message == "network.interface names gpu3, which is not a node of the spec"
    assert (found.where, found.key, found.hint) == ("dtctl.yaml:4", "network.interface", "the nodes are gpu[1-2]")


def test_spares_and_the_least_number_of_nodes() -> None:
    assert len(resolve(ssh(" ['a[1-2]']", "  spares: ['b[1-2]']\n  min_nodes: 2\n"))) == 2
    own = error(ssh(" ['a[1-2]']", "  spares: [b, 'a[2-3]']\n"))
    assert (own.message, own.where, own.key) == ("node a2 cannot be its own spare", "dtctl.yaml:4", "cluster.spares[1]")
    assert error(ssh(" ['a[1-2]']", "  spares: [me@A2]\n")).message == "node A2 cannot be its own spare"
    twice = error(ssh(" ['a[1-2]']", "  spares: [b1, 'B[1-2]']\n"))
    assert (twice.message, twice.key) == ("spare node B1 is listed twice", "cluster.spares[1]")
    few = error(ssh(" ['a[1-2]']", "  min_nodes: 3\n"))
    assert few.message == "cluster.min_nodes is 3, and there are 2 nodes"
    assert few.where == "dtctl.yaml:4"


@pytest.mark.parametrize(
    ("requests", "joined"),
    [
        ((None, None), ""),
        (("gpu:8", "gpu:8"), "gpu:8"),
        (("gres/gpu=2", "gres/gpu=2"), "gres/gpu=2"),
        (("gpu:8", "gpu:4", None), "gpu:8"),
        (("gpu", "gpu:2", "gres/gpu=1"), "gpu:2"),
        (("gpu:a100:4", "gpu:a100:2,nic:1", "nic"), "gpu:a100:4,nic:1"),
    ],
)
def test_a_job_asks_for_the_most_that_a_node_needs(requests: tuple[str | None, ...], joined: str) -> None:
    assert join_gres(requests) == joined


@pytest.mark.parametrize("requests", [("gpu:a100:4", "gpu:h100:4"), ("gpu:a100:4", "gpu:2")])
def test_no_node_has_to_have_two_types_of_a_resource(requests: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=", ".join(requests)):
        join_gres(requests)


@pytest.mark.parametrize(
    ("slurm", "slots"),
    [
        ("gres: 'gpu:8'", 8),
        ("gres: gpu", 1),
        ("gres: 'gpu:a100:4,nic:1'", 4),
        ("gres: 'gres/gpu:2,gpu:h100:1'", 3),
        ("extra: {gpus-per-node: 'a100:4'}", 4),
        ("gres: 'nic:2'", "auto"),
        ("time: 1", "auto"),
    ],
)
def test_slots_under_slurm_are_the_gpus_that_the_job_asks_for(slurm: str, slots: object) -> None:
    text = f"cluster: {{transport: slurm, nodes: 1}}\nslurm: {{{slurm}}}\n"
    (node,) = resolve_nodes(parse_spec(text, source="dtctl.yaml", base_dir=Path()))
    assert node.slots == slots
