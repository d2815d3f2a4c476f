"""SIGTERM in every phase of a training: each time one agreed snapshot, and in the end the bits of a run left alone.

    python -m tests.fault.stopping             50 signals, some minutes
    python -m tests.fault.stopping --count 10

Two workers on this machine train with dropout, processes that read data, evaluation, compiled blocks and snapshots; the
launcher, one worker or all processes get SIGTERM or SIGUSR1 when the workers start, are in a step, wait for data,
evaluate, compile or save; then the run is launched again, and goes on from its snapshot. A signal during the start ends
the workers at once, and the snapshot that was the newest stays it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import dtctl
from dtctl import names
from dtctl.launch.control.progress import ReportedPhase
from dtctl.launch.records.record import RUN_FILE
from dtctl.names import REQUEUE_EXIT
from dtctl.runtime.snapshot import commands
from dtctl.runtime.snapshot.format import layout
from dtctl.supervisor import processes, progress
from dtctl.supervisor.messages.attempt import WorkerProgress

ROOT = Path(dtctl.__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PHASES = ("start", "step", "data", "evaluation", "save", "compile")
SIGNALS = (
    "launcher SIGTERM", "launcher SIGUSR1", "one worker SIGTERM", "one worker SIGUSR1", "all workers SIGTERM",
    "all workers SIGUSR1",
)  # fmt: skip
"""To whom; `all workers`: their readers of data, too, as a batch system does it."""
START_S = 1.2
"""A start takes longer, from the launcher's word that all are started to the first step."""
SPEC = """\
cluster: {{transport: local, slots: 2, workdir: "{workdir}"}}
job:
  {{name: stops, script: train.py, kind: direct, grace_s: 30,
    env: {{PYTHONPATH: "{root}", OMP_NUM_THREADS: 1}}}}
train:
  {{strategy: ddp, steps: {steps}, micro_batch: 4, accumulate: 2, lr: 1.0e-2, data_workers: 1, log_every: 1,
    timeout_s: 60, compile: eager, eval_every: 4, require_exact: true,
    snapshot: {{dir: "{snapshots}", every_steps: 3, keep: 3}}}}
"""
SCRIPT = """\
import time
import torch
from torch import nn
from dtctl.runtime import Trainer, run

class Data:
    def __init__(self):
        self.inputs = torch.randn(600, 16, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        time.sleep(0.01)  # less than the loop takes, but for the first batches
        return self.inputs[index], self.inputs[index, :1]

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)

def train(config, worker):
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def score(model, batch):
        time.sleep(0.02)
        return {"loss": (model(batch[0]) - batch[1]).square().mean(1)}

    samples = Data()
    validation = torch.utils.data.Subset(samples, range(16))
    return Trainer(config, worker, Network(), loss, samples, validation=validation, score=score).run()

if __name__ == "__main__":
    raise SystemExit(run(train))
"""


@dataclass(frozen=True, slots=True)
class Stopped:
    """What one signal came to."""

    phase: str
    who: str
    code: int
    """Of the launcher."""
    worker_codes: list[int]
    step: int
    """Of the newest snapshot, verified; -1: there is none, or it is bad."""
    done: int
    """Steps that the workers had done when the signal was sent."""
    before: int
    """Step of the newest snapshot before; -1: there was none."""
    err: str

    @property
    def good(self) -> bool:
        """Whether nothing was lost, and the launcher and the workers say that they can go on."""
        asked = self.code == (143 if self.who == "launcher SIGTERM" else REQUEUE_EXIT) and "not exact" not in self.err
        if self.phase == "start":
            return asked and self.step >= self.before
        return asked and self.worker_codes == [REQUEUE_EXIT] * 2 and self.step >= self.done


def stop_again_and_again(base: Path, *, count: int, seed: int, steps: int) -> tuple[list[Stopped], str]:
    """Launch, signal and launch again; then let it go to its end.

    Args:
        base: an empty folder.
        count: of signals.
        seed: of where they are sent.
        steps: of the training; more than `count` launches need.

    Returns:
        What became of each, and the digest at the end.
    """
    source = random.Random(seed)
    write(base, steps)
    # Each phase as often as any other, and any of the signals in each.
    phases = [PHASES[number % len(PHASES)] for number in range(count)]
    source.shuffle(phases)
    found = [stop(base, phase, source.choice(SIGNALS), source) for phase in phases]
    return found, finish(base)


def write(base: Path, steps: int) -> None:
    """Make the project."""
    text = SPEC.format(workdir=work(base), root=ROOT, snapshots=snapshots(base), steps=steps)
    (base / "dtctl.yaml").write_text(text)
    (base / "train.py").write_text(SCRIPT)


def work(base: Path) -> Path:
    """The node's folder; beside the project, which is pushed."""
    return base.with_name(f"{base.name}-work")


def snapshots(base: Path) -> Path:
    """Where the training keeps them."""
    return work(base) / "kept"


