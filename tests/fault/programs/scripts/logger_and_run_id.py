"""A tracking object with a random id, a start time, a lock and a logger, as experiment trackers have it."""

# expect: exact

import logging
import threading
import time
import uuid
from toy import *


class Tracker:
    def __init__(self):
        self.id, self.began, self.lock = uuid.uuid4().hex, time.time(), threading.Lock()
        self.log, self.points = logging.getLogger("toy"), []

    def add(self, value):
        with self.lock:
            self.points.append((time.time() - self.began, value))
            self.log.info("%s", value)


tracker = Tracker()


def loss(model, batch):
    value = mse(model, batch)
    tracker.add(value.item())
    return value


fit(loss)
