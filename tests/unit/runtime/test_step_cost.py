"""How many functions of Python a step of the Trainer calls beside a loop written by hand.

A time would say what else the machine had to do. The number of calls is the same each time, and most of what a step of
a tiny model costs beside torch's own work; `make gate` measures the time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STEPS = 60
COUNT = """\
import logging, os, sys, tempfile
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/benchmarks"]
os.chdir(tempfile.mkdtemp())
import torch
import loop_step
logging.disable(logging.WARNING)
torch.set_num_threads(1)
calls, clock = 0, loop_step.Clock()
def count(frame, event, _):
    global calls
    calls += event == "call"
begin, end = (int(word) for word in sys.argv[3:5])
def step(self):
    self.steps += 1
    if self.steps == begin:
        sys.setprofile(count)
    elif self.steps == end:
        sys.setprofile(None)
loop_step.Clock.step = step
loop_step.LOOPS[sys.argv[2]]("tiny", end + 10, clock)
print("CALLS", calls / (end - begin))
"""


def count_calls(loop: str) -> float:
    """Return the functions of Python that are called in a step of a loop of benchmarks/loop_step.py."""
    argv = [sys.executable, "-c", COUNT, str(ROOT), loop, "40", str(40 + STEPS)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("CALLS")]
    return float(line.split()[1])


@pytest.mark.torch
def test_a_step_calls_few_functions_beside_those_of_torch() -> None:
    assert count_calls("dtctl") - count_calls("bare") <= 55