def launch(base: Path, name: str) -> subprocess.Popen[str]:
    """Start a launcher."""
    argv = [sys.executable, "-m", "dtctl", "launch", "--json", "--name", name]
    return subprocess.Popen(argv, cwd=base, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(base: Path) -> str:
    """Train to the end; the digest.

    Raises:
        RuntimeError: it does not come there.
    """
    process = launch(base, f"end-{time.monotonic_ns()}")
    _, err = process.communicate(timeout=600)
    if process.returncode != 0 or "not exact" in err:
        raise RuntimeError(err)
    return str(commands.compute_snapshot_digest(snapshots(base))["digest"])


def stop(base: Path, phase: str, who: str, source: random.Random) -> Stopped:
    """One launch that is signalled in a phase."""
    name = f"stop-{time.monotonic_ns()}"
    before = newest_good(base)
    process = launch(base, name)
    try:
        told = wait_for(base, name, phase, process, source)
        send(base, name, who, process, source)
        out, err = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode == 0:
        raise RuntimeError(f"{name} went to its end: {who} in {phase} {told}\n{err}")
    events = [json.loads(line) for line in out.splitlines()]
    return Stopped(
        phase=phase,
        who=who,
        code=process.returncode,
        worker_codes=[event["exit_code"] for event in events if event["event"] == "exit"],
        step=newest_good(base),
        done=max((row.step for row in told), default=0),
        before=before,
        err=err,
    )


def newest_good(base: Path) -> int:
    """Step of the newest snapshot, if it verifies; -1 if there is none, or it is bad."""
    newest = layout.list_step_folders(snapshots(base))
    good = bool(newest) and commands.verify_snapshots(snapshots(base))["newest_good"] == str(newest[0][1])
    return newest[0][0] if good else -1


def wait_for(
    base: Path, name: str, phase: str, process: subprocess.Popen[str], source: random.Random
) -> list[WorkerProgress]:
    """Return when the run is in a phase, with what its workers have told of themselves."""
    folder = work(base) / "runs" / name
    after = source.randrange(0, 6)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        told = progress.read_worker_progress(str(folder / "attempt-0" / "progress"))
        if phase == "start":
            if (folder / "supervisor.json").exists():
                time.sleep(source.random() * START_S)
                return []
        elif len(told) == 2 and any(_is_in(row, phase, base, after) for row in told):
            return told
        time.sleep(0.0005)
    code = process.poll()
    said = process.communicate()[1] if code is not None else ""
    raise RuntimeError(f"{name} did not come to {phase}, after {after} steps: {code}\n{said}")


def send(base: Path, name: str, who: str, process: subprocess.Popen[str], source: random.Random) -> None:
    """Send a signal."""
    number = getattr(signal, who.rsplit(maxsplit=1)[-1])
    if who.startswith("launcher"):
        process.send_signal(number)
        return
    token = json.loads((base / names.STATE_DIR / names.RUNS_DIR / name / RUN_FILE).read_text())["token"]
    found = [pid for pid in processes.find_run_processes(token) if processes.has_run_token(pid, token)]
    # The oldest is the warm process, and stands for the first worker while there is none.
    leaders = [pid for pid in found if os.getsid(pid) == pid]
    for pid in [source.choice(leaders[1:] or leaders)] if who.startswith("one") else found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_in(row: WorkerProgress, phase: str, base: Path, after: int) -> bool:
    """Whether a worker is in a phase, a few steps after its start."""
    if phase == "compile":  # in the first forward pass of an attempt
        return row.phase == ReportedPhase.STEPPING and (row.step > row.first or row.place % 8 == 1)
    if row.phase == ReportedPhase.STARTING or row.step < row.first + after:
        return False
    if phase == "evaluation":
        return row.phase == ReportedPhase.EVALUATION
    if phase == "save":
        return row.phase == ReportedPhase.SNAPSHOT or bool(list((snapshots(base)).glob(f".*{layout.DRAFT_SUFFIX}")))
    if phase == "data":
        return row.phase == ReportedPhase.STEPPING and row.place % 8 == 0
    return row.phase == ReportedPhase.STEPPING


def main() -> int:
    """Stop, print, and say whether all were well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    steps = 12 * options.count + 20
    base = Path(tempfile.mkdtemp(prefix="dtctl-stops-"))
    try:
        (base / "straight").mkdir()
        (base / "stopped").mkdir()
        write(base / "straight", steps)
        expected = finish(base / "straight")
        found, digest = stop_again_and_again(base / "stopped", count=options.count, seed=options.seed, steps=steps)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    for row in found:
        print(f"{'ok' if row.good else 'FAILED':6} {row.phase:10} {row.who:22} done {row.done:4} snapshot {row.step:4}")
        if not row.good:
            print(row.code, row.worker_codes, row.err[-2000:])
    good = sum(row.good for row in found)
    print(f"{good} of {len(found)} with a verified snapshot; digest {'equal' if digest == expected else 'DIFFERS'}")
    path = RESULTS / f"signals-{time.strftime('%Y%m%d-%H%M')}.json"
    rows = [{key: value for key, value in asdict(row).items() if key != "err"} | {"good": row.good} for row in found]
    kept = {"date": time.strftime("%Y-%m-%d %H:%M"), "good": good, "signals": len(found), "seed": options.seed}
    path.write_text(json.dumps(kept | {"digest equal": digest == expected, "rows": rows}, indent=1) + "\n")
    return 0 if good == len(found) and digest == expected else 1


if __name__ == "__main__":
    raise SystemExit(main())
