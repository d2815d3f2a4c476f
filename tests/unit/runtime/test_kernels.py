"""Kernels that are chosen by measurement, images that lie channel by channel, cores near a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dtctl import names
from dtctl.errors import PlanError
from dtctl.runtime import TensorData, Trainer, Worker
from dtctl.runtime import kernels as chosen
from dtctl.runtime.distributed import affinity
from dtctl.train.config import load
from dtctl.train.mesh import Degrees
from tests.unit.runtime.conftest import squared


@pytest.fixture(autouse=True)
def switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(names.METRICS, str(tmp_path / "metrics.jsonl"))
    kept = (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), os.sched_getaffinity(0))
    yield
    torch.backends.cudnn.benchmark = kept[0]
    torch.set_float32_matmul_precision(kept[1])
    os.sched_setaffinity(0, kept[2])


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))


def images() -> TensorData:
    inputs = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorData(inputs, inputs.mean((1, 2, 3))[:, None])


def trained(worker: Worker, folder: Path, model: nn.Module, stop: int = 0, **settings: Any) -> Trainer:
    """A training of 8 steps, or one that is stopped before."""
    defaults = {"steps": 8, "micro_batch": 4, "log_every": 100, "snapshot": {"dir": str(folder)}, **settings}
    trainer = Trainer(load(defaults, argv=[], environ={}), worker, model, squared, images())
    if stop:
        done = trainer.training.report.step

        def after(step: int) -> None:
            done(step)
            if step == stop:
                signal.raise_signal(signal.SIGTERM)

        trainer.training.report.step = after  # type: ignore[method-assign]
    trainer.run()
    return trainer


@pytest.mark.parametrize("kernel", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("by_key", [True, False])
def test_images_channel_by_channel_are_resumed_with_the_same_bits(
    worker: Worker, tmp_path: Path, kernel: str, by_key: bool
) -> None:
    def model() -> nn.Module:  # as the key, or as users lay theirs out themselves
        return convolutions() if by_key else convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    settings = {"kernel": kernel, "channels_last": by_key}
    whole = trained(worker, tmp_path / "whole", model(), **settings)
    trained(worker, tmp_path / "parts", model(), stop=4, **settings)
    again = trained(worker, tmp_path / "parts", model(), **settings)
    assert again.training.position.began_at == 4
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    for trainer in (whole, again):
        moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
        assert [one.stride() for one in moments] == [one.stride() for one in trainer.training.trained.parameters]
        assert trainer.training.trained.parameters[0].is_contiguous(memory_format=torch.channels_last)


def test_they_compute_what_others_do(worker: Worker, tmp_path: Path) -> None:
    one = trained(worker, tmp_path / "one", convolutions(), channels_last=True, optimizer="sgd")
    other = trained(worker, tmp_path / "other", convolutions(), optimizer="sgd")
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, other.model.state_dict()[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("degrees", [Degrees(fsdp=2), Degrees(dp=2, fsdp=2), Degrees(tp=2), Degrees(pp=2)])
def test_models_in_parts_have_no_such_form(degrees: Degrees) -> None:
    config = load({"channels_last": True}, argv=[], environ={})
    with pytest.raises(PlanError) as caught:
        chosen.lay_out(convolutions(), config, degrees)
    assert caught.value.where == "train.channels_last"
    chosen.lay_out(convolutions(), config, Degrees(dp=2))


def test_cudnn_measures_only_where_the_same_bits_are_not_wanted() -> None:
    chosen.apply_kernel_settings(load({"cudnn_benchmark": True}, argv=[], environ={}), "cuda")
    assert torch.backends.cudnn.benchmark
    for wanted in ({"deterministic": True}, {"require_exact": True}):
        with pytest.raises(PlanError) as caught:
            chosen.apply_kernel_settings(load({"cudnn_benchmark": True, **wanted}, argv=[], environ={}), "cuda")
        assert caught.value.where == "train.cudnn_benchmark"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-x", set()), ("\n", set())],
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert affinity.parse_core_list(text) == cores


def test_a_worker_stays_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: known)
    monkeypatch.setattr(affinity, "PCI", tmp_path)
    before = os.sched_getaffinity(0)
    assert affinity.find_cores_near_gpu(torch.device("cuda", 0)) == frozenset(), "the system does not say"
    assert affinity.bind_process_to_cores(affinity.find_cores_near_gpu(torch.device("cuda", 0))) == before
    own = tmp_path / "0000:3b:00.0"
    own.mkdir()
    (own / "local_cpulist").write_text(f"{min(before)}\n")
    near = affinity.find_cores_near_gpu(torch.device("cuda", 0))
    assert near == {min(before)}
    assert affinity.bind_process_to_cores({max(before) + 1000}) == before, "cores that are not this process's"
    assert affinity.bind_process_to_cores(near) == {min(before)}
    assert os.sched_getaffinity(0) == {min(before)}
