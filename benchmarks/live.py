"""What a lost worker costs: `job.recovery: live` beside a warm restart, torchrun and torchft.

    python benchmarks/live.py --torchft ENV/bin/python     an environment with `pip install torchft`
    python benchmarks/live.py --kills 3                    a short one, without torchft

Three workers on this machine train 1 M parameters in DDP over gloo; one of them gets SIGKILL every 100 steps, each in
turn. Measured: from the kill to the end of the first step that all workers do together again, and how long those that
were not killed stood still; steps done again, samples that no step has had, and how far the weights at the end are from
those of the same program left alone. torchrun and the restart go on from snapshots every 50 steps; torchft's replica
groups have a worker each, and its lighthouse the settings of its README. Refuses to measure on a busy machine.

Two peers are helped. torchrun of torch 2.13 hands the store of the first attempt to all later ones, where gloo finds
the addresses of workers that have ended: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each attempt its own
(https://github.com/pytorch/pytorch/issues/135712). The DDP wrapper of torchft 0.2.0 ends with an AssertionError where
a sum over gloo has failed (`assert fut._fut`), and all survivors end with it: gradients go through `Manager.allreduce`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import keep, wait_for_quiet

WORKERS, EVERY, SNAPSHOT, SAMPLES = 3, 100, 50, 8
"""Workers, steps between kills, steps between snapshots, samples of a worker's step."""
LIMIT_S = 120.0
"""Without being together again; then it counts as stuck."""
TASK = """\
import json, os, sys, time, zlib
import torch
from torch import nn

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])

def model():
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())))

INPUTS = torch.randn(4096, 512, generator=torch.Generator().manual_seed(5))
TARGETS = INPUTS.roll(1, 1).tanh()

def batch(step, rank):
    first = (step * WORKERS + rank) * SAMPLES % 4096
    picked = torch.arange(first, first + SAMPLES) % 4096
    return INPUTS[picked], TARGETS[picked]

def note(rank, step, of=WORKERS):
    with open(os.path.join(FOLDER, f"steps.{rank}"), "a") as file:
        file.write(json.dumps([os.getpid(), step, time.time(), of]) + "\\n")

def end(rank, trained):
    with torch.no_grad():
        loss = float(nn.functional.mse_loss(trained(INPUTS[:512]), TARGETS[:512]))
    weights = torch.cat([value.flatten() for value in trained.state_dict().values()])
    path = os.path.join(FOLDER, f"end.{rank}")
    torch.save({"loss": loss, "weights": weights}, path + ".part")
    os.replace(path + ".part", path)

def over(rank):
    open(os.path.join(FOLDER, f"over.{rank}"), "w").close()
""".replace("WORKERS", str(WORKERS)).replace("SAMPLES", str(SAMPLES))
OURS = """\
from task import *
from dtctl.runtime import TensorData, Trainer, run

def train(config, worker):
    def loss(network, batch):
        time.sleep(0.005)
        return nn.functional.mse_loss(network(batch[0]), batch[1])

    trainer = Trainer(config, worker, model(), loss, TensorData(INPUTS, TARGETS))
    trainer.optimizer.register_step_post_hook(lambda *_: note(worker.rank, trainer.step))
    outcome = trainer.run()
    end(worker.rank, trainer.model)
    over(worker.rank)
    return outcome

if __name__ == "__main__":
    raise SystemExit(run(train))
"""
TORCHRUN = """\
from task import *
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    rank, own, first = dist.get_rank(), model(), 0
    optimizer, kept = torch.optim.AdamW(own.parameters(), lr=1e-3, fused=True), os.path.join(FOLDER, "kept.pt")
    if os.path.exists(kept):
        state = torch.load(kept)
        own.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    wrapped = DistributedDataParallel(own)
    for step in range(first, STEPS):
        optimizer.zero_grad()
        time.sleep(0.005)
        inputs, targets = batch(step, rank)
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()
        note(rank, step)
        if (step + 1) % EVERY == 0 and rank == 0:
            state = {"model": own.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, kept + ".part")
            os.replace(kept + ".part", kept)
    end(rank, own)
    over(rank)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
""".replace("EVERY", str(SNAPSHOT))
TORCHFT = """\
from task import *
from datetime import timedelta
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

def main():
    rank, own = int(os.environ["REPLICA_GROUP_ID"]), model()
    inner = torch.optim.AdamW(own.parameters(), lr=1e-3, fused=True)
    group = ProcessGroupGloo(timeout=timedelta(seconds=5))

    def load(state):
        own.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=group, min_replica_size=1, load_state_dict=load, replica_id=f"replica_{rank}",
        state_dict=lambda: {"model": own.state_dict(), "optimizer": inner.state_dict()},
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    )
    optimizer, parameters = Optimizer(manager, inner), list(own.parameters())
    # Survivors do not wait: they would be through before the lost one is back.
    while (step := manager.current_step()) < STEPS or not os.path.exists(os.path.join(FOLDER, "enough")):
        optimizer.zero_grad()
        time.sleep(0.005)
        inputs, targets = batch(step, rank)
        nn.functional.mse_loss(own(inputs), targets).backward()
        gradient = nn.utils.parameters_to_vector([each.grad for each in parameters])
        manager.allreduce(gradient).wait()
        for each, sums in zip(parameters, gradient.split([each.numel() for each in parameters])):
            each.grad.copy_(sums.view_as(each))
        optimizer.step()
        if manager.current_step() > step:
            note(rank, manager.current_step() - 1, manager.num_participants())
            if manager.current_step() == STEPS:
                end(rank, own)
    over(rank)
    os._exit(0)  # its threads would wait for those that have ended

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A step that a worker has done."""

    pid: int
    step: int
    time_s: float
    of: int
    """Workers whose samples it has."""


