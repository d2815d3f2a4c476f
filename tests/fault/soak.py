"""Kill anything at random, again and again, and end with the bits of a run that was left alone.

    python -m tests.fault.soak                    10 seeds each of ddp and fsdp on 2 x 2 workers, 3 of 3 x 1; an hour
    python -m tests.fault.soak --seeds 1 --kills 6
    python -m tests.fault.soak --seeds 5 --only ddp --slurm       in jobs of Slurm; no hosts

A training with dropout, accumulation and processes that read data runs on virtual hosts; workers and their readers,
supervisors and whole hosts get SIGKILL at random steps, some while a snapshot is being written. Checked for each seed:
the digest of the last snapshot, that no process is left on any host, that the ledger adds up to the time that a clock
outside has seen, and that every snapshot on disk is whole. Snapshots lie in a folder that all hosts see.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import dtctl
from dtctl import names
from dtctl.launch.control.progress import ReportedPhase
from dtctl.runtime.snapshot import commands
from dtctl.runtime.snapshot.format import layout
from dtctl.sandbox import control, faults, slurm
from dtctl.sandbox.layout import Sandbox, SandboxNode
from dtctl.supervisor import progress
from tests.integration.slurm_hosts import python_path

ROOT = Path(dtctl.__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KINDS = ("worker", "worker", "worker", "save", "save", "start", "agent", "host")
"""What is killed, each as likely as any other; `save` and `start`: a worker, while a snapshot is written, or before the
first step of an attempt (if that is under way: else in a step)."""
WARM = "warm process"
STUCK_S = 90.0
SETTLED_S = 6.0
"""Time after a kill within which the attempt ends, if it ends by it: twice `link_timeout_s`."""
SPEC = """\
cluster:
  {{{way}, slots: {slots}, connect_timeout_s: 5, link_timeout_s: 3}}
job:
  {{name: soak, script: train.py, kind: direct, grace_s: 2, max_restarts: 200, recovery: restart,
    env: {{PYTHONPATH: "{root}", OMP_NUM_THREADS: 1}}}}
train:
  {{strategy: {strategy}, steps: {steps}, micro_batch: 2, accumulate: 4, lr: 1.0e-3, clip_norm: 1.0, data_workers: 2,
    log_every: 1, timeout_s: 60, require_exact: true, snapshot: {{dir: "{snapshots}", every_steps: 5, keep: 3}}}}
"""
SCRIPT = """\
import time
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run

def train(config, worker):
    torch.manual_seed(1)
    body = [layer for _ in range(3) for layer in (nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.2))]
    inputs = torch.randn(900, 96, generator=torch.Generator().manual_seed(5))

    def loss(model, batch):
        time.sleep(PACE_S)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = nn.Sequential(*body, nn.Linear(96, 1))
    return Trainer(config, worker, model, loss, TensorData(inputs, inputs[:, :1] - inputs[:, 1:2])).run()

PACE_S = 0.005
if __name__ == "__main__":
    raise SystemExit(run(train))
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is trained, and where."""

    nodes: int
    slots: int
    strategy: str
    steps: int = 120


@dataclass(slots=True)
class Ended:
    """What a seed came to."""

    seed: int | None
    code: int
    digest: str
    killed: list[str] = field(default_factory=list)
    attempts: int = 0
    wall_s: float = 0.0
    """By a clock outside."""
    ledger: dict[str, object] = field(default_factory=dict)
    left: int = 0
    """Processes on the hosts, after it had ended."""
    bad: list[str] = field(default_factory=list)
    """Snapshots that are not whole."""
    said: str = ""
    """The end of what it printed, if it failed."""

    @property
    def ledger_error(self) -> float:
        """Share of the time outside that the ledger does not account for."""
        phases = self.ledger.get("phases_s")
        return abs(sum(phases.values()) - self.wall_s) / self.wall_s if isinstance(phases, dict) else 1.0


def soak(sandbox: Sandbox, folder: Path, shape: Shape, *, seed: int | None, kills: int) -> Ended:
    """One run to its end, with things killed on the way.

    Args:
        sandbox: with enough hosts.
        folder: that all hosts see; emptied.
        shape: what to train.
        seed: of what is killed when. None: nothing is.
        kills: how many.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    nodes = [node.name for node in sandbox.nodes[: shape.nodes]]
    snapshots = folder / "snapshots"
    text = SPEC.format(
        way=f"transport: slurm, nodes: {len(nodes)}, python: {json.dumps(sys.executable)}"
        if sandbox.slurm
        else f"transport: sandbox, nodes: {json.dumps(nodes)}",
        slots=shape.slots,
        root=ROOT,
        strategy=shape.strategy,
        steps=shape.steps,
        snapshots=snapshots,
    )
    (folder / "dtctl.yaml").write_text(text)
    (folder / "train.py").write_text(SCRIPT)
    name = f"soak-{os.getpid()}-{time.monotonic_ns()}"
    argv = [sys.executable, "-m", "dtctl", "launch", "--json", "--name", name]
    begun = time.monotonic()
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        environ = (
            os.environ | {"DTCTL_SANDBOX": sandbox.name, "PATH": python_path()} | slurm.build_slurm_environment(sandbox)
        )
        process = subprocess.Popen(argv, cwd=folder, stdout=out, stderr=err, env=environ)
    killed: list[str] = []
    try:
        if seed is not None:
            killed = kill_at_random(
                sandbox.name, name, nodes, folder, process, shape, source=random.Random(seed), kills=kills
            )
        code = process.wait(STUCK_S * 3)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    wall_s = time.monotonic() - begun
    if not snapshots.exists():
        raise RuntimeError(f"exit code {code} without a snapshot: {(folder / 'err').read_text()[-3000:]}")
    record = folder / names.STATE_DIR / names.RUNS_DIR / name
    ledger = json.loads((record / names.LEDGER_FILE).read_text())
    rows = commands.verify_snapshots(snapshots)["snapshots"]
    done = json.loads((folder / "out").read_text().splitlines()[-1])
    return Ended(
        seed=seed,
        code=code,
        digest=str(commands.compute_snapshot_digest(snapshots)["digest"]),
        killed=killed,
        attempts=int(done.get("attempts", 0)),
        wall_s=round(wall_s, 3),
        ledger=ledger,
        left=left_on(sandbox.name, nodes),
        bad=[row["path"] for row in rows if row["status"] != "ok"],
        said="" if code == 0 else (folder / "err").read_text()[-3000:],
    )


