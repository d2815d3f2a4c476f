"""A counter that a child process keeps."""

# expect: not exact

import subprocess
import sys
from toy import *

CODE = "import sys\nn = 0\nfor line in sys.stdin:\n    n += 1\n    print(n, flush=True)"
child = subprocess.Popen([sys.executable, "-S", "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def loss(model, batch):
    child.stdin.write("\n")
    child.stdin.flush()
    return mse(model, batch) * (1 + 0.1 * int(child.stdout.readline()))


fit(loss)
