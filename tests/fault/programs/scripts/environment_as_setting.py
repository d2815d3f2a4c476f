"""Settings from environment variables, read at the start."""

# expect: exact
# change env: env TOY_GAIN=2.0
# change hidden: env TOY_HIDDEN=12

from toy import *

GAIN = float(os.environ.get("TOY_GAIN", "1.0"))
WIDTH = int(os.environ.get("TOY_HIDDEN", "16"))


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(WIDTH / 100), nn.ReLU(), nn.Linear(16, 1))


def loss(model, batch):
    return mse(model, batch) * GAIN


fit(loss, net)
