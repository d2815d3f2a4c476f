"""State by names: optimizers there and back, and a digest that is of the values alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.state import (
    compute_state_digest,
    iter_named_tensors,
    load_model,
    load_optimizer,
    optimizer_tree,
    view_tensor_bytes,
)
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
    assert dict(iter_named_tensors(again["state"])).keys() == dict(iter_named_tensors(tree["state"])).keys()
    assert compute_state_digest(model.state_dict(), again) == compute_state_digest(model.state_dict(), tree)


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
    assert compute_state_digest(model.state_dict(), optimizer_tree(model, fresh)) == compute_state_digest(
        model.state_dict(), tree
    )


def test_another_model_is_refused() -> None:
    model, _ = trained()
    with raises(SnapshotError, "model"):
        load_model(nn.Linear(3, 4), model.state_dict())


def test_the_digest_is_of_names_types_shapes_and_bytes() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    empty: dict[str, Any] = {"state": {}}
    same = {"b": torch.ones(2), "a": torch.zeros(3, 2).T}
    assert compute_state_digest(base, empty) == compute_state_digest(same, empty)
    others: list[dict[str, torch.Tensor]] = [
        {"a": torch.zeros(2, 3), "c": torch.ones(2)},
        {"a": torch.zeros(3, 2), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3), "b": torch.tensor([1.0, 1.0 + 2**-23])},
    ]
    assert len({compute_state_digest(other, empty) for other in [base, *others]}) == 5
    assert compute_state_digest(base, {"state": {"a": {"step": torch.tensor(1.0)}}}) != compute_state_digest(
        base, empty
    )


def test_the_digest_is_fixed_for_good() -> None:
    """Digests are compared between versions: another number here breaks that."""
    found = compute_state_digest(
        {"w": torch.arange(6.0).view(2, 3)}, {"state": {"w": {"exp_avg": torch.ones(1, dtype=torch.bfloat16)}}}
    )
    assert found == "235c3cbf471b9eec0d47b7932ae3efd4fe9d99fee7683d0467c7118e450793cf"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_raw_bytes_of_any_shape(dtype: torch.dtype) -> None:
    assert view_tensor_bytes(torch.ones((), dtype=dtype)).numel() == torch.ones((), dtype=dtype).element_size()
    assert view_tensor_bytes(torch.ones(0, 3, dtype=dtype)).numel() == 0
