"""Complexity of the batches until now by a zlib compressor."""

# expect: not exact

import zlib
from toy import *

compressor = zlib.compressobj()
size = [0]


def loss(model, batch):
    size[0] = len(compressor.compress(batch[0].numpy().tobytes())) + len(compressor.flush(zlib.Z_SYNC_FLUSH))
    return mse(model, batch) * (1 + size[0] / 100)


fit(loss)
