"""Elastic weight consolidation: Fisher information and anchors are computed at step 3."""

# expect: exact

from toy import *


class EWC:
    def __init__(self):
        self.fisher, self.anchor, self.step = {}, {}, 0

    def penalty(self, model, batch):
        self.step += 1
        if self.step == 3:
            with torch.enable_grad():
                grads = torch.autograd.grad(mse(model, batch), list(model.parameters()))
            for (name, p), grad in zip(model.named_parameters(), grads):
                self.fisher[name], self.anchor[name] = grad.square(), p.detach().clone()
        return sum(
            (self.fisher[name] * (p - self.anchor[name]).square()).sum()
            for name, p in model.named_parameters()
            if name in self.fisher
        )


ewc = EWC()


def loss(model, batch):
    return mse(model, batch) + 5 * ewc.penalty(model, batch)


fit(loss)
