"""A stream with a shuffle buffer and a generator of its own."""

# expect: exact or not exact

from toy import *


class Shuffled:
    shards = 2

    def __init__(self):
        self.points, self.source = list(zip(*points())), random.Random(3)

    def open(self, shard, epoch):
        held = []
        for point in self.points[shard::2]:
            held.append(point)
            if len(held) > 8:
                yield held.pop(self.source.randrange(len(held)))
        yield from held


fit(samples=Shuffled)
