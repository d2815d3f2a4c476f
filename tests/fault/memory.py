"""Take the power from hosts at random, with snapshots in memory alone, and end with the bits of a run left alone.

    python -m tests.fault.memory --count 20 --mesh fsdp=4 --shape 2x2
    python -m tests.fault.memory --count 20 --mesh pp=2 --shape 2x1

Nothing is on a disk before the end of the training: what a host had in its memory is gone with its power, and comes
from its neighbour's copy. Checked for each run: digest, that each attempt has resumed from memory and how many steps
were done again, processes and memory left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dtctl
from dtctl import names
from dtctl.runtime.snapshot import commands
from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox
from tests.fault.soak import host, kill, left_on

ROOT = Path(dtctl.__file__).parents[1]
EVERY = 3
"""Steps between snapshots in memory."""
STUCK_S = 300.0
SPEC = """\
cluster:
  {{transport: sandbox, nodes: {nodes}, spares: {spares}, slots: {slots}, connect_timeout_s: 20, link_timeout_s: 6}}
job:
  {{name: memory, script: train.py, kind: direct, grace_s: 2, max_restarts: 50, env: {{PYTHONPATH: "{root}",
    OMP_NUM_THREADS: 1, ENOUGH: "{folder}/enough", DONE: "{folder}/step"}}}}
train:
  {{strategy: {mesh}, steps: 300, micro_batch: 2, accumulate: 2, lr: 1.0e-3, clip_norm: 1.0, log_every: 1000,
    timeout_s: 600, snapshot: {{dir: "{folder}/snapshots", every_steps: 1000000, memory: {{every_steps: {every}}}}}}}
