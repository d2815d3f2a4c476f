"""Which worker, which step: a loss of one of two workers that is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtctl
from tests import forked
from tests.hosts import Project

pytestmark = pytest.mark.torch

ROOT = Path(dtctl.__file__).parents[1]

SCRIPT = """\
import math
import torch
from torch import nn
from dtctl.runtime import MoE, TensorData, Trainer, run

class Mixture(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        self.mixture = MoE(width=8, hidden=4, experts=4, bias_rate=1e-3)

    def forward(self, inputs):
        return super().forward(inputs + self.mixture(inputs[:, None]).squeeze(1))

def train(config, worker):
    torch.manual_seed(3)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    samples = TensorData(inputs, inputs.sum(1, keepdim=True))

    def loss(model, batch):
        value = nn.functional.mse_loss(model(batch[0]), batch[1])
        wish = config.data
        begun = trainer is not None  # a mesh computes a loss to try itself before
        return value * math.nan if begun and trainer.step + 1 == wish["at"] and worker.rank in wish["ranks"] else value

    trainer = None
    model = nn.Linear(8, 1) if isinstance(config.strategy, str) else Mixture()
    trainer = Trainer(config, worker, model, loss, samples)
    return trainer.run()

if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"steps": 30, "log_every": 25, "micro_batch": 4, "timeout_s": 40}))
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", '{"ep": 2}'])
@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("[1]", "the gradient of step 21 is not finite: the loss of rank 1 was not"),
        (
            "[0, 1]",
            "the gradient of step 21 is not finite: the loss of step 21 is the first that is not on all workers; the "
            "gradient of step 20, which was not checked, may have corrupted the weights before",
        ),
    ],
    ids=["one", "all"],
)
def test_the_step_and_the_rank_are_those_where_it_began(tmp_path: Path, strategy: str, ranks: str, said: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = ["train.py", f"--train.strategy={strategy}", f'--train.data={{"at": 21, "ranks": {ranks}}}']
    ended = forked.launch(argv, 2, cwd=tmp_path)
    assert ended.code != 0
    assert ended.output.count(f"error: {said}\n") == 2, ended.output


SPEC = """\
cluster: {{transport: local, slots: 2, workdir: "{workdir}"}}
job:
  {{name: test, script: train.py, kind: direct, max_restarts: 9, env: {{PYTHONPATH: "{root}", OMP_NUM_THREADS: 1}}}}
train: {{log_every: 25, snapshot: {{every_steps: 15}}, data: {{at: 21, ranks: [0, 1]}}}}
"""


def test_the_restarts_end_with_the_second_and_that_names_the_parameters(project: Project) -> None:
    project.write("train.py", SCRIPT)
    project.write("dtctl.yaml", SPEC.format(workdir=project.folder.parent / "work", root=ROOT))
    done = project.run("launch", "--json")
    assert (done.code, done.done["attempts"]) == (8, 2), done.err
    notes = [event["text"] for event in done.events if event["event"] == "note"]
    assert notes == ["not restarted: 2 attempts have failed with the same error after step 20"]
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert failure["summary"] == (
        "error: the gradient of step 21 is not finite: the loss on all workers was not; not finite: weight, bias"
    )
