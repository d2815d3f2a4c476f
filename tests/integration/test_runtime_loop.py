"""Real workers: what all of them must do at the same step although only one has the reason for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dtctl import names
from tests import forked
from tests.facts import missing

pytestmark = pytest.mark.torch

SCRIPT = """
import json, os, time
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, diagnose, run
from dtctl.runtime.snapshot import state
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, since all workers share a pipe

def find_differences(model):
    return diagnose.find_differing_parameters(model), diagnose.find_differing_gradients(model)

def network(norm):
    return nn.Sequential(nn.Linear(16, 32), *([nn.BatchNorm1d(32)] if norm else []), nn.ReLU(), nn.Linear(32, 1))

def train(config, worker):
    wish = config.data
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(5))
    data = TensorData(inputs, inputs[:, :1] - inputs[:, 1:2], torch.arange(len(inputs)))
    hurt = wish.get("hurt")
    calls = 0

    def loss(model, batch):
        nonlocal calls
        inputs, targets, ids = batch
        value = nn.functional.mse_loss(model(inputs), targets) if wish.get("late") else None
        calls += 1
        if hurt and [worker.rank, calls] in hurt:
            raise torch.OutOfMemoryError("injected")
        if value is None:
            value = nn.functional.mse_loss(model(inputs), targets)
        with open(f"seen.{worker.rank}", "a") as file:
            file.write(json.dumps([trainer.step, ids.tolist()]) + "\\n")
        if wish.get("nan") == trainer.step and worker.rank == 1:
            value = value * float("nan")
        return value

    trainer = Trainer(config, worker, network(wish.get("norm")), loss, data)
    if wish.get("slow") == worker.rank:
        read = trainer.training.engine.feed.batch
        trainer.training.engine.feed.batch = lambda *args: (time.sleep(0.02), read(*args))[1]
    moved = 0
    def count(_, bucket):
        nonlocal moved
        moved += bucket.buffer().numel() * bucket.buffer().element_size()
        return default_hooks.allreduce_hook(None, bucket)
    if wish.get("count"):
        trainer.training.engine.strategy.module.register_comm_hook(None, count)
    outcome = trainer.run()
    tell("moved", worker.rank, moved)
    if wish.get("diagnose"):
        tell("first", worker.rank, *find_differences(trainer.model))
        if worker.rank == 1:
            trainer.model[0].bias.data[3] += 1e-6
            trainer.model[2].weight.grad = None
        tell("then", worker.rank, *find_differences(trainer.model))
    tree = state.optimizer_tree(trainer.model, trainer.optimizer)
    tell("digest", worker.rank, state.compute_state_digest(dict(trainer.model.named_parameters()), tree))
    return outcome

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"steps": 6, "lr": 1e-2, "log_every": 2, "timeout_s": 30}))
"""


def launch(folder: Path, workers: int, *settings: str, run_dir: Path | None = None) -> tuple[int, str]:
    """Train in `folder`, as if launched by dtctl with a folder of the run. Returns exit code and output."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    argv = ["train.py", *(f"--train.{setting}" for setting in settings)]
    environ = {names.RUN_DIR: str(run_dir)} if run_dir else {}
    ended = forked.launch(argv, workers, cwd=folder, environ=environ)
    return ended.code, ended.output


def digests(output: str) -> set[str]:
    return {line.split()[2] for line in output.splitlines() if line.startswith("digest ")}


def samples(folder: Path) -> dict[int, Counter[int]]:
    """What all workers saw in each step."""
    seen: dict[int, Counter[int]] = {}
    for path in folder.glob("seen.*"):
        for step, ids in map(json.loads, path.read_text().splitlines()):
            seen.setdefault(step, Counter()).update(ids)
    return seen


def test_memory_that_runs_out_on_one_worker_makes_all_repeat_the_step(tmp_path: Path) -> None:
    small = launch(tmp_path / "small", 2, "micro_batch=2", "accumulate=2")
    assert small[0] == 0, small[1]
    large = launch(tmp_path / "large", 2, "micro_batch=4", 'data={"hurt": [[1, 1]]}')
    assert large[0] == 0, large[1]
    assert "out of memory on rank 1 in step 1: again with global batch 8 = 2 x 2 x 2" in large[1]
    assert digests(large[1]) == digests(small[1])
    assert len(digests(large[1])) == 1


