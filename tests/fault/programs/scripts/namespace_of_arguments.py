"""Arguments in an argparse.Namespace, which training changes too."""

# expect: exact
# change beta: edit beta=0.7 => beta=0.9

import argparse
from toy import *

args = argparse.Namespace(beta=0.7, level=0.0, name="run")


def loss(model, batch):
    args.level = args.beta * args.level + (1 - args.beta) * batch[1].mean().item()
    return mse(model, (batch[0], batch[1] - args.level))


fit(loss)