def lines(folder: Path, rank: int) -> list[Line]:
    """All that a worker and those in its place have done."""
    path = folder / f"steps.{rank}"
    text = path.read_text() if path.exists() else ""
    return [Line(*json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def free_port() -> int:
    """A port of this machine that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ours(folder: Path, steps: int, recovery: str) -> list[list[str]]:
    """A launch of dtctl."""
    snapshots = f"{{dir: '{folder}/snapshots', every_steps: {SNAPSHOT if recovery == 'restart' else 10**9}}}"
    (folder / "dtctl.yaml").write_text(
        f"cluster: {{transport: local, slots: {WORKERS}, workdir: '{folder}/node'}}\n"
        f"job: {{script: train.py, args: ['{folder}', {steps}], kind: direct, max_restarts: 100, grace_s: 2, "
        f"recovery: {recovery}, env: {{OMP_NUM_THREADS: 1}}}}\n"
        f"train: {{strategy: ddp, steps: {steps}, micro_batch: {SAMPLES}, lr: 1.0e-3, log_every: 1000000, "
        f"snapshot: {snapshots}}}\n"
    )
    return [[str(Path(sys.executable).parent / "dtctl"), "launch", "--no-doctor", str(folder / "dtctl.yaml")]]


def torchrun(folder: Path, steps: int) -> list[list[str]]:
    """Stock torchrun with its own restarts."""
    return [[
        "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}",
        "--max-restarts=100", "--monitor-interval=0.1", "train.py", str(folder), str(steps),
    ]]  # fmt: skip


def torchft(python: str, folder: Path, steps: int) -> list[list[str]]:
    """A lighthouse, and a torchrun for each replica group, which starts a lost one again."""
    port = free_port()
    quorum = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    begin = f"TORCHFT_LIGHTHOUSE=http://127.0.0.1:{port}"
    return [
        [str(Path(python).parent / "torchft_lighthouse"), *quorum, "--bind", f"127.0.0.1:{port}"],
        *(
            ["env", begin, f"REPLICA_GROUP_ID={rank}", f"NUM_REPLICA_GROUPS={WORKERS}",
             python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=100",
             "--monitor-interval=0.1", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "train.py",
             str(folder), str(steps)]
            for rank in range(WORKERS)
        ),
    ]  # fmt: skip


@dataclass(slots=True)
class Ended:
    """What a run came to."""

    together_s: list[float]
    """From each kill to the first step of all."""
    still_s: list[float]
    """Longest time between two steps of those that were not killed."""
    struck: int
    again: int
    left_out: int
    took_s: float
    end: Any
    """Loss and weights of a worker after the last of the steps; None: they were stuck."""


def train(
    script: str,
    argvs: Callable[[Path, int], list[list[str]]],
    folder: Path,
    kills: int,
    *,
    strike: bool,
    env: dict[str, str] | None = None,
) -> Ended:
    """One run of a program to its end.

    Args:
        script: its train.py.
        argvs: its commands, of a folder and a number of steps.
        folder: its own.
        kills: how many there are; the number of steps follows.
        strike: False leaves it alone.
        env: Variables of its commands; None: those of this process.
    """
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "train.py").write_text(script)
    steps, began_s, struck = EVERY * (kills + 1), time.time(), list[tuple[int, float]]()
    with (folder / "output").open("w") as output:
        running = [
            subprocess.Popen(argv, cwd=folder, stdout=output, stderr=output, start_new_session=True, env=env)
            for argv in argvs(folder, steps)
        ]
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all((folder / f"over.{rank}").exists() for rank in range(WORKERS)):
            if time.monotonic() > deadline:
                print(f"stuck:\n{(folder / 'output').read_text()[-2000:]}", file=sys.stderr)
                break
            done = [lines(folder, rank) for rank in range(WORKERS)]
            if (len(struck) == kills or not strike) and (not struck or _together(done, *struck[-1]) is not None):
                (folder / "enough").touch()
            due = strike and len(struck) < kills and all(row and _reached(row, len(struck)) for row in done)
            if due and (not struck or _together(done, *struck[-1]) is not None):
                rank = len(struck) % WORKERS
                os.kill(done[rank][-1].pid, signal.SIGKILL)
                struck.append((rank, time.time()))
                deadline = time.monotonic() + LIMIT_S
            time.sleep(0.002)
        took_s = time.time() - began_s
    finally:
        for process in running:
            process.terminate()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    done = [lines(folder, rank) for rank in range(WORKERS)]
    steps_of = [[line.step for line in row] for row in done]
    return Ended(
        together_s=[end_s - at for rank, at in struck if (end_s := _together(done, rank, at)) is not None],
        still_s=[_still(done, rank, at) for rank, at in struck if _together(done, rank, at) is not None],
        struck=len(struck),
        again=max(len(row) - len(set(row)) for row in steps_of),
        left_out=SAMPLES * sum(WORKERS - of for of in _committed(done).values()),
        took_s=round(took_s, 1),
        end=next((torch.load(path) for path in sorted(folder.glob("end.?"))), None),
    )


def _reached(row: list[Line], struck: int) -> bool:
    return row[-1].step >= EVERY * (struck + 1)


def _together(done: list[list[Line]], rank: int, at_s: float) -> float | None:
    """When all had done the first step that they did together after a loss."""
    before = {line.pid for line in done[rank] if line.time_s <= at_s}
    back = [line for line in done[rank] if line.pid not in before and line.time_s > at_s and line.of == WORKERS]
    for line in back:
        others = [
            next((each.time_s for each in row if each.step == line.step and each.time_s > at_s), None)
            for other, row in enumerate(done) if other != rank
        ]  # fmt: skip
        if None not in others:
            return max(line.time_s, *(time_s for time_s in others if time_s is not None))
    return None


def _still(done: list[list[Line]], rank: int, at_s: float) -> float:
    """The longest time between two steps of the others, from a loss until all are together again."""
    end_s = (_together(done, rank, at_s) or at_s) + 0.001
    gaps = [0.0]
    for other, row in enumerate(done):
        if other != rank:
            times = [line.time_s for line in row]
            gaps += [after - before for before, after in itertools.pairwise(times) if at_s < after <= end_s]
    return max(gaps)


def _committed(done: list[list[Line]]) -> dict[int, int]:
    """Step -> workers whose samples it has; of a step that was done again the newest counts."""
    newest: dict[int, Line] = {}
    for row in done:
        for line in row:
            if line.step not in newest or line.time_s > newest[line.step].time_s:
                newest[line.step] = line
    return {step: line.of for step, line in newest.items()}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--torchft", help="Python of an environment that has torchft; without it, it is left out")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine, and keep nothing")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    programs: dict[str, tuple[str, Callable[[Path, int], list[list[str]]]]] = {
        "dtctl, live": (OURS, lambda folder, steps: ours(folder, steps, "live")),
        "dtctl, restart": (OURS, lambda folder, steps: ours(folder, steps, "restart")),
        "torchrun": (TORCHRUN, torchrun),
    }
    if options.torchft:
        programs["torchft"] = (TORCHFT, lambda folder, steps: torchft(options.torchft, folder, steps))
    kept: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {"python": platform.python_version(), "cores": str(os.cpu_count())},
        "kills": options.kills,
    }
    titles = f"{'':15} {'recovered':>10} {'together s':>16} {'still s':>8} {'again':>6} {'left out':>9}"
    print(f"{titles} {'loss':>8} {'weights off by':>15}")
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".dtctl-bench-") as temporary:
        for name, (script, argvs) in programs.items():
            if options.only and name not in options.only:
                continue
            ended = {}
            for strike in (False, True):
                if not options.busy:
                    wait_for_quiet()
                ended[strike] = train(script, argvs, Path(temporary) / "run", options.kills, strike=strike)
            kept[name] = row = _row(ended[False], ended[True])
            times = f"{row['together median s']:.3f} ({row['together worst s']:.2f})"
            end = f"{row['loss']:8.5f} {row['weights off by']:15.2e}" if "loss" in row else "   stuck"
            print(
                f"{name:15} {row['recovered']:3} of {row['kills']:3} {times:>16} {row['still median s']:8.3f} "
                f"{row['steps again']:6} {row['samples left out']:9} {end}"
            )
    if not options.busy:
        keep("lost-worker", kept)


def _row(alone: Ended, struck: Ended) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kills": struck.struck,
        "recovered": len(struck.together_s),
        "together median s": round(statistics.median(struck.together_s or [math.nan]), 3),
        "together worst s": round(max(struck.together_s or [math.nan]), 3),
        "still median s": round(statistics.median(struck.still_s or [math.nan]), 3),
        "steps again": struck.again,
        "samples left out": struck.left_out,
        "took s": struck.took_s,
        "left alone took s": alone.took_s,
    }
    if struck.end is not None and alone.end is not None:
        row["loss"], row["loss left alone"] = struck.end["loss"], alone.end["loss"]
        row["weights off by"] = float((alone.end["weights"] - struck.end["weights"]).abs().max())
    return row


if __name__ == "__main__":
    main()