def kill_at_random(
    sandbox_name: str,
    run: str,
    nodes: list[str],
    folder: Path,
    process: subprocess.Popen[bytes],
    shape: Shape,
    *,
    source: random.Random,
    kills: int,
) -> list[str]:
    """Kill something each time that a step of a random list is reached; what was killed when."""
    killed: list[str] = []
    dead = -1  # the attempt that the last kill has ended
    ended_by_s, settled = 0.0, -1
    for wanted in sorted(source.randrange(1, shape.steps - 12) for _ in range(kills)):
        kind, name = source.choice(KINDS), source.choice(nodes)
        if kind == "host" and host(sandbox_name, name)[0].slurm:
            kind = "worker"  # Slurm takes a host out of service by its own rules, which tests/integration look at
        deadline = time.monotonic() + STUCK_S
        while time.monotonic() < deadline and process.poll() is None:
            now = where(sandbox_name, run, folder)
            if now.attempt == dead and time.monotonic() > ended_by_s:
                settled = now.step if settled < 0 else settled
                dead -= now.step > settled + 1  # it goes on: what was killed only guarded the node
            early = kind == "start" and not now.begun and now.known
            # Not before the attempt after the last kill has come that far: else most kills would hit the start.
            if now.attempt > dead and (early or (now.begun and now.step >= wanted)):
                saving = kind == "save" and comes(folder / "snapshots")
                if what := kill(sandbox_name, name, "worker" if kind == "save" and not saving else kind, source):
                    killed.append(f"{what} on {name} in attempt {now.attempt}, {now.phase} at step {now.step}")
                    dead = dead if what == WARM else now.attempt  # workers do not need it until they are restarted
                    ended_by_s, settled = time.monotonic() + SETTLED_S, -1
                    break
            time.sleep(0.002)
    return killed


