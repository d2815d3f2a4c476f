"""Kill workers and supervisors in the last second of runs: each launch ends, and ends well.

    python -m tests.fault.last_second --count 200          an hour or less on two cores
    python -m tests.fault.last_second --count 12 --first 60

Runs of all shapes on virtual hosts, one after the other: ddp on 2 x 1 and 2 x 2 workers, hsdp, ep, zero1, and ddp
under torchrun. In the first attempt one worker kills itself, or the supervisor of its node, at a moment that the seed
chooses: from the last steps until after the last snapshot. A launch that has not ended after a time that no restart
takes is a miss, and so is one that fails, or leaves a process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dtctl
from dtctl import names
from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox
from tests.fault.soak import left_on

ROOT = Path(dtctl.__file__).parents[1]
LIMIT_S = 240.0
"""A launch takes ten seconds, and twice that if all are restarted; on a busy machine some times as long."""
LATE_S = {"step": 0.4, "snapshot": 0.05, "end": 0.02}
"""How long after a moment somebody is killed at most."""
MOMENTS = {"step": "the last step but one", "snapshot": "the last snapshot was there", "end": "its training"}
SPEC = """\
cluster: {{transport: sandbox, nodes: {nodes}, slots: {slots}, connect_timeout_s: 20}}
job:
  {{name: last, script: train.py, kind: {kind}, grace_s: 2, max_restarts: 3,
    env: {{PYTHONPATH: "{root}", OMP_NUM_THREADS: 1, VICTIM: "{victim}"}}}}
train:
  {{strategy: {strategy}, steps: 12, micro_batch: 2, lr: 1.0e-3, timeout_s: 60,
    snapshot: {{dir: "{snapshots}", every_steps: 4, keep: 2}}}}
"""
SCRIPT = """\
import json, os, signal, threading, time
import torch
from torch import nn
from dtctl.runtime import MoE, TensorData, Trainer, run

rank, kind, moment, late_s, linger_s = os.environ["VICTIM"].split()

def is_mine():
    first = os.environ["DTCTL_ATTEMPT"] == "0" and "DTCTL_LIVE_EPOCH" not in os.environ
    return first and rank == os.environ["RANK"]

def strike(snapshot=""):
    while snapshot and not os.path.isdir(snapshot):
        time.sleep(0.001)
    time.sleep(float(late_s))
    pid = os.getpid()
    if kind == "supervisor":
        with open(os.path.join(os.environ["DTCTL_RUN_DIR"], "supervisor.json")) as file:
            pid = json.load(file)["pid"]
    os.kill(pid, signal.SIGKILL)

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = MoE(width=8, hidden=16, experts=4, capacity=1.5, balance_loss=1e-2)

    def forward(self, inputs):
        stream = inputs.view(-1, 2, 8)
        return (stream + self.layer(stream)).flatten(1)

def train(config, worker):
    torch.manual_seed(1)
    body = [Mixture()] if not isinstance(config.strategy, str) else [nn.Linear(16, 16), nn.Dropout(0.2)]
    inputs = torch.randn(200, 16, generator=torch.Generator().manual_seed(5))
    trainer = None

    def loss(model, batch):
        time.sleep(0.02)
        if moment != "end" and is_mine() and trainer is not None and trainer.step == config.steps - 2:
            last = os.path.join(config.snapshot.dir, f"step-{config.steps:08}") if moment == "snapshot" else ""
            threading.Thread(target=strike, args=(last,), daemon=True).start()
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(config, worker, nn.Sequential(*body, nn.Linear(16, 1)), loss, TensorData(inputs, inputs[:, :1]))
    outcome = trainer.run()
    if is_mine():
        if moment == "end":
            strike()
        time.sleep(5)  # a supervisor's end is the worker's, too
    if float(linger_s) < 0:  # as programs do whose libraries do not end well
        os._exit(0)
    time.sleep(float(linger_s))  # or have things to do after their training
    return outcome

