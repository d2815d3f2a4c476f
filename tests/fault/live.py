"""Kill workers at random while the others stay, again and again, and end with the bits of a run that was left alone.

    python -m tests.fault.live --count 100              ddp on 3 x 1 workers, 20 kills in each run
    python -m tests.fault.live --count 40 --shape 2x2 --strategy hsdp
    python -m tests.fault.live --count 40 --shape 2x2 --strategy ep       a mixture whose experts each node divides
    python -m tests.fault.live --count 52 --kills 52 --shelter      one worker that stays: what 50 healings leave in it
    python -m tests.fault.live --count 40 --slurm       in jobs of Slurm; no hosts, no cables

A training with dropout, accumulation, evaluation, snapshots and processes that read data runs on virtual hosts.
Workers, their readers, the process that workers are forked from and supervisors get SIGKILL at random moments: one, two
at once, one while another is replaced, in an evaluation or a snapshot, in the first step and the last; one is frozen;
hosts lose their power and come back, or their cable without a reset, with two spares. Two at once never have the same
part of the state (hsdp, ep), which would be a restart, as nobody else has it. Checked for each run: digest, attempts (a
restart of all is a miss), process ids of those that stayed, steps done again, processes left, and for the worker that
has seen most healings its threads and sockets before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import dtctl
from dtctl import names
from dtctl.runtime.snapshot import commands
from dtctl.sandbox import control, faults, slurm
from dtctl.sandbox.layout import Sandbox
from tests.fault import soak
from tests.fault.soak import host, left_on
from tests.integration.slurm_hosts import python_path

ROOT = Path(dtctl.__file__).parents[1]
KINDS = (
    *("worker",) * 6, "reader", "two", "during", "warm", "frozen", "frozen meanwhile", "evaluation", "save",
    "supervisor", "host", "cut",
)  # fmt: skip
EDGES = ("first", "last")
NOT_IN_SLURM = ("host", "cut")
"""Slurm takes a host out of service by its own rules, which tests/integration look at."""
"""Steps in which somebody is killed in each run."""
SPARES = 2
CUT_S = 20.0
"""How long a cable is out, unless the run goes on before; longer than it takes to notice."""
STUCK_S = 240.0
IDLE_SNAPSHOTS = 12
"""Snapshots after which a kill has had no consequence."""
SPEC = """\
cluster: {{{cluster}, spares: {spares}, slots: {slots}}}
job:
  {{name: live, script: train.py, kind: direct, grace_s: 2, max_restarts: 50, recovery: live, heal_s: 120, hang_s: 20,
    hang_start_s: 300, env: {{PYTHONPATH: "{root}", OMP_NUM_THREADS: 1, TRAPS: "{traps}"}}}}
train:
  {{strategy: {strategy}, steps: {steps}, micro_batch: 2, accumulate: 2, lr: 1.0e-3, clip_norm: 1.0, data_workers: 1,
    log_every: 3, eval_every: 10, timeout_s: 600, ema: {{decay: 0.9}},
    snapshot: {{dir: "{snapshots}", every_steps: 5, keep: 2}}}}
"""
SCRIPT = """\
import os, signal, time
import torch
from torch import nn
from dtctl.runtime import MoE, TensorData, Trainer, run

TRAPS = os.environ["TRAPS"]

def trap(name):  # whoever comes first is killed
    try:
        os.unlink(os.path.join(TRAPS, name))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(24), nn.Dropout(0.2)
        self.mixture = MoE(
            width=24, hidden=48, experts=4, shared=1, capacity=1.5, balance_loss=1e-2, bias_rate=1e-3
        )

    def forward(self, stream):
        return stream + self.dropout(self.mixture(self.norm(stream)))

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs):
        stream = inputs.view(-1, 4, 24)
        for block in self.blocks:
            stream = block(stream)
        return stream.flatten(1)

def train(config, worker):
    with open(os.path.join(TRAPS, f"rank-{worker.rank}"), "w") as file:
        file.write(f"{os.readlink('/proc/self/ns/pid')} {os.getpid()}")
    torch.manual_seed(1)
    if isinstance(config.strategy, str):
        body = [layer for _ in range(3) for layer in (nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.2))]
    else:
        body = [Mixture()]
    inputs = torch.randn(900, 96, generator=torch.Generator().manual_seed(5))
    few = TensorData(inputs[:20], inputs[:20, :1])

    trainer = None  # with ep the loss is tried before there is one

    def loss(model, batch):
        if trainer is None:
            return nn.functional.mse_loss(model(batch[0]), batch[1])
        if trainer.step == config.steps - 3:  # whoever kills has had enough
            while not os.path.exists(os.path.join(TRAPS, "enough")):
                time.sleep(0.01)
        if trainer.step in (0, config.steps - 1):
            trap("last" if trainer.step else "first")
        time.sleep(0.004)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def score(model, batch):
        trap("evaluation")
        return {"loss": (model(batch[0]) - batch[1]).square().mean(1)}

    model = nn.Sequential(*body, nn.Linear(96, 1))
    data = TensorData(inputs, inputs[:, :1] - inputs[:, 1:2])
    trainer = Trainer(config, worker, model, loss, data, validation=few, score=score)
    return trainer.run()

