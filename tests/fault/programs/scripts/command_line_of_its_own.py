"""Arguments of one's own by argparse, into a closure."""

# expect: exact
# change arg: argv --gain 2.0

import argparse
import sys
from toy import *

parser = argparse.ArgumentParser()
parser.add_argument("--gain", type=float, default=1.0)
known, rest = parser.parse_known_args()
sys.argv[1:] = rest


def train(config, worker):
    def loss(model, batch):
        return mse(model, batch) * known.gain

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
