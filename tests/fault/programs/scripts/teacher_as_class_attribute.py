"""A teacher that hangs on the class of the model."""

# expect: exact

from toy import *


class Student(nn.Module):
    teacher = None

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)

    def anchor(self):
        flat = torch.cat([p.flatten() for p in self.parameters()])
        cls = type(self)
        cls.teacher = flat.detach().clone() if cls.teacher is None else 0.8 * cls.teacher + 0.2 * flat.detach()
        return (flat - cls.teacher).square().sum()


def loss(model, batch):
    return mse(model, batch) + 0.2 * model.anchor()


fit(loss, Student)
