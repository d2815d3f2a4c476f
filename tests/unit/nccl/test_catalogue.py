"""The catalogue of variables: whole, and near misses are found without calling real names mistakes."""

from __future__ import annotations

import pytest

from dtctl.nccl.catalogue import find_closest_name, load_variable_catalogue


def test_every_entry_says_what_it_means_and_dead_ones_what_to_use_instead() -> None:
    for variable in load_variable_catalogue().values():
        assert variable.meaning, variable.name
        assert (variable.kind == "live") == (not variable.instead), variable.name
        assert variable.default or variable.kind != "live", variable.name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SOCKET_IFNAM", "NCCL_SOCKET_IFNAME"),
        ("NCCL_IB_GIDINDEX", "NCCL_IB_GID_INDEX"),
        ("GLOO_SOCKET_IFNAMES", "GLOO_SOCKET_IFNAME"),
        ("NCCL_FOO", ""),
        ("TORCH_HOME", ""),
    ],
)
def test_a_misspelt_name_is_told_from_an_unknown_one(name: str, meant: str) -> None:
    assert find_closest_name(name) == meant
