"""State by names: optimizers there and back, and a digest that is of the values alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.state import digest, load_model, load_optimizer, optimizer_tree, raw, tensors
from tests.facts import raises


def trained(kind: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = kind(
        [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[1:].parameters())}], **settings
    )
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "settings"), [(torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})]
)
def test_there_and_back(kind: Any, settings: dict[str, Any]) -> None:
    model, optimizer = trained(kind, **settings)
    tree = optimizer_tree(model, optimizer)
    assert tree["groups"][0]["params"] == ["0.weight", "0.bias"]
    fresh = type(optimizer)(
        [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters())}], **settings
    )
    load_optimizer(model, fresh, tree)
    again = optimizer_tree(model, fresh)
    assert dict(tensors(again["state"])).keys() == dict(tensors(tree["state"])).keys()
    assert digest(model.state_dict(), again) == digest(model.state_dict(), tree)


def test_another_optimizer_is_refused() -> None:
    model, optimizer = trained()
    tree = optimizer_tree(model, optimizer)
    with raises(SnapshotError, "parameters"):
        load_optimizer(model, torch.optim.AdamW(model[:2].parameters()), tree)


def test_groups_may_be_cut_otherwise() -> None:
    model, optimizer = trained()
    tree = optimizer_tree(model, optimizer)
    fresh = torch.optim.AdamW(reversed(list(model.parameters())))
    load_optimizer(model, fresh, tree)
    assert digest(model.state_dict(), optimizer_tree(model, fresh)) == digest(model.state_dict(), tree)


def test_another_model_is_refused() -> None:
    model, _ = trained()
    with raises(SnapshotError, "model"):
        load_model(nn.Linear(3, 4), model.state_dict())


def test_the_digest_is_of_names_types_shapes_and_bytes() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    empty: dict[str, Any] = {"state": {}}
    same = {"b": torch.ones(2), "a": torch.zeros(3, 2).T}
    assert digest(base, empty) == digest(same, empty)
    others: list[dict[str, torch.Tensor]] = [
        {"a": torch.zeros(2, 3), "c": torch.ones(2)},
        {"a": torch.zeros(3, 2), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3), "b": torch.tensor([1.0, 1.0 + 2**-23])},
    ]
    assert len({digest(other, empty) for other in [base, *others]}) == 5
    assert digest(base, {"state": {"a": {"step": torch.tensor(1.0)}}}) != digest(base, empty)


def test_the_digest_is_fixed_for_good() -> None:
    """Digests are compared between versions: another number here breaks that."""
    found = digest(
        {"w": torch.arange(6.0).view(2, 3)}, {"state": {"w": {"exp_avg": torch.ones(1, dtype=torch.bfloat16)}}}
    )
    assert found == "235c3cbf471b9eec0d47b7932ae3efd4fe9d99fee7683d0467c7118e450793cf"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_raw_bytes_of_any_shape(dtype: torch.dtype) -> None:
    assert raw(torch.ones((), dtype=dtype)).numel() == torch.ones((), dtype=dtype).element_size()
    assert raw(torch.ones(0, 3, dtype=dtype)).numel() == 0
