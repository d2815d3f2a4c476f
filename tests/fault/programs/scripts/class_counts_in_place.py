"""Class-balanced weights from counts in a global tensor."""

# expect: exact

from toy import *

counts = torch.ones(2)


def loss(model, batch):
    inputs, targets = batch
    classes = (targets[:, 0] > 0).long()
    counts.index_add_(0, classes, torch.ones(len(classes)))
    weights = (counts.sum() / counts)[classes]
    return (weights[:, None] * (model(inputs) - targets).square()).mean()


fit(loss)
