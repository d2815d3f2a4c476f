"""An average is kept by a pool of threads that is waited for."""

# expect: exact

from concurrent.futures import ThreadPoolExecutor
from toy import *

pool = ThreadPoolExecutor(1)
average = torch.zeros(6)


def move(mean):
    average.mul_(0.8).add_(mean, alpha=0.2)


def loss(model, batch):
    pool.submit(move, batch[0].mean(0)).result()
    return F.mse_loss(model(batch[0] - average), batch[1])


fit(loss)
