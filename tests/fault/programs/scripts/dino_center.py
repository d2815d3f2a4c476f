"""DINO's loss: a centre and a schedule of temperatures by an internal count."""

# expect: exact

from toy import *


class DinoLoss:
    def __init__(self):
        self.center, self.step = torch.zeros(1, 6), 0
        self.schedule = np.linspace(0.04, 0.4, 12)

    def __call__(self, model, batch):
        out = model(batch[0])
        teacher = F.softmax((batch[0] - self.center) / self.schedule[self.step], 1)
        self.center = 0.9 * self.center + 0.1 * batch[0].mean(0, keepdim=True)
        self.step += 1
        return -(teacher * F.log_softmax(out / 0.1, 1)).sum(1).mean()


fit(DinoLoss(), model=lambda: nn.Linear(6, 6))