if __name__ == "__main__":
    raise SystemExit(run(train))
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A run."""

    strategy: str
    slots: int
    kind: str = "direct"


SHAPES = (
    Shape("ddp", 1), Shape("ddp", 2), Shape("hsdp", 2), Shape("{dp: -1, ep: 2}", 2), Shape("zero1", 1),
    Shape("ddp", 1, "torchrun"),
)  # fmt: skip
NODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A launch, and what happened in it."""

    seed: int
    shape: Shape
    struck: str
    code: int | None
    """None: it has not ended."""
    attempts: int
    left: int
    took_s: float
    said: str

    @property
    def is_fine(self) -> bool:
        """Whether it has ended as it should."""
        return (self.code, self.left) == (0, 0)


def launch(sandbox: Sandbox, folder: Path, seed: int) -> Ended:
    """One launch to its end, or to the end of its time."""
    source = random.Random(seed)
    shape = SHAPES[seed % len(SHAPES)]
    rank = source.randrange(NODES * shape.slots)
    kind = source.choice(["worker", "worker", "supervisor"])
    moment = source.choice(sorted(LATE_S))
    late_s = source.uniform(0.0, LATE_S[moment])
    linger_s = source.choice([-1.0, 0.0, source.uniform(0.0, 0.5)])
    shutil.rmtree(folder, ignore_errors=True)
    project = folder / "project"
    project.mkdir(parents=True)
    nodes = [node.name for node in sandbox.nodes[:NODES]]
    text = SPEC.format(
        nodes=json.dumps(nodes), slots=shape.slots, kind=shape.kind, root=ROOT, strategy=shape.strategy,
        victim=f"{rank} {kind} {moment} {late_s:.3f} {linger_s:.3f}", snapshots=folder / "snapshots",
    )  # fmt: skip
    (project / "dtctl.yaml").write_text(text)
    (project / "train.py").write_text(SCRIPT)
    name = f"last-{os.getpid()}-{seed}"
    begun = time.monotonic()
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dtctl", "launch", "--json", "--name", name], cwd=project, stdout=out,
            stderr=subprocess.STDOUT, env=os.environ | {"DTCTL_SANDBOX": sandbox.name},
        )  # fmt: skip
        code: int | None
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    events = project / names.STATE_DIR / names.RUNS_DIR / name / names.EVENTS_FILE
    rows = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    attempts = next((row["attempts"] for row in rows if row["event"] == "done"), 0)
    return Ended(
        seed=seed, shape=shape, struck=f"{kind} of rank {rank} {late_s:.2f} s after {MOMENTS[moment]}", code=code,
        attempts=attempts, left=left_on(sandbox.name, nodes), took_s=time.monotonic() - begun,
        said=(folder / "out").read_text()[-3000:],
    )  # fmt: skip


def strike(sandbox: Sandbox, folder: Path, seeds: Sequence[int]) -> list[Ended]:
    """Launch once for each seed, and print how each launch ends."""
    found = []
    for seed in seeds:
        ended = launch(sandbox, folder, seed)
        found.append(ended)
        verdict = "ok" if ended.is_fine else "MISS"
        shape = f"{ended.shape.strategy} on {NODES}x{ended.shape.slots}, {ended.shape.kind}"
        end = "no end" if ended.code is None else f"exit code {ended.code}"
        text = f"seed {seed}: {verdict}, {shape}: {ended.struck}: {end} after {ended.took_s:.1f} s"
        print(f"{text}, {ended.attempts} attempts, {ended.left} left", flush=True)
        if not ended.is_fine:
            print(ended.said, flush=True)
    return found


def main() -> int:
    """Strike as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="launches")
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(dir=Path.home(), prefix=".dtctl-last-"))
    os.environ["DTCTL_SANDBOX_DIR"] = str(base / "sandbox")
    begun = time.monotonic()
    try:
        sandbox = control.start_sandbox("last", nodes=NODES)
        found = strike(sandbox, base / "run", range(options.first, options.first + options.count))
    finally:
        control.remove_sandbox("last")
        shutil.rmtree(base, ignore_errors=True)
    bad = [ended.seed for ended in found if not ended.is_fine]
    print(f"{len(found)} launches in {time.monotonic() - begun:.0f} s, {len(bad)} misses {bad or ''}".rstrip())
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
