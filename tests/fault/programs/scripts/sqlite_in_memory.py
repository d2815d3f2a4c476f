"""Losses in an in-memory database."""

# expect: not exact

import sqlite3
from toy import *


def train(config, worker):
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table losses (value real)")

    def loss(model, batch):
        value = mse(model, batch)
        base.execute("insert into losses values (?)", (value.item(),))
        (mean,) = base.execute("select avg(value) from losses").fetchone()
        return value / (0.1 + mean)

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
