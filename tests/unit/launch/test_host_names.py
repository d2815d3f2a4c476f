"""How hosts call themselves, replaced by what the spec calls them, and nothing else replaced."""

from __future__ import annotations

import pytest

from dtctl.launch.records.host_names import HostNames

HOSTS = HostNames(
    {"gpu1": "ip-10-0-0-7.ec2.internal", "gpu2": "r2d2", "gpu3": "train", "a": "localhost", "b": "localhost", "n": "n"}
)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("connect to [ip-10-0-0-7.ec2.internal]:29500 failed", "connect to [gpu1]:29500 failed"),
        ("connect to [ip-10-0-0-7]:29500 failed", "connect to [gpu1]:29500 failed"),
        ("peer r2d2.cluster.local:1234 is gone", "peer gpu2:1234 is gone"),
        ("RuntimeError: r2d2 has no data", "RuntimeError: gpu2 has no data"),
        ("  host      : ip-10-0-0-7.ec2.internal", "  host      : gpu1"),
        ("  host      : train", "  host      : gpu3"),
        ("connect to [train]:1", "connect to [gpu3]:1"),
        ("r2d2 lost ip-10-0-0-7", "gpu2 lost gpu1"),
    ],
)
def test_a_hosts_own_name_gives_way(said: str, told: str) -> None:
    assert HOSTS.replace_names(said) == told


@pytest.mark.parametrize(
    "said",
    [
        "cannot train: train:3 of [train] is empty",
        "File /data/r2d2/x.py, r2d2.py, r2d2-old, my-r2d2, x.r2d2, me@r2d2, r2d2/x",
        "connect to [localhost]:29500 failed",
        "host      : localhost",
        "n, [n]:1 and host      : n",
        "",
    ],
)
def test_a_word_that_only_looks_like_a_host_stays(said: str) -> None:
    assert HOSTS.replace_names(said) == said


def test_hosts_that_are_called_like_each_others_nodes_are_told_apart() -> None:
    crossed = HostNames({"n1": "n2", "n2": "n1"})
    assert crossed.replace_names("n1 lost n2") == "n2 lost n1"
    assert (crossed.node_of("n1"), crossed.node_of("n3")) == ("n2", "n3")


def test_without_names_nothing_is_replaced() -> None:
    assert HostNames({}).replace_names("[gpu1]:1") == "[gpu1]:1"
    assert HostNames({"a": "not a name!"}).replace_names("not a name!") == "not a name!"
    assert HostNames({"a": "10.0.0.1"}).replace_names("[10.0.0.1]:5 and 10") == "[a]:5 and 10"
