"""The model owns the discriminator and its optimizer (a GAN module of one piece)."""

# expect: exact

from toy import *


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = mlp()
        judge = nn.Linear(1, 1)
        object.__setattr__(self, "judge", judge)
        self.judge_optimizer = torch.optim.Adam(judge.parameters(), lr=0.03)

    def forward(self, x):
        return self.generator(x)

    def teach(self, real, fake):
        self.judge_optimizer.zero_grad()
        (F.softplus(-self.judge(real)) + F.softplus(self.judge(fake.detach()))).mean().backward()
        self.judge_optimizer.step()


def loss(model, batch):
    fake = model(batch[0])
    model.teach(batch[1], fake)
    return F.softplus(-model.judge(fake)).mean() + 0.2 * F.mse_loss(fake, batch[1])


fit(loss, Gan)