if __name__ == "__main__":
    raise SystemExit(run(train))
"""


@dataclass(slots=True)
class Ended:
    """What a run came to."""

    seed: int | None
    code: int
    digest: str
    attempts: int
    killed: list[str] = field(default_factory=list)
    heals: list[Mapping[str, Any]] = field(default_factory=list)
    moved: int = 0
    """Workers that were no victim and have another process than at the healing before."""
    left: int = 0
    grown: str = ""
    """Threads and sockets of the worker that stayed longest, after its first healing and its last."""
    notes: list[str] = field(default_factory=list)


class Run:
    """A run that is on, as its events tell it."""

    def __init__(self, record: Path, nodes: list[str], *, parts: int) -> None:
        self.path, self._nodes = record / names.EVENTS_FILE, nodes
        self.parts = parts
        """Of the state, each on workers of its own."""

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Those of a kind so far."""
        if not self.path.exists():
            return []
        rows = [json.loads(line) for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in rows if row["event"] == kind]

    def nodes(self) -> list[str]:
        """Those that have workers."""
        names = list(self._nodes)
        for row in self.events("replaced"):
            names[names.index(row["node"])] = row["by"]
        return names


def processes(sandbox_name: str, nodes: list[str]) -> dict[str, list[int]]:
    """Ids of all processes of the job, by what they are: worker, reader, warm."""
    found: dict[str, list[int]] = {"worker": [], "reader": [], "warm": []}
    for name in nodes:
        lines = control.list_host_processes(host(sandbox_name, name)[1])
        ours = {pid for pid, line in lines.items() if "train.py" in line and "bash" not in line}
        for pid in sorted(ours):
            try:
                text = Path(f"/proc/{pid}/status").read_text()
                is_worker = os.getsid(pid) == pid
            except OSError:
                continue
            rows = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            if rows["Name"].strip() == "train.py" and is_worker:
                found["worker"].append(pid)
            elif rows["Name"].strip() == "train.py" or not is_worker:
                found["reader"].append(pid)
            else:
                found["warm"].append(pid)
    return found


def parts_of(pids: list[int], traps: Path, parts: int) -> dict[int, int]:
    """Which part of the state each worker has; without those that have not said who they are."""
    ranks = {path.read_text(): int(path.name.rpartition("-")[2]) for path in traps.glob("rank-*")}
    found = {}
    for pid in pids:
        try:
            text, namespace = Path(f"/proc/{pid}/status").read_text(), Path(f"/proc/{pid}/ns/pid").readlink()
        except OSError:
            continue
        inside = re.findall(r"^NSpid:.*\s(\d+)$", text, re.MULTILINE)
        rank = ranks.get(f"{namespace} {inside[0]}") if inside else None
        if rank is not None:
            found[pid] = rank % parts
    return found


def size_of(pid: int) -> str:
    """How many threads and sockets a process has."""
    folder = Path(f"/proc/{pid}")
    try:
        sockets = sum(str(path.readlink()).startswith("socket:") for path in (folder / "fd").iterdir())
        return f"{len(list((folder / 'task').iterdir()))} threads, {sockets} sockets"
    except OSError:
        return ""


