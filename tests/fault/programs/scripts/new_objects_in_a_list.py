"""Objects of a class of one's own are made during training and kept in a list."""

# expect: exact or not exact

from toy import *


class Anchor:
    def __init__(self, center):
        self.center, self.age = center, 0


anchors = []


def loss(model, batch):
    anchors.append(Anchor(batch[0].mean(0)))
    for anchor in anchors:
        anchor.age += 1
    del anchors[:-4]
    pull = sum(model(a.center[None]).square().sum() / a.age for a in anchors)
    return mse(model, batch) + 0.1 * pull


fit(loss)
