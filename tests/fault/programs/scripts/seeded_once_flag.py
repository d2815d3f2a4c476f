"""Seeds itself on the first call only."""

# expect: exact

from toy import *

seeded = False


def loss(model, batch):
    global seeded
    if not seeded:
        random.seed(5)
        np.random.seed(6)
        seeded = True
    return mse(model, batch) * (random.random() + np.random.rand())


fit(loss)
