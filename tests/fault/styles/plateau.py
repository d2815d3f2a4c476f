"""ReduceLROnPlateau by the evaluation's score: a hook hands it the score, and its factor to the Trainer."""

import torch
from torch import nn

from dtctl.runtime import Hook, TensorData, Trainer, run
from tests.fault.styles.final import save_weights


class Plateau(Hook):
    """The scheduler has an optimizer of its own, whose rate is a factor."""

    def __init__(self):
        self.factor = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.factor, factor=0.5, patience=0, threshold=0.2)

    def after_evaluation(self, training, scores):
        before = self.factor.param_groups[0]["lr"]
        self.schedule.step(scores["val_loss"])
        training.scale_rate(self.factor.param_groups[0]["lr"] / before)

    def state_dict(self):
        return {"factor": self.factor.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state):
        self.factor.load_state_dict(state["factor"])
        self.schedule.load_state_dict(state["schedule"])


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.cumsum(1)[:, :3].sin()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    trainer = Trainer(
        config,
        worker,
        model,
        lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        TensorData(inputs[:96], targets[:96]),
        validation=TensorData(inputs[96:], targets[96:]),
        score=lambda model, batch: {"loss": ((model(batch[0]) - batch[1]) ** 2).mean(1)},
        hooks=[Plateau()],
    )
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    defaults = {"global_batch": 16, "steps": 18, "lr": 0.02, "schedule": "constant", "eval_every": 3}
    raise SystemExit(run(train, defaults=defaults))
