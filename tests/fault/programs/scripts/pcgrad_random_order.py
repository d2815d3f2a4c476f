"""Gradient surgery: hooks project onto kept gradients, in an order drawn by NumPy."""

# expect: exact

from toy import *

past = {}


def train(config, worker):
    model = mlp()

    def surgery(name):
        def hook(grad):
            others = past.setdefault(name, [])
            for at in np.random.permutation(len(others)):
                dot = (grad * others[at]).sum()
                if dot < 0:
                    grad = grad - dot * others[at] / others[at].square().sum().clamp_min(1e-12)
            others.append(grad.clone())
            del others[:-3]
            return grad

        return hook

    for name, p in model.named_parameters():
        p.register_hook(surgery(name))
    return finish(Trainer(config, worker, model, mse, data()))


start(train)
