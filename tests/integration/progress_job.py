"""Jobs that note their progress as a training does, but without torch, and break at a step."""

from __future__ import annotations

BREAKS_AT_30 = """\
import os, pathlib, signal, time
from dtctl.runtime.telemetry.progress import ProgressFile, WorkerPhase as Phase

attempt, rank, world = (int(os.environ[name]) for name in ("DTCTL_ATTEMPT", "RANK", "WORLD_SIZE"))
progress = ProgressFile(rank)
there = pathlib.Path.cwd()  # which all nodes of a Slurm job see
time.sleep(0.3)
first = 20 if attempt else 0
progress.begin(first, until=40)
for step in range(first, 40):
    progress.forward()
    progress.backward()
    time.sleep(0.05)
    progress.step(step + 1)
    if (step + 1) % 10 == 0:
        with progress.timing_phase(Phase.SNAPSHOT):
            time.sleep(0.1)
    if step + 1 == 30 and attempt == 0:
        (there / f"{rank}-at-30").touch()
        if rank == world - 1:
            while len(list(there.glob("*-at-30"))) < world:
                time.sleep(0.01)
            ACT
        while True:
            time.sleep(0.01)
progress.end()
"""
FAILS_AFTER_7 = """\
import os, time
from dtctl.runtime.telemetry.progress import ProgressFile

progress = ProgressFile(int(os.environ["RANK"]))
progress.begin(0)
for step in range(1, 8):
    progress.step(step)
time.sleep(NOTED_S)
raise ValueError("the gradient of step 8 is not finite")
"""


def breaks_at_30(act: str) -> str:
    """40 steps of 50 ms, snapshots of 100 ms every 10; in the first attempt the last rank does `act` at step 30.

    It does so once all ranks are there, and they then go no further. A second attempt goes on from step 20.
    """
    return BREAKS_AT_30.replace("ACT", act)


def fails_after_7(*, noted_s: float = 0.0) -> str:
    """The same exception after the same step in every attempt, `noted_s` seconds after the step was noted."""
    return FAILS_AFTER_7.replace("NOTED_S", str(noted_s))
