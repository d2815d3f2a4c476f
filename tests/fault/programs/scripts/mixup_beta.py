"""Mixup as in the paper's code: np.random.beta and torch.randperm."""

# expect: exact
# change alpha: edit 0.4 => 0.8
# change other_batch: arg --train.micro_batch=8

from toy import *


def loss(model, batch):
    inputs, targets = batch
    share = np.random.beta(0.4, 0.4)
    order = torch.randperm(len(inputs))
    out = model(share * inputs + (1 - share) * inputs[order])
    return share * F.mse_loss(out, targets) + (1 - share) * F.mse_loss(out, targets[order])


fit(loss)
