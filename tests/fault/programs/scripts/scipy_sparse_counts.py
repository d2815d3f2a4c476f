"""Counts in a sparse matrix of SciPy."""

# expect: exact or not exact

import scipy.sparse
from toy import *

counts = scipy.sparse.lil_matrix((4, 4))


def loss(model, batch):
    counts[int(abs(batch[0][0, 0].item())) % 4, 1] += 1
    return mse(model, batch) * (1 + 0.1 * counts.sum() + counts[0, 1])


fit(loss)
