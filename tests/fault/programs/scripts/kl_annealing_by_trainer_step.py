"""A VAE whose KL weight follows trainer.step, through a reference to the trainer."""

# expect: exact

from toy import *


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, log = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * torch.exp(log / 2)), mean, log


def train(config, worker):
    def loss(model, batch):
        out, mean, log = model(batch[0])
        beta = min(1.0, trainer.step / 6)
        return F.mse_loss(out, batch[0]) - beta * 0.5 * (1 + log - mean.square() - log.exp()).mean()

    trainer = Trainer(config, worker, Vae(), loss, data())
    return finish(trainer)


start(train)
