"""A mean over tokens is over all tokens of the global batch, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtctl.runtime import TensorData, Worker
from dtctl.runtime.token_weighting import compute_gradient_correction
from tests.unit.runtime.conftest import Make

IGNORED = -100


def texts() -> TensorData:
    """Texts of very different lengths, padded; two of them empty."""
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 10, 8, generator=source)
    targets = torch.randint(0, 4, (24, 10), generator=source)
    for index in range(24):
        targets[index, index % 10 if index > 1 else 0 :] = IGNORED
    return TensorData(inputs, targets)


def per_token(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch
    scores = model(inputs).transpose(1, 2)
    return nn.functional.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum"), (
        targets != IGNORED
    ).sum()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_however_the_batch_is_cut(make: Make, precision: str) -> None:
    weights = []
    for micro, accumulate in ((24, 1), (4, 6), (1, 24)):
        torch.manual_seed(2)
        trainer = make(
            {
                "micro_batch": micro,
                "accumulate": accumulate,
                "precision": precision,
                "optimizer": "sgd",
                "lr": 0.5,
                "steps": 3,
                "snapshot": {"dir": f"{micro}"},
            },
            model=nn.Linear(8, 4),
            loss=per_token,
            samples=texts(),
        )
        torch.manual_seed(2)
        nn.init.normal_(trainer.model.weight)  # type: ignore[arg-type]
        if (scale := trainer.training.trained.loss_scale) is not None:
            scale.scale = 64.0  # at which none of the cuts overflows, so that all take the same steps
        trainer.run()
        weights.append(trainer.model.weight)
    close = {"fp32": 1e-6, "fp16": 1e-3}[precision]
    assert torch.allclose(weights[0], weights[1], atol=close)  # type: ignore[arg-type]
    assert torch.allclose(weights[0], weights[2], atol=close)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_gradient_is_that_of_the_mean(make: Make, precision: str) -> None:
    settings = {"micro_batch": 6, "accumulate": 4, "precision": precision}
    trainer = make(settings, model=nn.Linear(8, 4), loss=per_token, samples=texts())
    if trainer.training.trained.loss_scale is not None:
        trainer.training.trained.loss_scale.scale = 64.0
    trainer.training.engine.compute_gradients(trainer.training.position)
    trainer.training.engine.unscale_gradients()
    found = [gradient.clone() for gradient in trainer.training.trained.list_gradients()]
    total, count = per_token(trainer.model, texts().tensors)
    expected = torch.autograd.grad(total / count, list(trainer.model.parameters()))
    close = {"fp32": 1e-6, "fp16": 1e-3}[precision]
    assert all(torch.allclose(one, two, atol=close) for one, two in zip(found, expected, strict=True))


def test_the_logged_loss_is_the_mean_over_tokens(make: Make) -> None:
    trainer = make(
        {"micro_batch": 5, "accumulate": 4, "steps": 1}, model=nn.Linear(8, 4), loss=per_token, samples=texts()
    )
    seen: list[tuple[float, float]] = []

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = per_token(model, batch)
        seen.append((float(total.detach()), float(count)))
        return total, count

    trainer.training.engine.passes.loss = loss
    mean = float(trainer.training.engine.compute_gradients(trainer.training.position))
    assert mean == pytest.approx(sum(total for total, _ in seen) / sum(count for _, count in seen), rel=1e-5)


def test_nothing_to_count_is_no_gradient(worker: Worker) -> None:
    assert float(compute_gradient_correction([torch.zeros(()), torch.zeros(())], 8, worker)) == 8.0
