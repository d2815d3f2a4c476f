"""What the doctor's worker asks of torch on GPUs, with a torch and a process group that note it down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dtctl.doctor import worker
from dtctl.doctor.checks.collective import TIMEOUT_S

torch = pytest.importorskip("torch")

ASKED = {"rank": 1, "world": 2, "address": "10.0.0.1", "port": 20_000, "timeout_s": 60.0}


class Notes:
    """Stands for `torch` and `torch.distributed`: tensors lie on the CPU, and calls are noted in their order."""

    def __init__(self, *, wrong: str = "") -> None:
        self.calls: list[str] = []
        self.bound: Any = None
        self._wrong = wrong
        self.float32 = torch.float32
        self.cuda = SimpleNamespace(
            set_device=lambda device: self.calls.append(f"set_device {device}"),
            synchronize=lambda device: self.calls.append(f"synchronize {device}"),
            device_count=lambda: 8,
        )

    def device(self, kind: str, index: int | None = None) -> str:
        return kind if index is None else f"{kind}:{index}"

    def arange(self, count: int, *, device: str) -> torch.Tensor:
        places = torch.arange(min(count, 1 << 18))
        return places.index_fill(0, torch.tensor([5]), 0) if device == self._wrong else places

    def TCPStore(self, *_: Any) -> None:  # noqa: N802 - torch's name
        self.calls.append("store")

    def init_process_group(self, backend: str, *, device_id: Any = None, **_: Any) -> None:
        self.calls.append(f"init {backend}")
        self.bound = device_id

    def barrier(self) -> None:
        self.calls.append("barrier")

    def all_reduce(self, data: torch.Tensor) -> None:
        self.calls.append("all_reduce")
        if self.calls.count("all_reduce") == 1:
            data.copy_(torch.arange(len(data)) % worker.PERIOD * 2 + 1)


def answers(notes: Notes, backend: str, **asked: Any) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    worker.run_all_reduce({**ASKED, "backend": backend, **asked}, lambda **facts: said.append(facts), notes, notes)
    return said


def test_nccl_is_bound_to_one_gpu_before_anything_is_exchanged() -> None:
    notes = Notes()
    answers(notes, "nccl")
    assert notes.bound == "cuda:0"
    assert notes.calls.index("set_device cuda:0") < notes.calls.index("init nccl") < notes.calls.index("barrier")


def test_the_time_of_a_sum_is_that_of_the_gpu() -> None:
    notes = Notes()
    answers(notes, "nccl")
    sums = [place for place, call in enumerate(notes.calls) if call == "all_reduce"]
    waits = [place for place, call in enumerate(notes.calls) if call == "synchronize cuda:0"]
    timed = sums[-worker.TIMED :]
    assert len(sums) == 1 + worker.WARM_UP["nccl"] + worker.TIMED
    assert len(waits) == 2
    assert waits[0] == timed[0] - 1
    assert waits[1] == timed[-1] + 1
    assert worker.COUNT["nccl"] * 4 == 256 << 20


def test_gloo_knows_nothing_of_gpus() -> None:
    notes = Notes()
    answers(notes, "gloo")
    assert notes.bound is None
    assert not [call for call in notes.calls if "cuda" in call]


@pytest.mark.parametrize(("gpu", "count"), [("", 0), ("cuda:3", 1)])
def test_gpus_that_take_no_part_add_up_by_themselves(gpu: str, count: int) -> None:
    said = {name: value for facts in answers(Notes(wrong=gpu), "nccl") for name, value in facts.items()}
    assert said["wrong"] == count


def test_where_each_gpu_has_a_process_each_process_has_its_gpu() -> None:
    notes = Notes(wrong="cuda:1")
    said = answers(notes, "nccl", gpu=3)
    assert notes.bound == "cuda:3"
    assert "set_device cuda:3" in notes.calls
    assert "synchronize cuda:3" in notes.calls
    assert not any(facts.get("wrong") for facts in said), "the others look after themselves"


def test_nccl_has_the_time_to_begin() -> None:
    assert TIMEOUT_S["nccl"] >= 60
