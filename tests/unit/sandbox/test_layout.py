"""Names, addresses and files of a sandbox."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import SandboxError
from dtctl.sandbox import layout
from dtctl.sandbox.layout import MAX_NODES, Sandbox, SandboxNode
from tests.facts import raises

PATHS = st.text(min_size=1, max_size=30).map(lambda text: Path("/state") / text.replace("\0", "").replace("/", ""))


def sandbox_in(state: Path) -> Sandbox:
    nodes = tuple(SandboxNode(name=f"node{n}", address=f"10.1.2.{n}", index=n, pid=100 + n) for n in (1, 2))
    return Sandbox(
        name="main", state_dir=str(state), keeper=99, keeper_started=12345, rootless=True, user="me", bridge="dt0",
        bridge_address="10.1.2.254", nodes=nodes,
    )  # fmt: skip


@given(PATHS, st.integers(1, MAX_NODES))
def test_names_of_interfaces_fit_the_kernel(state: Path, index: int) -> None:
    for name in (layout.build_bridge_name(state), layout.link_name(state, index)):
        assert 0 < len(name) <= 15
        assert name.isalnum()


def test_hosts_have_addresses_of_their_own(tmp_path: Path) -> None:
    cards = {
        layout.build_mac_address(state, index) for state in (tmp_path / "a", tmp_path / "b") for index in range(1, 251)
    }
    assert len(cards) == 500
    first = int(next(iter(cards))[:2], 16)
    assert first & 2, "locally administered"
    assert not first & 1, "not a group's"
    assert layout.build_mac_address(tmp_path, 3) == layout.build_mac_address(tmp_path, 3)


@given(PATHS, st.lists(st.integers(0, 65_535), max_size=30))
def test_a_network_that_nobody_has_is_chosen(state: Path, numbers: list[int]) -> None:
    taken = [f"10.{number >> 8}.{number & 255}.0/24" for number in numbers]
    found = layout.choose_network(state, taken)
    assert found.prefixlen == 24
    assert found.subnet_of(ipaddress.ip_network("10.0.0.0/8"))
    assert str(found) not in taken
    assert layout.choose_network(state, taken) == found
    assert found.num_addresses - 2 > MAX_NODES


def test_large_networks_and_those_of_ipv6_are_seen_too(tmp_path: Path) -> None:
    first = layout.choose_network(tmp_path, [])
    assert layout.choose_network(tmp_path, ["fe80::/64", "192.168.0.0/16"]) == first
    wide = str(first.supernet(new_prefix=12))
    assert not layout.choose_network(tmp_path, [wide]).overlaps(ipaddress.ip_network(wide))
    assert layout.choose_network(tmp_path, [str(first[7])]) != first, "a single address is enough"
    with raises(SandboxError, "network free"):
        layout.choose_network(tmp_path, ["10.0.0.0/8"])


def test_the_routes_of_this_machine() -> None:
    text = '[{"dst": "default", "gateway": "1.1.1.1"}, {"dst": "10.0.0.0/24"}, {"dst": "10.9.9.9"}, {}]'
    assert layout.parse_routes(text) == ["10.0.0.0/24", "10.9.9.9"]
    assert layout.parse_routes("") == []


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    wanted = sandbox_in(tmp_path)
    layout.write_sandbox_state(wanted)
    assert layout.load(tmp_path) == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["sandbox.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"nodes": 3}', '{"name": "x", "nodes": []}'])
def test_what_is_damaged_is_no_sandbox(tmp_path: Path, text: str) -> None:
    assert layout.load(tmp_path) is None
    (tmp_path / "sandbox.json").write_text(text)
    assert layout.load(tmp_path) is None


def test_hosts_by_name(tmp_path: Path) -> None:
    sandbox = sandbox_in(tmp_path)
    assert sandbox.node("node2").address == "10.1.2.2"
    assert sandbox.peer("node2") == sandbox.node("node2")
    assert sandbox.peer("control").address == sandbox.bridge_address
    with raises(SandboxError, "node3") as caught:
        replace(sandbox).peer("node3")
    assert caught.value.hint == "its hosts are node1, node2"
    with raises(SandboxError, "nod1") as caught:
        sandbox.node("nod1")
    assert caught.value.hint == "did you mean node1?"


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", ".", "x" * 41, "$(id)"])
def test_names_that_no_sandbox_can_have(name: str) -> None:
    with raises(SandboxError, "name sandbox"):
        layout.build_state_dir(name)


def test_where_a_sandbox_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DTCTL_SANDBOX_DIR", str(tmp_path))
    assert layout.build_state_dir("main-1_a") == tmp_path / "main-1_a"
    monkeypatch.delenv("DTCTL_SANDBOX_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert layout.build_state_dir("x") == tmp_path / "state" / "dtctl" / "sandbox" / "x"
    monkeypatch.delenv("DTCTL_SANDBOX", raising=False)
    assert layout.choose_default_name() == "default"
