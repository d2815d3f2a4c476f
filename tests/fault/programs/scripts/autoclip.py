"""AutoClip: the percentile of all norms until now."""

# expect: exact

from toy import *


class AutoClip:
    def __init__(self, percentile):
        self.percentile, self.norms = percentile, []

    def __call__(self, optimizer, args, kwargs):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in params))
        self.norms.append(norm)
        torch.nn.utils.clip_grad_norm_(params, float(np.percentile(self.norms, self.percentile)))


def make(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.register_step_pre_hook(AutoClip(30))
    return optimizer


fit(optimizer=make)
