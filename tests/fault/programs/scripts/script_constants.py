"""Constants at the top of a script."""

# expect: exact
# change constant: edit MARGIN = 0.2 => MARGIN = 0.25
# change comment: edit # the margin => # the margin of the hinge
# change unused: edit UNUSED = 1 => UNUSED = 2

from toy import *

# the margin
MARGIN = 0.2
UNUSED = 1


def loss(model, batch):
    return F.relu((model(batch[0]) - batch[1]).abs() - MARGIN).mean()


fit(loss)
