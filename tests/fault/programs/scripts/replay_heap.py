"""The hardest batches in a heap."""

# expect: exact

import heapq
from toy import *

hardest = []


def loss(model, batch):
    value = mse(model, batch)
    heapq.heappush(hardest, (value.item(), len(hardest), batch[0].mean().item()))
    if len(hardest) > 4:
        heapq.heappop(hardest)
    return value + 0.1 * hardest[0][0] * model(torch.full((1, 6), hardest[-1][2])).square().sum()


fit(loss)