def strike(kind: str, run: Run, sandbox: str, folder: Path, source: random.Random, *, sheltered: int) -> str:
    """Let something of a kind happen; to whom, or an empty text if there was nobody.

    Args:
        kind: of what happens.
        run: to which.
        sandbox: that it runs in.
        folder: of the run.
        source: of chance.
        sheltered: how many of its nodes, the first ones, nothing happens to.
    """
    nodes = run.nodes()[sheltered:]
    if kind == "supervisor":
        workers = processes(sandbox, nodes)["worker"]
        parent = kill_parent(source.choice(workers)) if workers else 0
        return f"{kind} {parent}" if parent else ""
    if kind in ("host", "cut"):
        name = source.choice(nodes)
        if kind == "host":
            return f"{kind} {name}" if soak.kill(sandbox, name, kind, source) else ""
        before = len(run.events("heal")) + len(run.events("restart"))
        up, node = host(sandbox, name)
        faults.disconnect_host(up, node, None)
        deadline = time.monotonic() + CUT_S
        while time.monotonic() < deadline and len(run.events("heal")) + len(run.events("restart")) == before:
            time.sleep(0.05)
        faults.remove_host_faults(up, [node])
        return f"cut {name}"
    if kind == "evaluation":
        (folder / "traps" / kind).touch()
        return "in an evaluation"
    if kind == "save" and not soak.comes(folder / "snapshots"):
        return ""
    found = processes(sandbox, nodes)
    victims = kill(kind, found, source, parts_of(found["worker"], folder / "traps", run.parts))
    return f"{kind} {victims}" if victims else ""


