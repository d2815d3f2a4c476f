"""What is found out about a model before a strategy is chosen, and that nothing notices."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtctl.errors import WorkerFailed
from dtctl.estimate.choice import StrategyInputs
from dtctl.runtime import TensorData, Worker, automatic, load
from dtctl.runtime.automatic import TrainingInputs, resolve_strategy
from dtctl.runtime.distributed import capacity
from dtctl.runtime.distributed.run_forked import run_in_forked_process
from dtctl.runtime.randomness import capture_rng_states
from dtctl.train.batch import BatchSizes
from tests.facts import raises
from tests.unit.runtime.conftest import Make, points, squared

CPU = torch.device("cpu")


def config(**settings: Any) -> Any:
    return load({"micro_batch": 4, "steps": 1, **settings}, argv=[], environ={})


def seen(model: Any, loss: Any = squared, samples: Any = None, **settings: Any) -> dict[str, Any]:
    tight = StrategyInputs(workers=2, per_node=2, budget=1.0, micro_batch=4)
    subject = TrainingInputs(model=model, loss=loss, samples=samples or points())
    return run_in_forked_process(
        lambda: automatic._measure_kept_activations(subject, config(**settings), tight), limit_s=240
    )


def wide(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))


def test_kept_bytes_are_those_of_each_sample() -> None:
    found = seen(wide(64))
    # The input of both products (8 and 64 numbers), of which the ReLU keeps the second too; the loss keeps two of one.
    assert found["kept_bytes"] == 4 * (8 + 64 + 1 + 1)
    assert found["params"] == 8 * 64 + 64 + 64 + 1
    assert found["divisible"]
    assert "unseen" not in found


def test_a_model_that_is_still_to_be_made_is_seen_without_being_made() -> None:
    made: list[str] = []

    def make() -> nn.Module:
        made.append("here")
        return wide(64)

    assert seen(make) == seen(wide(64))
    assert made == []


def test_logits_are_left_to_the_formula() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.out(self.table(tokens))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())

    found = seen(Words(), loss, TensorData(torch.zeros(6, 10, dtype=torch.int64)))
    assert (found["vocab"], found["seq"]) == (50, 10)
    assert found["kept_bytes"] == 10 * (8 + 16 * 4), "tokens, and what enters the output"


def test_looking_leaves_no_trace() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls, self.cache = nn.BatchNorm1d(8), 0, None

        def forward(self, inputs: torch.Tensor) -> Any:
            self.calls += 1
            self.cache = inputs
            random.random(), np.random.rand()
            return nn.functional.dropout(self.norm(inputs), 0.5).sum(1, keepdim=True)

    model, before = Drawing(), capture_rng_states(CPU)
    mean = model.norm.running_mean.clone()  # type: ignore[union-attr]
    assert "unseen" not in seen(model)
    after = capture_rng_states(CPU)
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    assert (model.calls, model.cache) == (0, None)
    assert torch.equal(model.norm.running_mean, mean)  # type: ignore[arg-type]
    assert not any(type(one).__name__ == "FakeTensor" for one in [*model.parameters(), *model.buffers()])


def test_code_that_needs_values_is_not_seen_and_says_so() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        error = squared(model, batch)
        return error if error.item() < 1 else error * 2

    found = seen(wide(), loss)
    assert "DataDependentOutputException" in found["unseen"]
    assert found["params"] > 0


def test_parameters_that_blocks_share_cannot_be_divided() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.last = nn.Linear(8, 8)
            self.last.weight = self.blocks[0].weight

        def forward(self, stream: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                stream = block(stream)
            return self.last(stream).sum(1, keepdim=True)  # type: ignore[no-any-return]

    found = seen(Tied())
    assert found["divisible"] is False
    assert "unseen" not in found
    assert found["params"] == 2 * 72 + 8, "the shared one counts once"


def test_blocks_that_are_computed_again_keep_less() -> None:
    found = {"params": 1.0, "looked_up": 0, "layers": 2, "block_params": 1.0, "hidden": 8, "vocab": 0, "seq": 1}
    found |= {"kept_bytes": 4000.0, "entering_bytes": 400.0}
    kept = {
        every: automatic._build_estimate_model(found, config(checkpointing=every)).block_kept
        for every in ("none", 1, 2, 4)
    }
    # Half of the bytes in half precision, of each of two blocks; every second or fourth keeps what enters it.
    assert kept == {"none": 1000.0, 1: 1000.0, 2: (1000 + 200) / 2, 4: (3 * 1000 + 200) / 4}
    assert [automatic._choose_recompute(config(checkpointing=every)) for every in ("full", 1, 2)] == [
        "full",
        "full",
        "none",
    ]


def test_what_the_optimizer_keeps_counts(worker: Worker) -> None:
    def bytes_of(**settings: Any) -> tuple[int, int]:
        recipe = automatic._build_training_recipe(config(**settings), worker)
        return recipe.optimizer_bytes, recipe.average_bytes

    assert bytes_of() == (8, 0)
    assert bytes_of(optimizer="sgd") == (4, 0)
    assert bytes_of(optimizer="sgd", momentum=0, ema={}) == (0, 4)


def decided(told: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """What rank 0 of several workers would answer, to a model of 2.9e9 bytes of states."""
    first = Worker(
        rank=0, local_rank=0, world_size=len(told), local_world_size=2, node_rank=0, device=CPU, backend="gloo"
    )
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3000, 3000) for _ in range(20)))
    samples = TensorData(torch.zeros(4, 3000))
    subject = TrainingInputs(model=model, loss=lambda model, batch: model(batch[0]).mean(), samples=samples)
    chosen, sizes = config(**settings), BatchSizes(micro=4, accumulate=1, world_size=len(told))
    asked = automatic._build_choice_request(chosen, first, sizes)
    return automatic._decide_strategy(chosen, first, subject, sizes, told, asked)


def told(*budgets: float, slots: int = 2) -> list[dict[str, Any]]:
    return [{"budget": budget, "slots": slots, "before": None} for budget in budgets]


ENOUGH, SCARCE, NARROW = 1e11, 3e9, 2.2e9


def test_the_smallest_memory_of_all_workers_decides() -> None:
    assert decided(told(ENOUGH, ENOUGH, ENOUGH, ENOUGH))["strategy"] == "ddp"
    answer = decided(told(ENOUGH, ENOUGH, SCARCE, ENOUGH))
    assert (answer["strategy"], answer["mesh"]) == ("zero1", {"dp": 4, "fsdp": 1})


def test_a_mesh_of_nodes_needs_nodes_that_are_alike() -> None:
    assert decided(told(NARROW, NARROW, NARROW, NARROW))["mesh"] == {"dp": 2, "fsdp": 2}
    unlike = [*told(NARROW, NARROW, slots=2), *told(NARROW, NARROW, slots=3)]
    assert decided(unlike)["mesh"] == {"dp": 1, "fsdp": 4}


def test_the_newest_snapshot_tells_what_was_chosen() -> None:
    def kept(step: int, strategy: str, **asked: Any) -> dict[str, Any]:
        same = {"workers": 4, "micro_batch": 4, "accumulate": 1, "precision": "fp32", "memory_gib": None}
        mesh = {"dp": 4, "fsdp": 1}
        chosen = {"strategy": strategy, "mesh": mesh, "asked": {**same, "device": "cpu", **asked}}
        return {"step": step, "chosen": chosen}

    nodes = told(ENOUGH, ENOUGH, ENOUGH, ENOUGH)
    nodes[0]["before"], nodes[2]["before"] = kept(3, "fsdp"), kept(7, "zero1")
    answer = decided(nodes)
    assert (answer["strategy"], answer["line"]) == (
        "zero1",
        "strategy: zero1, chosen by the run that wrote the snapshot",
    )
    nodes[2]["before"] = kept(7, "zero1", workers=8)
    assert decided(nodes)["strategy"] == "ddp", "for other workers it is decided anew"
    nodes[2]["before"] = {"step": 7, "chosen": None}
    assert decided(nodes)["strategy"] == "ddp"


def test_an_error_of_rank_0_is_an_answer() -> None:
    answer = decided(told(ENOUGH, ENOUGH), blocks="nowhere")
    assert answer["error"] == "the model has no list of modules named nowhere"
    nothing = decided(told(1e6, 1e6))
    assert nothing["error"].startswith("no strategy fits the memory: ")
    assert nothing["hint"]


def test_one_worker_is_warned_and_trains(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make({"memory_gib": 1e-6, "steps": 1})
    assert trainer.training.engine.strategy.name == "single"
    said = capsys.readouterr().out
    assert said.startswith("warning: memory may not suffice: single needs 0.35 GiB")
    trainer.run()
    make({"steps": 1, "snapshot": {"dir": "other"}})
    assert "warning" not in capsys.readouterr().out


def test_a_small_model_costs_next_to_nothing(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "run_in_forked_process", lambda *_: pytest.fail("it was looked at"))
    subject = TrainingInputs(model=wide(), loss=squared, samples=points())
    settled = resolve_strategy(config(), worker, subject, tmp_path)
    assert settled.degrees.workers == 1


def test_what_happens_apart_is_told() -> None:
    assert run_in_forked_process(lambda: {"a": [1, None]}, limit_s=120) == {"a": [1, None]}
    with raises(WorkerFailed, "ZeroDivisionError"):
        run_in_forked_process(lambda: {"a": 1 // 0}, limit_s=120)
    with raises(WorkerFailed, "process died"):
        run_in_forked_process(lambda: __import__("os")._exit(1), limit_s=120)
    with raises(WorkerFailed, "0 s"):
        run_in_forked_process(lambda: time.sleep(60) or {}, limit_s=0.2)


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/job/step\n", {"sys/fs/cgroup/job/memory.max": "1000000"}, 1000000),
        ("0::/job/step\n", {"sys/fs/cgroup/job/memory.max": "max", "sys/fs/cgroup/memory.max": "7000"}, 7000),
        (
            "5:cpu:/a\n4:memory:/job\n",
            {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000", "sys/fs/cgroup/memory/a/memory.max": "1"},
            5000,
        ),
        ("0::/\n", {}, None),
    ],
)
def test_control_groups_limit_a_nodes_memory(
    tmp_path: Path, lines: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in {"proc/self/cgroup": lines, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert capacity.compute_node_memory_bytes(tmp_path) == (
        limit or capacity.compute_node_memory_bytes(tmp_path / "nowhere")
    )