@pytest.mark.parametrize("late", ["true", "false"])
def test_it_may_happen_in_any_pass_and_with_buffers_that_are_exchanged(tmp_path: Path, late: str) -> None:
    """In the middle of an accumulation, twice, and on both workers at once."""
    wish = f'data={{"hurt": [[1, 4], [0, 14], [1, 14]], "norm": true, "late": {late}}}'
    code, output = launch(tmp_path, 2, "micro_batch=8", "accumulate=2", wish)
    assert code == 0, output
    assert not missing(output, "memory rank 1 step 2 batch 32 4")
    assert output.count("out of memory on rank") == 2
    assert len(digests(output)) == 1
    straight = launch(tmp_path / "straight", 2, "micro_batch=8", "accumulate=2")
    assert straight[0] == 0, straight[1]
    found, expected = samples(tmp_path), samples(tmp_path / "straight")
    assert all(found[step].keys() >= expected[step].keys() for step in expected)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_gradient_that_is_not_finite_on_one_worker_is_nobodys(tmp_path: Path, policy: str) -> None:
    settings = (
        "micro_batch=4",
        f"on_nan={policy}",
        'data={"nan": 3}',
        "snapshot.every_steps=2",
        "steps=8",
        "log_every=1",
    )
    code, output = launch(tmp_path, 2, *settings)
    assert len(digests(output)) <= 1
    if policy == "skip":
        assert code == 0, output
        assert output.count("step 4 skipped: its gradient is not finite (nan)") == 1
    else:  # the samples of the third step are met by step number here, so going back cannot help
        assert [f"back to step 2, {count} samples" in output for count in (16, 32, 48)] == [True] * 3, output
        assert not missing(output, "back 3 times")
        assert code != 0


def test_a_run_goes_on_with_other_numbers_of_workers_and_the_same_global_batch(tmp_path: Path) -> None:
    first = launch(tmp_path, 2, "micro_batch=6", "steps=3")
    assert first[0] == 0, first[1]
    kept = launch(tmp_path, 3, "micro_batch=6", "steps=6")
    assert "global batch 12 = 4 x 3 x 1" in kept[1], kept[1]
    by_epochs = launch(tmp_path, 3, "micro_batch=6", "steps=null", "epochs=1")
    assert "workers changed" not in by_epochs[1]
    alone = launch(tmp_path, 1, "micro_batch=6", "steps=null", "epochs=1")
    assert "workers changed from 3 to 1" in alone[1], alone[1]
    assert "steps changed" not in alone[1], "those that are done follow the batch that is kept"
    refused = launch(tmp_path, 5, "micro_batch=6", "steps=7")
    assert "the run's global batch of 12 cannot be kept with 5 workers" in refused[1]
    scaled = launch(tmp_path, 2, "micro_batch=8", "steps=7", "on_resize=linear")
    assert scaled[0] == 0, scaled[1]