"""
SCRIPT = """\
import os, time
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.narrow(torch.relu(self.wide(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def train(config, worker):
    torch.manual_seed(1)
    inputs = torch.randn(900, 32, generator=torch.Generator().manual_seed(5))

    trainer = None  # while it is made, the model is tried, which is no step

    def loss(model, batch):
        step = trainer.step if trainer else 0
        time.sleep(0.01)
        if trainer and worker.rank == worker.world_size - 1:  # of a pipeline, the one that has a loss
            with open(os.environ["DONE"], "w") as file:
                file.write(f"{os.environ['DTCTL_ATTEMPT']} {step}")
        if step == config.steps - 3:  # whoever kills has had enough
            while not os.path.exists(os.environ["ENOUGH"]):
                time.sleep(0.01)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(config, worker, Model(), loss, TensorData(inputs, inputs.roll(1, 1)))
    return trainer.run()

if __name__ == "__main__":
    raise SystemExit(run(train))
"""
RESUMED = re.compile(r"resumed at step (\d+) of \d+( from memory)?: nothing known differs$", re.MULTILINE)


@dataclass(slots=True)
class Ended:
    """What a run came to."""

    code: int = -1
    digest: str = ""
    killed: list[str] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    """The step at which the first worker was last seen before each kill had its consequence."""
    resumed: list[int] = field(default_factory=list)
    """Steps from which attempts went on, all from memory."""
    otherwise: int = 0
    """Attempts that went on from elsewhere, or not exactly."""
    left: int = 0
    held: list[str] = field(default_factory=list)
    """What is left in the memory of hosts."""
    took_s: float = 0.0


def harass(
    record: Path, sandbox: str, folder: Path, source: random.Random, kills: int, nodes: list[str], ended: Ended
) -> None:
    """Take the power from a host once an attempt has trained a few steps, again and again."""
    deadline = time.monotonic() + STUCK_S
    struck, firsts = -1, dict[int, int]()
    while len(ended.killed) < kills and time.monotonic() < deadline:
        attempt, step = _step(folder)
        first = firsts.setdefault(attempt, step)
        # Two snapshots on, so that whoever has come back holds one, too.
        if attempt <= struck or step < first + 2 * EVERY:
            time.sleep(0.02)
            continue
        time.sleep(source.uniform(0.0, 0.5))
        running = list(nodes)
        for row in _rows(record, "replaced"):
            running[running.index(row["node"])] = row["by"]
        name = source.choice(running)
        if kill(sandbox, name, "host", source):
            # An attempt that began meanwhile, for another reason, has this loss, too.
            struck, step = _step(folder)
            ended.killed.append(name)
            ended.at.append(step)
            deadline = time.monotonic() + STUCK_S
    while len(_rows(record, "restart")) < len(ended.killed) and time.monotonic() < deadline:
        time.sleep(0.02)


def _step(folder: Path) -> tuple[int, int]:
    """Attempt and step that the first worker has told of last."""
    try:
        attempt, step = (folder / "step").read_text().split()
    except (OSError, ValueError):  # none yet, or half of it
        return -1, -1
    return int(attempt), int(step)


def _rows(record: Path, kind: str) -> list[dict[str, Any]]:
    path = record / names.EVENTS_FILE
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["event"] == kind]


def train(
    sandbox: Sandbox, folder: Path, shape: tuple[int, int], mesh: str, attack: Callable[[Path, Ended], None] | None
) -> Ended:
    """One run to its end, with hosts killed on the way by `attack`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hosts = [node.name for node in sandbox.nodes]
    text = SPEC.format(
        nodes=json.dumps(hosts[: shape[0]]), spares=json.dumps(hosts[shape[0] :]), slots=shape[1], root=ROOT,
        folder=folder, every=EVERY, mesh=mesh,
    )  # fmt: skip
    (folder / "dtctl.yaml").write_text(text)
    (folder / "train.py").write_text(SCRIPT)
    name = f"memory-{os.getpid()}-{time.monotonic_ns()}"
    record, ended, began_s = folder / names.STATE_DIR / names.RUNS_DIR / name, Ended(), time.monotonic()
    with (folder / "out").open("w") as out:
        argv = [sys.executable, "-m", "dtctl", "launch", "--json", "--name", name]
        process = subprocess.Popen(
            argv, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"DTCTL_SANDBOX": sandbox.name}
        )
    try:
        if attack is not None:
            attack(record, ended)
        (folder / "enough").touch()
        ended.code = process.wait(STUCK_S * 2)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    printed = "".join(path.read_text() for path in (record / names.LOGS_DIR).rglob("rank-*.log"))
    found = [(int(match[1]), bool(match[2])) for match in RESUMED.finditer(printed)]
    ended.resumed = [step for step, from_memory in found if from_memory]
    ended.otherwise = len(_rows(record, "restart")) - len(ended.resumed) + printed.count("not exact: ")
    if ended.code == 0:
        ended.digest = str(commands.compute_snapshot_digest(folder / "snapshots")["digest"])
    else:
        print((folder / "out").read_text()[-4000:], printed[-4000:], sep="\n")
    ended.left = left_on(sandbox.name, hosts)
    for each in hosts:
        up, node = host(sandbox.name, each)
        argv = control.enter_argv(up, node, ["ls", "/dev/shm"])
        ended.held += subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    ended.took_s = round(time.monotonic() - began_s, 1)
    return ended


def main() -> int:
    """Kill, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="kills")
    parser.add_argument("--mesh", default="fsdp=4", help="strategy: axes and their degrees")
    parser.add_argument("--shape", default="2x2", help="nodes x workers on each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="file for the result, JSON")
    options = parser.parse_args()
    nodes, slots = map(int, options.shape.split("x"))
    mesh = "{" + options.mesh.replace("=", ": ") + "}"
    base = Path(tempfile.mkdtemp(dir=Path.home(), prefix=".dtctl-memory-"))
    os.environ["DTCTL_SANDBOX_DIR"] = str(base / "sandbox")
    try:
        sandbox = control.start_sandbox("memory", nodes=nodes + 1)
        straight = train(sandbox, base / "run", (nodes, slots), mesh, None)
        source = random.Random(options.seed)

        def attack(record: Path, ended: Ended) -> None:
            first = [node.name for node in sandbox.nodes[:nodes]]
            harass(record, sandbox.name, base / "run", source, options.count, first, ended)

        row = train(sandbox, base / "run", (nodes, slots), mesh, attack)
    finally:
        control.remove_sandbox("memory")
        shutil.rmtree(base, ignore_errors=True)
    again = max((at - back for at, back in zip(row.at, row.resumed, strict=False)), default=0)
    facts = (row.code, row.digest, len(row.killed), row.otherwise, row.left, row.held)
    fine = facts == (0, straight.digest, options.count, 0, 0, [])
    print(
        f"{'ok' if fine else 'MISS'}: {options.mesh} on {options.shape}, {len(row.killed)} hosts lost their power, "
        f"{len(row.resumed)} attempts resumed from memory and {row.otherwise} otherwise, at most {again} steps done "
        f"again, digest {'equal' if row.digest == straight.digest else 'OTHER'}, {row.left} processes and "
        f"{len(row.held)} folders left, {row.took_s} s (left alone: {straight.took_s} s)"
    )
    if options.keep:
        options.keep.write_text(
            json.dumps({"mesh": options.mesh, "shape": options.shape} | asdict(row), indent=1) + "\n"
        )
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
