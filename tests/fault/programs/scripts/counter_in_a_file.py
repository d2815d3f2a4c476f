"""A counter in a file; the guide says that files which code reads are not covered."""

# expect: not exact

from pathlib import Path
from toy import *


def loss(model, batch):
    file = Path("count.txt")
    count = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(count))
    return mse(model, batch) * (1 + 0.1 * count)


fit(loss)
