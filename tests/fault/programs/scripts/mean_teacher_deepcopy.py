"""Mean teacher: a deep copy of the student in a closure."""

# expect: exact
# change decay: edit 0.9 => 0.7
# change more_logs: arg --train.log_every=1

import copy
from toy import *


def train(config, worker):
    student = mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)

    def loss(model, batch):
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters()):
                old.mul_(0.9).add_(new, alpha=1 - 0.9)
        return mse(model, batch) + F.mse_loss(model(batch[0]), teacher(batch[0] + 0.1))

    return finish(Trainer(config, worker, student, loss, data()))


start(train)
