"""Who a worker is, by its environment."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dtctl
from dtctl import names, node_facts
from dtctl.errors import PlanError
from dtctl.runtime import main
from dtctl.runtime.distributed.process_group import start
from dtctl.runtime.distributed.worker import resolve_worker_from_env
from dtctl.runtime.randomness import seed_all
from tests.facts import raises

TORCHRUN = {
    names.RANK: "3",
    names.LOCAL_RANK: "1",
    names.WORLD_SIZE: "4",
    names.LOCAL_WORLD_SIZE: "2",
    names.GROUP_RANK: "1",
}


def test_without_a_launcher_there_is_one_worker() -> None:
    worker = resolve_worker_from_env({})
    assert (worker.rank, worker.world_size, worker.backend, worker.is_first) == (0, 1, None, True)
    worker.barrier()
    assert worker.sum(torch.ones(2)).tolist() == [1, 1]
    assert worker.once_per_node(lambda: 5) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for GPUs that are not there")
def test_a_launcher_says_who_a_worker_is() -> None:
    worker = resolve_worker_from_env(TORCHRUN)
    assert (worker.rank, worker.local_rank, worker.world_size) == (3, 1, 4)
    assert (worker.local_world_size, worker.node_rank, worker.backend) == (2, 1, "gloo")
    assert not worker.is_first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({names.WORLD_SIZE: ""}, "LOCAL_RANK RANK WORLD_SIZE"),
        ({names.RANK: "4"}, "4"),
        ({names.RANK: "-1"}, "RANK -1 number"),
        ({names.LOCAL_RANK: "one"}, "LOCAL_RANK one number"),
    ],
)
def test_an_environment_that_makes_no_sense(changes: dict[str, str], message: str) -> None:
    with raises(PlanError, message):
        resolve_worker_from_env(TORCHRUN | changes)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, names.ERROR_FILE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_start_seeds_and_needs_no_group() -> None:
    drawn = []
    for _ in range(2):
        with start(seed=11):
            assert not dist.is_initialized()
            drawn.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
    assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("no_launcher")
def test_an_exception_is_left_for_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.ERROR_FILE, str(tmp_path / "error.json"))
    with raises(RuntimeError, "luck"), start():
        raise RuntimeError("out of luck")
    assert "out of luck" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert os.environ[names.ERROR_FILE]


def test_seeds_beyond_32_bits_are_fine() -> None:
    seed_all(2**63 + 5)


def shows(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("count", "visible", "device"),
    [
        (4, None, "cuda:1"),
        (1, "3", "cuda:0"),
        (1, "MIG-7e3b", "cuda:0"),
        (1, None, "PlanError"),
        (1, "0,1", "PlanError"),
    ],
)
def test_the_gpu_of_a_worker(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, device: str) -> None:
    shows(monkeypatch, count)
    environ = TORCHRUN if visible is None else {**TORCHRUN, "CUDA_VISIBLE_DEVICES": visible}
    if device == "PlanError":
        with raises(PlanError, "1 GPU"):
            resolve_worker_from_env(environ)
    else:
        assert resolve_worker_from_env(environ).device == torch.device(device)


def test_nobody_trains_on_the_cpu_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    shows(monkeypatch, 0)
    monkeypatch.setattr(node_facts, "list_nvidia_devices", lambda: ["nvidia0"])

    def init() -> None:
        raise RuntimeError("CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet")

    monkeypatch.setattr(torch.cuda, "init", init)
    with raises(PlanError, "Error 802"):
        resolve_worker_from_env(TORCHRUN)
    for hidden in ("", "-1"):
        assert resolve_worker_from_env({**TORCHRUN, "CUDA_VISIBLE_DEVICES": hidden}).device.type == "cpu"
    monkeypatch.setattr(node_facts, "list_nvidia_devices", list)
    monkeypatch.setattr(node_facts, "list_amd_devices", list)
    assert resolve_worker_from_env(TORCHRUN).device.type == "cpu"
    monkeypatch.setattr(node_facts, "list_amd_devices", lambda: ["renderD128"])
    with raises(PlanError, "GPUs"):
        resolve_worker_from_env(TORCHRUN)
    assert resolve_worker_from_env({**TORCHRUN, "HIP_VISIBLE_DEVICES": ""}).device.type == "cpu"


def test_waiting_for_others_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shows(monkeypatch, 4)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: seen.append(tensor))
    monkeypatch.setattr(dist, "barrier", lambda **_: pytest.fail("that is NCCL's, which aborts the process"))
    resolve_worker_from_env(TORCHRUN).barrier()
    assert [value.device.type for value in seen] == ["cpu"]


@pytest.mark.parametrize(("launched_by", "told"), [(None, False), (dtctl.__version__, False), ("99.0", True)])
def test_another_version_on_the_node_is_told(
    launched_by: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(names.VERSION, raising=False)
    if launched_by is not None:
        monkeypatch.setenv(names.VERSION, launched_by)
    text = main.describe_other_version()
    assert ("99.0" in text and dtctl.__version__ in text) is told
