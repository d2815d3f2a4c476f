"""A setting that the loss reads from the environment each time; the guide says it is not covered."""

# expect: exact
# change env: env TOY_GAIN=2.0

from toy import *


def loss(model, batch):
    return mse(model, batch) * float(os.environ.get("TOY_GAIN", "1.0"))


fit(loss)