def comes(snapshots: Path, limit_s: float = 1.5) -> bool:
    """Whether a snapshot is being written now, or soon."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if any(path.name.endswith(layout.DRAFT_SUFFIX) for path in snapshots.iterdir()):
                return True
    return False


@dataclass(frozen=True, slots=True)
class Where:
    """How far a run is."""

    attempt: int
    step: int
    phase: str
    begun: bool
    """Whether this attempt has done a step."""
    known: bool = True
    """Whether a worker has said anything at all."""


def where(sandbox_name: str, run: str, folder: Path) -> Where:
    """How far a run is, by what its workers note of themselves in the newest attempt."""
    sandbox = control.find_running_sandbox(sandbox_name)
    if sandbox is None:
        raise RuntimeError("the sandbox has gone down")
    top, nodes = sandbox.state, "hosts/*/home/.dtctl/node"
    if sandbox.slurm:
        top, nodes = folder, f"{names.STATE_DIR}/slurm/{run}/nodes/*"
    folders = list(top.glob(f"{nodes}/runs/{run}/attempt-*/progress"))
    attempt = max((int(folder.parent.name.partition("-")[2]) for folder in folders), default=-1)
    rows = [
        row
        for folder in folders
        if folder.parent.name == f"attempt-{attempt}"
        for row in progress.read_worker_progress(str(folder))
    ]
    furthest = max(rows, key=lambda row: row.step, default=None)
    if furthest is None:
        return Where(attempt, 0, "starting", begun=False, known=False)
    phase = ReportedPhase(furthest.phase).name.lower()
    return Where(attempt, furthest.step, phase, begun=furthest.step > furthest.first)


def kill(sandbox_name: str, name: str, kind: str, source: random.Random) -> str:
    """SIGKILL to something of a kind on a host; to what, or an empty text if there was nothing."""
    sandbox, node = host(sandbox_name, name)
    if kind == "host":
        faults.power_off_host(sandbox, node)
        faults.remove_host_faults(sandbox, [node])
        return kind
    mark = "dtctl=b''" if kind == "agent" else "train.py"
    found = [pid for pid, line in sorted(control.list_host_processes(node).items()) if mark in line]
    if not found:
        return ""
    pid = source.choice(found)
    what = WARM if kind != "agent" and holds_signals(pid) else kind
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return what


def holds_signals(pid: int) -> bool:
    """Whether a process is the one that workers are forked from, which alone keeps SIGTERM waiting."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    held = next(line for line in text.splitlines() if line.startswith("SigBlk:"))
    return bool(int(held.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def host(sandbox_name: str, name: str) -> tuple[Sandbox, SandboxNode]:
    """The sandbox and a host as they are now; one that was switched on again has other processes."""
    sandbox = control.find_running_sandbox(sandbox_name)
    if sandbox is None:
        raise RuntimeError("the sandbox has gone down")
    return sandbox, next(node for node in sandbox.nodes if node.name == name)


def left_on(sandbox_name: str, nodes: list[str]) -> int:
    """Processes of runs on the hosts, after a moment to end in."""
    deadline = time.monotonic() + 3
    while True:
        lines = [line for name in nodes for line in control.list_host_processes(host(sandbox_name, name)[1]).values()]
        left = sum("train.py" in line or "dtctl=b''" in line for line in lines)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def main() -> int:
    """Soak, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--only", choices=["ddp", "fsdp", "three"])
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no further seed after this many seconds")
    parser.add_argument("--slurm", action="store_true", help="in jobs of Slurm instead of over SSH")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sandbox is stopped
    base = Path(tempfile.mkdtemp(dir=Path.home(), prefix=".dtctl-soak-"))
    os.environ["DTCTL_SANDBOX_DIR"] = str(base / "sandbox")
    begun = time.monotonic()
    shapes = {"ddp": Shape(2, 2, "ddp", options.steps), "fsdp": Shape(2, 2, "fsdp", options.steps // 2)}
    shapes["three"] = Shape(3, 1, "ddp", options.steps)
    kept: dict[str, object] = {"date": time.strftime("%Y-%m-%d %H:%M"), "kills per seed": options.kills}
    good = True
    try:
        sandbox = control.start_sandbox("soak", nodes=3, with_slurm=options.slurm)
        for label, shape in shapes.items():
            if options.only not in (None, label) or time.monotonic() - begun > options.limit_s:
                continue
            straight = soak(sandbox, base / "run", shape, seed=None, kills=0)
            print(f"{label}: left alone {straight.wall_s:.1f} s, digest {straight.digest[:16]}", flush=True)
            rows = []
            for seed in range(options.first, options.first + options.seeds):
                if time.monotonic() - begun > options.limit_s:
                    break
                row = soak(sandbox, base / "run", shape, seed=seed, kills=options.kills)
                equal = row.digest == straight.digest
                fine = (row.code, row.digest, row.left, row.bad) == (
                    0,
                    straight.digest,
                    0,
                    [],
                ) and row.ledger_error < 0.01
                good &= fine
                rows.append(asdict(row) | {"equal": equal, "ledger_error": row.ledger_error})
                print(
                    f"  seed {seed}: {'ok' if fine else 'FAILED'}, {len(row.killed)} kills, {row.attempts} attempts, "
                    f"{row.wall_s:.1f} s, digest {'equal' if equal else 'DIFFERS'}, "
                    f"ledger off by {row.ledger_error:.2%}, {row.left} left",
                    flush=True,
                )
                if row.code:
                    print(row.said, flush=True)
            kept[label] = {"shape": asdict(shape), "straight": asdict(straight), "seeds": rows}
    finally:
        control.remove_sandbox("soak")
        shutil.rmtree(base, ignore_errors=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"soak-{time.strftime('%Y%m%d-%H%M')}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"kept in {path.relative_to(ROOT)}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
