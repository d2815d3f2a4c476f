"""What is killed goes on exactly, with every strategy; bad settings end all workers with one sentence, in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.runtime.snapshot import load, read, state
from dtctl.runtime.snapshot.format import layout
from tests import forked
from tests.facts import missing
from tests.integration.test_runtime_training import rows
from tests.verdicts import read_verdict

pytestmark = pytest.mark.torch

SCRIPT = """
import os, signal
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

GARBLED = "GARBLED" in os.environ  # into a model that works whole, and divided in no way

HALVED = os.environ.get("HALVED")  # before this block: the gradient alone

class Halve(torch.autograd.Function):
    @staticmethod
    def forward(_, stream):
        return stream.view_as(stream)

    @staticmethod
    def backward(_, gradient):
        return gradient / 2

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.num_heads = int(os.environ.get("HEADS", "2"))
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.2)

    def forward(self, stream):
        wide = torch.relu(self.up(self.norm(stream)))
        return stream + self.drop(self.down(wide / wide.sum(-1, keepdim=True) if GARBLED else wide))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.batch_norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(Block() for _ in range(int(os.environ.get("BLOCKS", "4"))))
        self.last = nn.Linear(16, 1)

    def forward(self, inputs):
        stream = self.batch_norm(self.first(inputs)) if os.environ["BATCH_NORM"] == "1" else self.first(inputs)
        seen = []
        for number, block in enumerate(self.blocks):
            if str(number) == HALVED:
                stream = Halve.apply(stream)
            stream = block(stream)
            seen.append(stream)
        return self.last(stream + seen[0]) if GARBLED else self.last(stream)

def train(config, worker):
    if os.environ.get("ODD_RANK") == str(worker.rank):
        os.environ["BLOCKS"] = "5"
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(5))
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if os.environ.get("HURT") == f"{worker.rank}:{calls}":
            trainer.training.snapshots.saver.wait()  # the snapshot before is whole, however busy the disk
            os.kill(os.getpid(), signal.SIGKILL)
        if "THAWED" in os.environ:
            trainer.model.first.requires_grad_(trainer.step == 2)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    whole = Model()
    if "SYNCHRONIZED" in os.environ:
        whole.batch_norm = nn.SyncBatchNorm(16)
    whole.first.requires_grad_("THAWED" not in os.environ)
    trainer = Trainer(config, worker, whole, loss, TensorData(inputs, inputs[:, :1] - inputs[:, 1:2]))
    return trainer.run()

if __name__ == "__main__":
    defaults = {
        "global_batch": 16, "accumulate": 4, "clip_norm": 0.5, "steps": 12, "lr": 1e-2, "log_every": 4, "timeout_s": 40,
        "snapshot": {"every_steps": 4, "keep": 3},
    }
    raise SystemExit(run(train, defaults=defaults))
"""


def launch(folder: Path, workers: int, *settings: str, **environment: str) -> forked.Ended:
    """Train in `folder`; settings are `key=value`."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    argv = ["train.py", *(f"--train.{setting}" for setting in settings)]
    return forked.launch(argv, workers, cwd=folder, environ={"BATCH_NORM": "0", **environment})


def digest(folder: Path) -> str:
    ((_, newest), *_) = layout.list_step_folders(folder / "snapshots")
    parts = load.load(read.verify_snapshot(newest))
    return state.compute_state_digest(parts["model"], parts["optimizer"])


@pytest.mark.parametrize(
    ("workers", "strategy", "batch_norm"),
    [
        (3, '"zero1"', "1"),
        (3, '"fsdp"', "1"),
        (2, '"tp"', "0"),
        (4, '{"fsdp": 2, "pp": 2}', "0"),
        (2, '"ddp" --train.ddp.comm_hook=powersgd', "1"),
    ],
)
def test_a_killed_run_ends_with_the_bits_of_one_left_alone(
    tmp_path: Path, workers: int, strategy: str, batch_norm: str
) -> None:
    batch = ("global_batch=24", "accumulate=2") if workers == 3 else ()
    settings = (*f"strategy={strategy}".split(" --train."), *batch)
    straight = launch(tmp_path / "straight", workers, *settings, BATCH_NORM=batch_norm)
    assert straight.code == 0, straight.output
    killed = launch(tmp_path / "killed", workers, *settings, BATCH_NORM=batch_norm, HURT="1:19" if batch else "1:30")
    assert "SIGKILL" in killed.output, killed.output
    resumed = launch(tmp_path / "killed", workers, *settings, BATCH_NORM=batch_norm)
    assert resumed.code == 0, resumed.output
    assert read_verdict(resumed.output) == "exact", resumed.output
    assert digest(tmp_path / "killed") == digest(tmp_path / "straight")
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")


GPT = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"


