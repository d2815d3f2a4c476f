"""A hook before the optimizer's step centres gradients and counts."""

# expect: exact

from toy import *


def train(config, worker):
    count = 0

    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

        def centre(optimizer, args, kwargs):
            nonlocal count
            count += 1
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(1 + 0.1 * (count % 3))

        optimizer.register_step_pre_hook(centre)
        return optimizer

    return finish(Trainer(config, worker, mlp(), mse, data(), optimizer=make))


start(train)
