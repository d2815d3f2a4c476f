"""A clock of one's own: a datetime that is moved on by a timedelta."""

# expect: exact

import datetime
from toy import *

now = datetime.datetime(2026, 1, 1)
every = datetime.timedelta(days=9)


def loss(model, batch):
    global now
    now = now + every
    return mse(model, batch) * (1 + now.month / 4)


fit(loss)
