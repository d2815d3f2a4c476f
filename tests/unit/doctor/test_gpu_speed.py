"""What is normal for a GPU, and what is said of one that is not; what a node's torch is asked to measure."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dtctl.doctor import worker
from dtctl.doctor.answers import check_probe_answer
from dtctl.doctor.checks import gpu_speed
from dtctl.doctor.checks.known_gpus import find_gpu_datasheet
from dtctl.doctor.node_probes import NodeProbes, NodeQuery
from dtctl.doctor.node_report import NodeReport
from dtctl.supervisor.messages.probe import QueryPython
from dtctl.transport.base import Target
from dtctl.transport.local import LocalTransport

torch = pytest.importorskip("torch")

H100 = "NVIDIA H100 80GB HBM3"
GOOD = {"name": H100, "error": "", "tflops": 720.0, "to_gb_s": 52.0, "from_gb_s": 51.0, "within_gb_s": 2700.0}


def said(count: int = 8, **changed: Any) -> dict[str, Any]:
    """What a node with healthy GPUs answers; what is changed is so of its fourth GPU."""
    gpus = [dict(GOOD) for _ in range(count)]
    sums = changed.pop("busbw_gb_s", 360.0)
    gpus[3] |= changed
    return {"stage": "measured", "gpus": gpus, "busbw_gb_s": sums}


def judged(**nodes: dict[str, Any]) -> list[tuple[str, str, tuple[str, ...], str]]:
    return [
        (one.check, one.status, one.nodes, one.summary + " " + " ".join(one.evidence))
        for one in gpu_speed.check_gpu_speed(nodes)
    ]


def test_healthy_gpus_have_nothing_to_tell() -> None:
    assert judged(a=said(), b=said()) == []


@pytest.mark.parametrize(
    ("changed", "check", "words"),
    [
        ({"tflops": 600.0}, "gpu-speed", "GPU 3: 600 TFLOPS; GPUs of its kind reach 720"),
        ({"to_gb_s": 24.0}, "gpu-copies", "GPU 3: 24.0 GB/s from the host, 55 are normal"),
        ({"from_gb_s": 12.0}, "gpu-copies", "GPU 3: 12.0 GB/s to the host"),
        (
            {"within_gb_s": 900.0},
            "gpu-copies",
            "GPU 3: 900 GB/s within the GPU; the specification of its memory is 3350",
        ),
        ({"busbw_gb_s": 40.0}, "gpu-nccl", "40 GB/s bus bandwidth over 8 GPUs, 225 or more are normal"),
    ],
)
def test_a_slow_one_is_named_with_what_is_normal(changed: dict[str, Any], check: str, words: str) -> None:
    ((found, status, nodes, text),) = judged(a=said(), b=said(**changed))
    assert (found, status, nodes) == (check, "warn", ("b",))
    assert words in text


def test_all_slow_alike_are_held_against_the_data_sheet() -> None:
    slow = {"stage": "measured", "gpus": [{**GOOD, "tflops": 400.0}] * 2, "busbw_gb_s": 360.0}
    ((check, status, nodes, text),) = judged(a=slow, b=slow)
    assert (check, status, nodes) == ("gpu-speed", "warn", ("a", "b"))
    assert "40% of the data sheet's 989.4" in text


@pytest.mark.parametrize(
    ("one", "check", "words"),
    [
        ({"stage": "none", "error": "Torch not compiled with CUDA enabled"}, "gpu-speed", "not compiled"),
        ({"silent": True, "complained": "ModuleNotFoundError: torch"}, "gpu-speed", "ModuleNotFoundError"),
        ({"stage": "GPU 5", "silent": True}, "gpu-speed", "stops at GPU 5"),
        ({"stage": "NCCL", "silent": True, "gpus": [dict(GOOD)] * 2}, "gpu-nccl", "stops at NCCL"),
        (said(error="CUDA error: an illegal memory access", tflops=None), "gpu-speed", "GPU 3: CUDA error"),
    ],
)
def test_what_cannot_be_measured_fails(one: dict[str, Any], check: str, words: str) -> None:
    if "gpus" in one:
        one["gpus"] = [{name: value for name, value in gpu.items() if value is not None} for gpu in one["gpus"]]
    ((found, status, nodes, text),) = judged(a=said(), b=one)
    assert (found, status, nodes) == (check, "fail", ("b",))
    assert words in text


def test_no_gpu_where_gpus_were_asked_about() -> None:
    seen = [NodeReport(name=name, facts={"gpus": count}) for name, count in (("a", 8), ("b", 0))]
    (one,) = gpu_speed.check_gpus_present(seen)
    assert (one.check, one.status, one.nodes) == ("gpus", "fail", ("b",))


@pytest.mark.parametrize(
    ("name", "half", "nvlinks"),
    [
        (H100, 989.4, 18),
        ("NVIDIA H100 PCIe", 756, 0),
        ("NVIDIA H100 NVL", 835, 0),
        ("NVIDIA A100-SXM4-40GB", 312, 12),
        ("NVIDIA GeForce RTX 4090", 165.2, 0),
        ("NVIDIA GeForce RTX 3090", 71, 0),
        ("NVIDIA RTX 6000 Ada Generation", 364.2, 0),
        ("NVIDIA GH200 480GB", 989.4, 0),
        ("NVIDIA GB300", 2500, 18),
        ("AMD Instinct MI325X", 1307.4, 0),
        ("Tesla V100-SXM2-32GB", 125, 0),
        ("AMD Instinct MI300X", 1307.4, 0),
    ],
)
def test_names_of_the_driver_are_known(name: str, half: float, nvlinks: int) -> None:
    known = find_gpu_datasheet(name)
    assert known is not None
    assert (known["half"], known.get("nvlinks", 0)) == (half, nvlinks)


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-40GB MIG 3g.20gb", "Radeon 680M", ""])
def test_of_others_nothing_is_expected(name: str) -> None:
    assert find_gpu_datasheet(name) is None
    slow = {"stage": "measured", "gpus": [{**GOOD, "name": name, "tflops": 1.0, "to_gb_s": 0.1}], "busbw_gb_s": None}
    assert judged(a=slow) == []


class Sums:
    """Stands for torch with two GPUs that lie on the CPU, and notes what is waited for."""

    def __init__(self, *, broken: int = -1, available: bool = True) -> None:
        self.calls: list[str] = []
        self._broken = broken
        self.uint8, self.float32, self.bfloat16, self.float16 = (
            torch.uint8,
            torch.float32,
            torch.bfloat16,
            torch.float16,
        )
        self.version = SimpleNamespace(hip=None)
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: 2,
            get_device_name=lambda _: H100,
            get_device_capability=lambda _: (9, 0),
            set_device=self._use,
            synchronize=lambda device: self.calls.append(f"wait {device}"),
            empty_cache=lambda: None,
            init=self._init,
            nccl=SimpleNamespace(all_reduce=lambda data: self.calls.append(f"sum of {len(data)}")),
        )

    def _use(self, index: int) -> None:
        if index == self._broken:
            raise RuntimeError("CUDA error: device-side assert\nmore")

    def _init(self) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    def device(self, kind: str, index: int) -> str:
        return f"{kind}:{index}"

    def randn(self, *shape: int, **_: Any) -> torch.Tensor:
        return torch.ones(8, 8)

    def empty(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(8)

    ones = empty


def measured(fake: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    worker.measure_gpus(lambda **told: facts.update(told), fake)
    return facts


def test_what_is_timed_is_waited_for() -> None:
    fake = Sums()
    found = measured(fake)
    assert (found["stage"], found["final"], [gpu["name"] for gpu in found["gpus"]]) == ("measured", True, [H100, H100])
    assert all(gpu[name] > 0 for gpu in found["gpus"] for name in ("tflops", "to_gb_s", "from_gb_s", "within_gb_s"))
    assert found["busbw_gb_s"] > 0
    # Each measurement waits before and after; a sum waits for both GPUs.
    assert fake.calls[:16] == ["wait cuda:0"] * 8 + ["wait cuda:1"] * 8
    assert fake.calls[16:] == [*["sum of 2"] * 3, "wait 0", "wait 1", *["sum of 2"] * 5, "wait 0", "wait 1"]


def test_a_broken_gpu_is_told_of_and_not_summed_over() -> None:
    found = measured(fake := Sums(broken=1))
    assert [gpu["error"] for gpu in found["gpus"]] == ["", "CUDA error: device-side assert"]
    assert "busbw_gb_s" not in found
    assert not [call for call in fake.calls if "sum" in call]


def test_a_torch_without_gpus_says_why() -> None:
    assert measured(Sums(available=False)) == {
        "stage": "none",
        "error": "Torch not compiled with CUDA enabled",
        "final": True,
    }


def test_the_answer_has_the_form_that_is_expected() -> None:
    found = {**measured(Sums()), "op": "round"}
    found.pop("final")
    checked = check_probe_answer(QueryPython(asks=[{}], limit_s=1.0), found, node="a")
    assert gpu_speed.build_gpu_speed_rows({"a": checked})[1]["node"] == "a"


@pytest.mark.torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_real_torch_without_gpus_on_a_node_that_has_some() -> None:
    query = NodeQuery(target=Target(name="a", address="127.0.0.1"), python=sys.executable, workdir="~")
    with contextlib.closing(NodeProbes([query], LocalTransport(), progress=lambda _: None)) as probes:
        (seen,) = probes.collect_reports(rendezvous=(), data_ports=0, measure_s=0.0)
        assert seen.error is None
        assert gpu_speed.measure_node_gpus(probes, [seen], python={}, env={}, progress=lambda _: None) == {}, (
            "it has none"
        )
        seen.facts["gpus"] = 8
        told = gpu_speed.measure_node_gpus(
            probes, [seen], python={"a": sys.executable}, env={"a": {}}, progress=lambda _: None
        )
    ((check, status, nodes, text),) = judged(**told)
    assert (check, status, nodes) == ("gpu-speed", "fail", ("a",))
    assert "torch cannot use the GPUs" in text
    assert gpu_speed.build_gpu_speed_rows(told) == ()