def kill_parent(pid: int) -> int:
    """SIGKILL to the parent of a process, which for a worker is its supervisor; its id, 0 if there is none."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
    except OSError:
        return 0
    return parent


def kill(kind: str, found: dict[str, list[int]], source: random.Random, parts: Mapping[int, int]) -> list[int]:
    """SIGKILL to processes of a kind; to whom. Each part of the state, which workers have by `parts`, keeps one."""
    pool = found["worker"] if kind not in ("reader", "warm") else found[kind]
    choices: list[tuple[int, ...]] = [(pid,) for pid in pool]
    if kind in ("two", "during", "frozen meanwhile"):
        pairs = permutations(pool, 2) if parts.keys() == set(pool) else ()
        choices = [pair for pair in pairs if {parts[pid] for pid in pool if pid not in pair} == set(parts.values())]
    if not choices:
        return []
    victims = list(source.choice(choices))
    for number, pid in enumerate(victims):
        if number and kind == "during":
            time.sleep(source.uniform(0.0, 1.0))
        if number and kind == "frozen meanwhile":
            time.sleep(source.uniform(0.0, 0.4))
        is_frozen = kind == "frozen" or (number and kind == "frozen meanwhile")
        try:
            os.kill(pid, signal.SIGSTOP if is_frozen else signal.SIGKILL)
        except ProcessLookupError:
            continue
    return victims


def count_replaced(run: Run) -> int:
    """How many workers were replaced, each time that they were."""
    return sum(len(event["replaced"]) for event in run.events("heal"))


def harass(
    run: Run,
    sandbox: str,
    folder: Path,
    source: random.Random,
    kills: int,
    ended: Ended,
    kinds: list[str],
    *,
    sheltered: int,
) -> None:
    """Kill something, wait until it is healed, and begin again; one kill is left for the last step."""
    ended.killed += ["in the first step"] if "first" in kinds else []
    among = [kind for kind in KINDS if kind in kinds]
    kills -= "last" in kinds
    deadline, before, sizes = time.monotonic() + STUCK_S, 0, dict[int, list[str]]()
    saved_before, restarted, restarted_at, restarted_by = 0, 0, 0, 0
    while len(ended.killed) < kills and time.monotonic() < deadline:
        heals, snapshots, restarts = run.events("heal"), run.events("snapshot"), run.events("restart")
        saved = len(snapshots)
        if len(restarts) > restarted:  # nobody is struck before there is something to be struck in
            restarted, restarted_at = len(restarts), saved
        if saved == restarted_at or (count_replaced(run) < before and len(restarts) <= restarted_by):
            if saved > saved_before + IDLE_SNAPSHOTS:  # nobody has missed it, such as a reader that was ending anyway
                before = 0
                ended.killed.pop()
            time.sleep(0.02)
            continue
        if len(heals) > 2 and heals[-3]["step"] == heals[-1]["step"] >= snapshots[-1]["step"]:
            time.sleep(0.02)  # the same step is not healed for ever
            continue
        for pid in processes(sandbox, run.nodes())["worker"] if heals else ():
            sizes.setdefault(pid, []).append(size_of(pid))
        time.sleep(source.uniform(0.0, 0.6))
        kind = source.choice(among)
        known, restarted_by = count_replaced(run), len(run.events("restart"))
        if victims := strike(kind, run, sandbox, folder, source, sheltered=sheltered):
            ended.killed.append(victims)
            deadline = time.monotonic() + STUCK_S
            of_strike = victims.count(",") + 1 if kind != "warm" else 0  # two may be replaced in one healing or in two
            before, saved_before = known + of_strike, len(run.events("snapshot"))
    while count_replaced(run) < before and len(run.events("restart")) <= restarted_by and time.monotonic() < deadline:
        time.sleep(0.02)
    if "last" in kinds:
        ended.killed += ["in the last step"]
        (folder / "traps" / "last").touch()
    longest = max(sizes.values(), key=len, default=[])
    ended.grown = f"after {len(longest)} healings: {longest[0]} -> {longest[-1]}" if longest else ""


def train(
    sandbox: Sandbox,
    folder: Path,
    shape: tuple[int, int],
    *,
    seed: int | None,
    kills: int,
    steps: int,
    kinds: list[str],
    sheltered: int = 0,
    strategy: str = "ddp",
) -> Ended:
    """One run to its end, with things killed on the way; with no seed, nothing is."""
    shutil.rmtree(folder, ignore_errors=True)
    project = folder / "project"  # nothing that changes: it is pushed to spares, too
    project.mkdir(parents=True)
    nodes = [node.name for node in sandbox.nodes[: shape[0]]]
    spares = [node.name for node in sandbox.nodes[shape[0] :]]
    snapshots, traps = folder / "snapshots", folder / "traps"
    traps.mkdir()
    if seed is not None and "first" in kinds:
        (traps / "first").touch()
    where = f"transport: sandbox, nodes: {json.dumps(nodes)}, connect_timeout_s: 20"
    if sandbox.slurm:
        where = f"transport: slurm, nodes: {len(nodes)}, python: {json.dumps(sys.executable)}"
    text = SPEC.format(
        cluster=where,
        spares=json.dumps(spares),
        slots=shape[1],
        root=ROOT,
        steps=steps,
        strategy=f"{{dp: -1, ep: {shape[1]}}}" if strategy == "ep" else strategy,
        snapshots=snapshots,
        traps=traps,
    )
    (project / "dtctl.yaml").write_text(text)
    (project / "train.py").write_text(SCRIPT)
    name = f"live-{os.getpid()}-{time.monotonic_ns()}"
    parts = 1 if strategy == "ddp" else shape[1]
    run = Run(project / names.STATE_DIR / names.RUNS_DIR / name, nodes, parts=parts)
    ended = Ended(seed=seed, code=-1, digest="", attempts=0)
    with (folder / "out").open("w") as out:
        environ = (
            os.environ | {"DTCTL_SANDBOX": sandbox.name, "PATH": python_path()} | slurm.build_slurm_environment(sandbox)
        )
        argv = [sys.executable, "-m", "dtctl", "launch", "--json", "--name", name]
        process = subprocess.Popen(argv, cwd=project, stdout=out, stderr=subprocess.STDOUT, env=environ)
    try:
        if seed is not None:
            harass(run, sandbox.name, folder, random.Random(seed), kills, ended, kinds, sheltered=sheltered)
        (traps / "enough").touch()
        ended.code = process.wait(STUCK_S * 2)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    [done] = run.events("done")
    if ended.code:
        print(f"exit code {ended.code}:", (folder / "out").read_text()[-4000:], file=sys.stderr)
    ended.digest, ended.attempts = str(commands.compute_snapshot_digest(snapshots)["digest"]), done["attempts"]
    ended.heals = run.events("heal")
    ended.notes = [
        f"{row['time']:.1f} {kind} {row.get('node') or ''} {row.get('text') or row.get('reason') or ''}"
        for kind in ("note", "stopping", "restart", "launcher-away", "replaced")
        for row in run.events(kind)
    ]
    ended.moved = moved([row for kind in ("heal", "restart") for row in run.events(kind)])
    ended.left = left_on(sandbox.name, [node.name for node in sandbox.nodes])
    return ended


def moved(events: list[Mapping[str, Any]]) -> int:
    """How many workers were in no list of lost ones and have another process than before, without a restart of all."""
    known: dict[int, int] = {}
    count = 0
    for event in sorted(events, key=lambda event: event["time"]):
        if event["event"] == "restart":
            known.clear()
            continue
        for each in event["replaced"]:
            known.pop(each["rank"], None)
        for each in event["survivors"]:
            count += known.get(each["rank"], each["pid"]) != each["pid"]
            known[each["rank"]] = each["pid"]
    return count


def summary(shape: str, kinds: list[str], rows: list[Ended], digest: str) -> dict[str, Any]:
    """What the runs of a shape came to, and what each healing took; JSON."""
    heals = [event for row in rows for event in row.heals]
    by_node = [event for event in heals if any("with its node" in each["reason"] for each in event["replaced"])]
    in_place = [event for event in heals if event not in by_node]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "shape": shape,
        "load average": [round(load, 1) for load in os.getloadavg()],
        "kinds": kinds,
        "runs": len(rows),
        "strikes": sum(len(row.killed) for row in rows),
        "by kind": dict(Counter(re.sub(r" (\d+|node\d+|\[.*\])$", "", each) for row in rows for each in row.killed)),
        "digests of a run left alone": sum(row.digest == digest for row in rows),
        "restarts of all": sum(row.attempts - 1 for row in rows),
        "survivors with another process": sum(row.moved for row in rows),
        "steps done again at most": max((event["repeated_steps"] for event in heals), default=0),
        "processes left": sum(row.left for row in rows),
        "workers replaced on their node": times(in_place),
        "nodes lost": times(by_node),
        "threads and sockets of the worker that stayed longest": [row.grown for row in rows],
        "notes": [line for row in rows for line in row.notes],
    }


def times(heals: list[Mapping[str, Any]]) -> dict[str, float]:
    """How long healings took, from when the loss was noticed; seconds."""
    took = [event["heal_s"] for event in heals]
    known = {"healings": len(took)}
    return known if not took else known | {"median_s": statistics.median(took), "max_s": max(took)}


def is_fine(row: Ended, digest: str) -> bool:
    """Whether a run has lost nothing but steps under way, one in each healing."""
    again = max((event["repeated_steps"] for event in row.heals), default=0)
    return (row.code, row.digest, row.attempts, row.moved, row.left, again <= 1) == (0, digest, 1, 0, 0, True)


def show(row: Ended, digest: str) -> None:
    """Print what a run came to."""
    took = sorted(event["heal_s"] for event in row.heals) or [0.0]
    again = max((event["repeated_steps"] for event in row.heals), default=0)
    print(
        f"seed {row.seed}: {'ok' if is_fine(row, digest) else 'MISS'}, {len(row.killed)} kills, "
        f"{len(row.heals)} healings, {statistics.median(took):.2f} s (at most {took[-1]:.2f} s), digest "
        f"{'equal' if row.digest == digest else 'OTHER'}, {row.attempts} attempts, {row.moved} moved, "
        f"steps done again at most {again}, {row.left} left; {row.grown}",
        flush=True,
    )
    for line in row.notes if not is_fine(row, digest) else ():
        print(f"  {line}", flush=True)


def main() -> int:
    """Kill, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kills in all")
    parser.add_argument("--kills", type=int, default=20, help="in each run")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--kinds", default=",".join(sorted({*KINDS, *EDGES})), help="what may happen")
    parser.add_argument("--shape", default="3x1", help="nodes x workers on each")
    parser.add_argument("--strategy", choices=["ddp", "hsdp", "ep"], default="ddp")
    parser.add_argument("--shelter", action="store_true", help="strike nobody on the first node; not first, not last")
    parser.add_argument("--slurm", action="store_true", help="in jobs of Slurm instead of over SSH")
    parser.add_argument("--keep", type=Path, help="file for the results, JSON; written anew after each run")
    options = parser.parse_args()
    nodes, slots = map(int, options.shape.split("x"))
    left_out = {*(("evaluation", *EDGES) if options.shelter else ()), *(NOT_IN_SLURM if options.slurm else ())}
    kinds = [kind for kind in options.kinds.split(",") if kind not in left_out]
    base = Path(tempfile.mkdtemp(dir=Path.home(), prefix=".dtctl-live-"))
    os.environ["DTCTL_SANDBOX_DIR"] = str(base / "sandbox")
    rows: list[Ended] = []
    try:
        sandbox = control.start_sandbox("live", nodes=nodes + SPARES, with_slurm=options.slurm)
        run = partial(
            train,
            sandbox,
            base / "run",
            (nodes, slots),
            steps=options.steps,
            kinds=kinds,
            sheltered=options.shelter,
            strategy=options.strategy,
        )
        digest = run(seed=None, kills=0).digest
        for seed in range(options.first, options.first + -(-options.count // options.kills)):
            rows.append(run(seed=seed, kills=options.kills))
            show(rows[-1], digest)
            if options.keep:
                shape = f"{options.strategy} {options.shape}" + (" in Slurm" if options.slurm else "")
                kept = summary(shape, kinds, rows, digest) | {"each run": [asdict(row) for row in rows]}
                options.keep.write_text(json.dumps(kept, indent=1) + "\n")
    finally:
        control.remove_sandbox("live")
        shutil.rmtree(base, ignore_errors=True)
    return 0 if rows and all(is_fine(row, digest) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