def test_linear_scales_the_rate_with_the_workers(tmp_path: Path) -> None:
    for workers, steps in ((1, 3), (2, 6)):
        code, output = launch(
            tmp_path, workers, "micro_batch=6", f"steps={steps}", "on_resize=linear", "schedule=constant", "log_every=1"
        )
        assert code == 0, output
    rates = [json.loads(line)["lr"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rates == [pytest.approx(1e-2)] * 3 + [pytest.approx(2e-2)] * 3


def test_the_slow_worker_is_named_and_communication_is_measured(tmp_path: Path) -> None:
    code, output = launch(tmp_path, 3, "micro_batch=4", 'data={"slow": 1}', "profile.communication=3")
    assert code == 0, output
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["slowest_rank"] for row in rows] == [1, 1, 1]
    assert all(row["slowest_own_s"] > row["median_own_s"] + 0.01 for row in rows)
    assert output.count("communication is ") == 1


def test_what_differs_between_workers_is_named(tmp_path: Path) -> None:
    code, output = launch(tmp_path, 3, "micro_batch=4", 'data={"diagnose": true}')
    assert code == 0, output
    assert output.count("[] []") == 3
    bias = "the value of 0.bias is not the same on all workers: rank 1 differs from most"
    weight = "the gradient of 2.weight is not the same on all workers: none on rank 1"
    assert output.count(f"['{bias}'] ['{weight}']") == 3, output


def test_processes_that_read_data_serve_every_worker(tmp_path: Path) -> None:
    """And an end in the middle, and going on with another number of them, end with the same bits."""
    straight = launch(tmp_path / "straight", 2, "micro_batch=4", "steps=8")
    assert straight[0] == 0, straight[1]
    first = launch(tmp_path / "run", 2, "micro_batch=4", "steps=8", "data_workers=2", 'data={"hurt": [[0, 8], [1, 8]]}',
                   "on_oom=stop", "snapshot.every_steps=3")  # fmt: skip
    assert first[0] != 0
    second = launch(tmp_path / "run", 2, "micro_batch=4", "steps=8", "data_workers=1")
    assert not missing(second[1], "resumed step 6 8 known data hurt"), second[1]  # the wish, and nothing else
    assert "; " not in next(line for line in second[1].splitlines() if line.startswith("resumed"))
    assert digests(second[1]) == digests(straight[1])


def test_accumulating_eight_passes_moves_an_eighth_of_the_bytes(tmp_path: Path) -> None:
    moved = {}
    for accumulate, steps in ((1, 16), (8, 2)):
        folder = tmp_path / str(accumulate)
        settings = ("micro_batch=2", f"accumulate={accumulate}", f"steps={steps}", 'data={"count": true}')
        code, output = launch(folder, 2, *settings)
        assert code == 0, output
        moved[accumulate] = sum(int(line.split()[2]) for line in output.splitlines() if line.startswith("moved "))
    parameters = 16 * 32 + 32 + 32 + 1
    assert moved == {1: 2 * 16 * parameters * 4, 8: 2 * 2 * parameters * 4}


def test_workers_that_fail_leave_their_last_collectives_in_the_folder_of_the_run(tmp_path: Path) -> None:
    wish = 'data={"hurt": [[1, 3]]}'
    code, output = launch(tmp_path, 2, "micro_batch=4", "on_oom=stop", wish, run_dir=tmp_path / "run")
    assert code != 0
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "run" / "flight").iterdir()}
    assert found.keys() == {"trace_rank_0.json", "trace_rank_1.json"}, output
    assert all(entries["entries"][-1]["profiling_name"] == "gloo:all_reduce" for entries in found.values())


def test_settings_that_are_refused_leave_no_record(tmp_path: Path) -> None:
    code, _ = launch(tmp_path, 2, "strategy=single", run_dir=tmp_path / "run")
    assert code != 0
    assert not (tmp_path / "run").exists()


BEFORE_CUDA = """
import json, os, torch
from dtctl.runtime.distributed import process_group
from dtctl.runtime import determinism
from dtctl.runtime.main import run
from dtctl.runtime.stop import Outcome
real = process_group.resolve_worker_from_env
def identify(environ):  # the first that asks for CUDA
    print(json.dumps([torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
                      torch.cuda.is_initialized(), *map(os.environ.get, determinism.VARIABLES)]))
    return real(environ)
process_group.resolve_worker_from_env = identify
def train(config, worker):
    from torch._inductor import config as inductor
    print(json.dumps(inductor.deterministic))
    return Outcome.FINISHED
raise SystemExit(run(train, defaults={"deterministic": True}))
"""


def test_determinism_is_set_before_cuda_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BEFORE_CUDA)
    ended = forked.launch(["train.py"], 1, cwd=tmp_path)
    assert ended.code == 0, ended.output
    first, last = ended.output.strip().splitlines()[:2]
    assert json.loads(first) == [True, True, False, ":4096:8", "1"]
    assert json.loads(last) is True
