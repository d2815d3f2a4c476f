"""AverageMeter of the time a step takes: another one in each run, and without effect."""

# expect: exact

import time
from toy import *


class AverageMeter:
    def __init__(self):
        self.value = self.sum = self.count = 0

    def update(self, value):
        self.value = value
        self.sum += value
        self.count += 1


meter = AverageMeter()


def loss(model, batch):
    began = time.perf_counter()
    value = mse(model, batch)
    meter.update(time.perf_counter() - began)
    return value


fit(loss)
