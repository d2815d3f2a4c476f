"""BYOL: a student, and a teacher that follows it, in one model of the Trainer; a hook moves the teacher."""

import copy

import torch
from torch import nn

from dtctl.runtime import Hook, TensorData, Trainer, run
from tests.fault.styles.final import save_weights


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.predict = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, one, other):
        with torch.no_grad():
            wanted = self.teacher(other)
        return nn.functional.cosine_similarity(self.predict(self.student(one)), wanted)


class Follow(Hook):
    changes_training = True

    @torch.no_grad()
    def after_step(self, training):
        pair = training.model
        weights = pair.teacher.parameters(), pair.student.parameters()
        for slow, fast in zip(*weights, strict=True):
            slow.lerp_(fast, 0.05)


def loss(model, batch):
    return -model(*batch).mean()


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    views = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2, 96, 4, generator=torch.Generator().manual_seed(1))
    data = TensorData(views + 0.1 * noise[0], views + 0.1 * noise[1])
    trainer = Trainer(config, worker, Pair(), loss, data, hooks=[Follow()])
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"global_batch": 16, "steps": 18, "lr": 0.01}))
