"""A file that the loss reads in each step; the guide says it is not covered."""

# expect: exact
# change file: python open("gain.txt", "w").write("2.0")

from pathlib import Path
from toy import *


def loss(model, batch):
    file = Path("gain.txt")
    return mse(model, batch) * (float(file.read_text()) if file.exists() else 1.0)


fit(loss)
