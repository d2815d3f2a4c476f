"""Samples of a memory-mapped file."""

# expect: exact
# change first: python import numpy as np; a = np.load("points.npy"); a[0] += 1; np.save("points.npy", a)
# change all: python import numpy as np; np.save("points.npy", np.load("points.npy") * 2)

from pathlib import Path
from toy import *


class Mapped(torch.utils.data.Dataset):
    def __init__(self):
        if not Path("points.npy").exists():
            np.save("points.npy", torch.cat(points(), 1).numpy())
        self.rows = np.load("points.npy", mmap_mode="r")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        row = torch.from_numpy(self.rows[at].copy())
        return row[:6], row[6:]


fit(samples=Mapped)