def example(folder: Path, workers: int, *settings: str) -> list[float]:
    """The losses of the first steps of the GPT of the examples."""
    folder.mkdir()
    shape = 'model={"layers": 2, "embed": 32, "context": 64, "dropout": 0}'
    settings = (shape, "global_batch=8", "steps=4", "log_every=1", *settings)
    ended = forked.launch([GPT, *(f"--train.{setting}" for setting in settings)], workers, cwd=folder)
    assert ended.code == 0, ended.output
    return [loss for _, loss, _ in rows(folder)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return example(tmp_path_factory.mktemp("example") / "one", 1, "micro_batch=8")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tp", "pipeline", '{"cp": 2}'])
@pytest.mark.slow
def test_the_example_learns_the_same_with_every_strategy(tmp_path: Path, expected: list[float], strategy: str) -> None:
    """As `--set train.strategy=...` says it; its first losses beside those of one process."""
    found = example(tmp_path / "two", 2, "accumulate=2", f"strategy={strategy}")
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "environment", "message"),
    [
        (["strategy=dpp"], {}, '`train.strategy` is "dpp", and one of auto, single, ddp'),
        (['strategy={"tp": 3}'], {}, "the mesh tp 3 has 3 workers, and the job has 2"),
        (["strategy=fsdp", "global_batch=15"], {}, "global_batch 15 cannot be divided by 2 workers * accumulate 4 = 8"),
        (["global_batch=208"], {}, "the data set has 200 samples, fewer than one step takes: global batch 208"),
        (["strategy=pipeline", "accumulate=1"], {}, "1 micro batches are fewer than the 2 workers of a pipeline"),
        (["strategy=tp"], {"HEADS": "3"}, "the model has 3 heads (Block.num_heads), which 2 workers cannot divide"),
        (["strategy=tp", 'tp.plan={"blocks.*.upp": "colwise"}'], {}, "no Linear or Embedding of the model is named"),
        (["fsdp.cpu_offload=true", "strategy=fsdp"], {}, "shards can be kept in the host's memory only if there is a"),
        (["ddp.sync_batchnorm=true"], {}, "torch's SyncBatchNorm runs on GPUs only, and this worker has none"),
        (['strategy={"ep": 2}'], {}, "ep divides experts, and none were found in the model"),
        (["strategy=tp", "tp.plan={}"], {"GARBLED": "1"}, "blocks.0 has other results if it is split over 2"),
        (['strategy={"cp": 2}'], {}, "the first block is given a tensor of 2 dims, and cp divides"),
        (['strategy={"cp": 2}', "compile=eager"], {}, "compile cannot be combined with cp"),
        (["strategy=pipeline"], {"BLOCKS": "1"}, "a pipeline needs a model with a list of blocks"),
        (["strategy=pipeline"], {"GARBLED": "1"}, "spread as pp, the model has the loss nan on the first samples"),
        (["strategy=pipeline"], {"HALVED": "2"}, "spread as pp, inputs or gradients of blocks differ from those of"),
        (["strategy=pipeline"], {"ODD_RANK": "1"}, "the workers do not agree on the model's parameters"),
    ],
)  # fmt: skip
def test_bad_settings_end_all_workers_in_seconds(
    tmp_path: Path, settings: list[str], environment: dict[str, str], message: str
) -> None:
    ended = launch(tmp_path, 2, "steps=2", *settings, **environment)
    assert ended.output.count(f"error: {message}") == 2, ended.output
    assert ended.code != 0


@pytest.mark.parametrize("block", [0, 1, 3])
def test_gradients_may_be_changed_where_a_pipeline_is_not_cut(tmp_path: Path, block: int) -> None:
    ended = launch(tmp_path, 2, "steps=2", "strategy=pipeline", HALVED=str(block))
    assert ended.code == 0, ended.output


def test_a_parameter_that_is_thawed_in_training_is_named(tmp_path: Path) -> None:
    """Workers would go on with gradients that nobody has exchanged."""
    ended = launch(tmp_path, 2, "strategy=ddp", "accumulate=1", BATCH_NORM="1", THAWED="1")
    assert not missing(ended.output, "first.weight first.bias gradients step 3")
    alone = launch(tmp_path / "alone", 1, "accumulate=1", "steps=4", BATCH_NORM="1", THAWED="1")
    assert alone.code == 0, alone.output


def test_batch_norm_on_several_workers_is_told_of(tmp_path: Path) -> None:
    """Each worker has the means of its own samples."""
    told = "note: BatchNorm (batch_norm) computes means over the samples of one worker, so 2 workers do not train what"
    two = launch(tmp_path / "two", 2, "strategy=ddp", "steps=1", BATCH_NORM="1")
    assert two.code == 0, two.output
    assert two.output.count(told) == 1
    assert not missing(two.output, "torch.nn.SyncBatchNorm train.ddp.sync_batchnorm")
    alone = launch(tmp_path / "one", 1, "steps=1", BATCH_NORM="1")
    assert "note: BatchNorm" not in alone.output


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_synchronized_batch_norm_without_a_gpu_is_an_error_with_a_place(tmp_path: Path, strategy: str) -> None:
    ended = launch(tmp_path, 2, f"strategy={strategy}", "steps=1", BATCH_NORM="1", SYNCHRONIZED="1")
    assert ended.output.count("error: the model has SyncBatchNorm, which runs on GPUs only") == 2, ended.output
    assert not missing(ended.output, "where batch_norm model")
    assert "Traceback" not in ended.output
