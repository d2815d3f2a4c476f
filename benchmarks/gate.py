"""Compare the speed of this commit with an earlier one, pair by pair; exit code 1 where something became slower.

    make gate                                        beside the commit that the branch started from; 15 minutes
    python benchmarks/gate.py BASE                   beside another commit
    python benchmarks/gate.py BASE --only step-tiny launch-16
    python benchmarks/gate.py BASE --trace step-tiny which of the commits since BASE changed one measurement
    python benchmarks/gate.py BASE --trace step-tiny --until COMMIT the same, up to an earlier commit

Both commits are checked out and run by this Python, in fresh processes in turn: base, head, base, head, base. A ratio
is a sample of head over the mean of its two neighbours, so that a machine that slows down hits both alike. The ratio of
two neighbouring samples of base is printed next to it: what the machine alone makes of two equal programs.

Pairs are added until the 95% interval of the median ratio excludes 1.03, at most 25 and no longer than the share of the
time that a measurement has. The interval comes from order statistics: it assumes nothing about the distribution, and
needs six pairs. Looking after each pair makes a false alarm likelier than 5%; a ratio that is called slower is worth a
second run with --only.

Programs that compute are measured in seconds of processor time, those that wait (for nodes, disks, workers) in seconds
of the clock. Results are kept as each measurement ends. Refuses to start on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from machine import keep, measure_command, wait_for_quiet

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"
BAR = 1.03
MAX_PAIRS = 25
MIN_PAIRS = 6
"""The fewest with which the range of all ratios is a 95% interval of their median."""
BUDGET_S = 720.0
"""Seconds for all measurements; checkouts, virtual hosts and last pairs take up to two minutes more."""
TRACE_S = 150.0
"""Seconds for the samples of --trace."""
HOSTS = 16
STEPS = {"tiny": 1500, "small": 260}
SNAPSHOT = """
import json, sys, time
from pathlib import Path
import torch
from dtctl.runtime.snapshot.saver import Saver
torch.set_num_threads(1)
parts = {"model": {str(i): torch.randn(1 << 20) for i in range(32)}}
saver, stall, whole = Saver(Path(sys.argv[1]), keep=1, complain=lambda error: sys.exit(error.message)), [], []
for step in range(1, 6):
    begun = time.perf_counter()
    saver.save(step, parts, facts={})
    stall.append(time.perf_counter() - begun)
    saver.finish()
    whole.append(time.perf_counter() - begun)
print(json.dumps({"stall": min(stall), "whole": min(whole)}))
"""
"""128 MiB, saved five times; the quickest of each, since only noise makes one slower."""


class Side:
    """One commit in a checkout of its own.

    Args:
        commit: Any name that git knows.
        tree: Folder of the checkout; made by `check_out`.
        state: Folder for what its commands keep for a user.
    """

    def __init__(self, commit: str, tree: Path, state: Path) -> None:
        self.commit = _git("rev-parse", f"{commit}^{{commit}}")
        self.tree = tree
        self.env = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
        self.env |= {"XDG_STATE_HOME": str(state), "XDG_CACHE_HOME": str(state)}
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)

    def check_out(self) -> None:
        """Make the checkout, and compile it as an installation does."""
        _git("worktree", "add", "--detach", "-q", str(self.tree), self.commit)
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(self.tree / "dtctl")], env=self.env, check=True)

    def run(
        self,
        *argv: str,
        cwd: Path,
        repeat: int = 1,
        accept: tuple[int, ...] = (0,),
        env: Mapping[str, str] | None = None,
    ) -> Sample:
        """Run a Python program of this side some times.

        Args:
            argv: Arguments of Python.
            cwd: Its working folder.
            repeat: Times that it runs; their seconds are added up.
            accept: Exit codes that are no failure.
            env: Further variables.

        Raises:
            SystemExit: It failed.
        """
        total = Sample()
        for _ in range(repeat):
            done = measure_command([sys.executable, *argv], env={**self.env, **(env or {})}, cwd=cwd, limit_s=300)
            if done.returncode not in accept:
                raise SystemExit(f"{self.commit[:10]}: {' '.join(argv)[:200]}: {done.stderr[-2000:]}")
            total = Sample(total.wall_s + done.wall_s, total.cpu_s + done.cpu_s, done.stdout)
        return total


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds that a side's program took, and what it printed."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    stdout: str = ""


class Stage:
    """What measurements share: virtual hosts, which begin when the first measurement needs them, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def hosts(self) -> Any:
        """A sandbox of 16 hosts, made by this checkout; both sides reach them by SSH."""
        from dtctl.sandbox import control

        return control.start_sandbox("gate", nodes=HOSTS)

    @cached_property
    def cluster(self) -> Any:
        """A sandbox of one host with Slurm, made by this checkout; both sides submit to it."""
        from dtctl.sandbox import control

        return control.start_sandbox("gate-slurm", nodes=1, with_slurm=True)

    def close(self) -> None:
        """Take the hosts down."""
        for sandbox in [self.__dict__[name] for name in ("hosts", "cluster") if name in self.__dict__]:
            from dtctl.sandbox import control

            control.remove_sandbox(sandbox.name)

    def write_spec(self, folder: Path, nodes: int) -> Path:
        """Write a spec that runs `true` on some of the hosts.

        Args:
            folder: The project; made where it is missing.
            nodes: The number of hosts.

        Returns:
            The folder.
        """
        folder.mkdir(exist_ok=True)
        listed = [f"{{name: n{i}, address: {host.address}}}" for i, host in enumerate(self.hosts.nodes[:nodes])]
        (folder / "dtctl.yaml").write_text(
            f"cluster: {{transport: ssh, nodes: [{', '.join(listed)}], user: {self.hosts.user}, identity_file: "
            f"{self.hosts.identity_file}, known_hosts: {self.hosts.known_hosts}, python: {sys.executable}}}\n"
            "job: {command: 'true'}\n"
        )
        return folder


Figures = dict[str, float]
"""Figure -> seconds."""


@dataclass(frozen=True)
class Measurement:
    """One program of both sides, and what is taken of it.

    Args:
        name: As in --only.
        weight: Share of the time that it may take.
        measure: Takes one sample of a side, in an empty folder.
        floor: The least that any program would need, where there is one.
        find_obstacle: Says why it cannot be taken on this machine; nothing where it can.
    """

    name: str
    weight: float
    measure: Callable[[Stage, Side, Path], Figures]
    floor: Callable[[Stage, Side, Path], Figures] | None = None
    find_obstacle: Callable[[], str] = str


def measure_command_line(*words: str, repeat: int = 3) -> Callable[[Stage, Side, Path], Figures]:
    """Return a measurement of a command that computes: its processor time."""

    def measure(_stage: Stage, side: Side, folder: Path) -> Figures:
        (folder / "train.py").write_text("")
        (folder / "dtctl.yaml").write_text(
            "cluster: {transport: ssh, nodes: ['gpu[01-16]'], slots: 8}\njob: {script: train.py}\n"
        )
        return {"cpu_s": side.run("-m", "dtctl", *words, cwd=folder, repeat=repeat).cpu_s / repeat}

    return measure


def measure_bare_python(_stage: Stage, side: Side, folder: Path) -> Figures:
    """Return what Python needs to start and end."""
    return {"cpu_s": side.run("-c", "pass", cwd=folder, repeat=5).cpu_s / 5}


def measure_lint(_stage: Stage, side: Side, folder: Path) -> Figures:
    """Return the processor time of linting 200 files, the same for both sides."""
    sources = sorted((ROOT / "dtctl").rglob("*.py"))[:200]
    for number, path in enumerate(sources):
        shutil.copy(path, folder / f"m{number:03d}_{path.name}")
    return {"cpu_s": side.run("-m", "dtctl", "lint", ".", cwd=folder, accept=(0, 1)).cpu_s}


def measure_snapshot(_stage: Stage, side: Side, folder: Path) -> Figures:
    """Return how long a snapshot of 128 MiB stops a training, and takes as a whole."""
    found: Figures = json.loads(side.run("-c", SNAPSHOT, str(folder / "s"), cwd=folder).stdout)
    return found


def measure_launch(nodes: int) -> Callable[[Stage, Side, Path], Figures]:
    """Return a measurement of a launch of `true` on some hosts that have its code."""

    def measure(stage: Stage, side: Side, folder: Path) -> Figures:
        project = stage.write_spec(folder / "p", nodes)  # the same each time: the first sample, not counted, brings it
        return {"wall_s": side.run("-m", "dtctl", "launch", "--no-doctor", cwd=project).wall_s}

    return measure


def measure_bare_ssh(nodes: int) -> Callable[[Stage, Side, Path], Figures]:
    """Return a measurement of `true` on some hosts by paramiko alone."""

    def measure(stage: Stage, side: Side, folder: Path) -> Figures:
        from launch import BARE

        hosts = [host.address for host in stage.hosts.nodes[:nodes]]
        done = side.run("-c", BARE, str(stage.hosts.identity_file), stage.hosts.user, *hosts, cwd=folder)
        return {"wall_s": done.wall_s}

    return measure


def measure_job(stage: Stage, side: Side, folder: Path) -> Figures:
    """Return the time from the command, and from the submission, to the end of the first step of a job of Slurm."""
    from dtctl.sandbox import slurm

    shutil.copy(HERE / "loop_step.py", folder / "train.py")
    (folder / "dtctl.yaml").write_text(
        f"cluster: {{transport: slurm, nodes: 1, slots: 1, python: {sys.executable}}}\n"
        "job: {script: train.py, kind: direct, args: [dtctl, tiny, '1'], "
        f"env: {{PYTHONPATH: {side.tree}, OMP_NUM_THREADS: '1'}}}}\n"
    )
    begun_s, env = time.time(), slurm.build_slurm_environment(stage.cluster)
    done = side.run("-m", "dtctl", "launch", "--json", cwd=folder, env=env)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    submitted_s = next(event["time"] for event in events if event["event"] == "submitted")
    printed = "".join(path.read_text() for path in folder.glob(".dtctl/runs/*/logs/*/*.log"))
    ended_s = json.loads(printed.strip().splitlines()[-1])["first_step_at"]
    return {"wall_s": ended_s - begun_s, "queue": ended_s - submitted_s}


def find_obstacle_to_slurm() -> str:
    """Return why this machine can have no virtual host with Slurm; nothing where it can."""
    from dtctl.errors import SandboxError
    from dtctl.sandbox import slurm

    try:
        slurm.check_slurm_requirements()
    except SandboxError as exc:
        return str(exc)
    return ""


def measure_push(stage: Stage, side: Side, folder: Path) -> Figures:
    """Return the time of a launch that brings 2,000 files of 8 KiB to two hosts, and of one that finds them there."""
    project = stage.write_spec(folder / "p", 2)
    source = random.Random(time.time_ns())
    for number in range(2000):
        (project / f"m{number:04d}.py").write_bytes(source.randbytes(4096).hex().encode())
    launch = ("-m", "dtctl", "launch", "--no-doctor")
    return {"fresh": side.run(*launch, cwd=project).wall_s, "unchanged": side.run(*launch, cwd=project).wall_s}


def measure_step(size: str, program: str = "dtctl") -> Callable[[Stage, Side, Path], Figures]:
    """Return a measurement of a training step by the loops of benchmarks/loop.py."""

    def measure(_stage: Stage, side: Side, folder: Path) -> Figures:
        done = side.run(str(HERE / "loop_step.py"), program, size, str(STEPS[size]), cwd=folder)
        return {"step_s": json.loads(done.stdout.strip().splitlines()[-1])["us"] / 1e6}

    return measure


def measure_first_step(program: str = "dtctl") -> Callable[[Stage, Side, Path], Figures]:
    """Return a measurement of the start of a process to the end of its first step."""

    def measure(_stage: Stage, side: Side, folder: Path) -> Figures:
        begun_s = time.time()
        done = side.run(str(HERE / "loop_step.py"), program, "tiny", "1", cwd=folder)
        return {"wall_s": json.loads(done.stdout.strip().splitlines()[-1])["first_step_at"] - begun_s}

    return measure


def measure_kill(_stage: Stage, side: Side, folder: Path) -> Figures:
    """Return the median time from the kill of one of three workers to the next step that all do, over three kills."""
    import live

    live.EVERY = 30
    ended = live.train(
        live.OURS, lambda run, steps: live.ours(run, steps, "live"), folder / "run", 3, strike=True, env=side.env
    )
    if len(ended.together_s) < ended.struck:
        raise SystemExit(f"{side.commit[:10]}: {len(ended.together_s)} of {ended.struck} kills were recovered from")
    return {"wall_s": statistics.median(ended.together_s)}


MEASUREMENTS = (
    Measurement("help", 1, measure_command_line("--help"), measure_bare_python),
    Measurement("validate", 1, measure_command_line("validate")),
    Measurement("dry-run", 1, measure_command_line("launch", "--dry-run")),
    Measurement("lint", 2, measure_lint),
    Measurement("snapshot", 1.5, measure_snapshot),
    Measurement("launch-1", 1.5, measure_launch(1), measure_bare_ssh(1)),
    Measurement("launch-16", 3, measure_launch(HOSTS), measure_bare_ssh(HOSTS)),
    Measurement("slurm-1", 3, measure_job, find_obstacle=find_obstacle_to_slurm),
    Measurement("push", 3, measure_push),
    Measurement("step-tiny", 3, measure_step("tiny"), measure_step("tiny", "bare")),
    Measurement("step-small", 3, measure_step("small"), measure_step("small", "bare")),
    Measurement("first-step", 2, measure_first_step(), measure_first_step("bare")),
    Measurement("kill", 4, measure_kill),
)
NAMES = tuple(one.name for one in MEASUREMENTS)


def find_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval that covers the median of the values' distribution with some confidence.

    By order statistics: the number of values below the true median is binomial with 1/2, whatever the distribution.

    Args:
        values: Independent samples.
        confidence: Between 0 and 1.

    Returns:
        Both ends; infinite where there are too few values.
    """
    ordered, count = sorted(values), len(values)
    outside = 1 - confidence
    taken, tail = 0, 0.0
    while taken < count // 2:
        tail += math.comb(count, taken) / 2**count
        if 2 * tail > outside:
            break
        taken += 1
    if taken == 0:
        return -math.inf, math.inf
    return ordered[taken - 1], ordered[count - taken]


@dataclass
class Series:
    """The samples of one figure, in the order base, head, base, head, base."""

    base: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Each sample of head over the mean of its neighbours."""
        return [one / statistics.mean(self.base[i : i + 2]) for i, one in enumerate(self.head)]

    @property
    def noise(self) -> list[float]:
        """Each sample of base over the one before."""
        return [after / before for before, after in zip(self.base, self.base[1:], strict=False)]

    @property
    def verdict(self) -> str:
        """`slower`, `within` or `open`."""
        low, high = find_interval(self.ratios)
        if low > BAR:
            return "slower"
        return "within" if high <= BAR else "open"

    def describe(self) -> dict[str, Any]:
        """Return what is kept of it."""
        rounded = [None if math.isinf(end) else round(end, 4) for end in find_interval(self.ratios)]
        return {
            "base": round(statistics.median(self.base), 6),
            "head": round(statistics.median(self.head), 6),
            "ratio": round(statistics.median(self.ratios), 4),
            "interval": rounded,
            "base beside itself": round(statistics.median(self.noise), 4),
            "base beside itself, interval": [
                None if math.isinf(end) else round(end, 4) for end in find_interval(self.noise)
            ],
            "pairs": len(self.head),
            "verdict": self.verdict,
            "samples": {"base": self.base, "head": self.head},
        }


def compare(
    measurement: Measurement, stage: Stage, base: Side, head: Side, limit_s: float, pairs: int = MAX_PAIRS
) -> dict[str, Series]:
    """Take pairs until each figure is decided, there are enough of them, or the time is up.

    Args:
        measurement: What is measured.
        stage: What measurements share.
        base: The earlier commit.
        head: This one.
        limit_s: Seconds after which no pair is begun; each has six pairs at least.
        pairs: The most that are taken.

    Returns:
        Name of the figure -> its samples.
    """
    found: dict[str, Series] = {}
    for side in (base, head):  # not counted: caches are cold
        _take(measurement, stage, side)
    deadline = time.monotonic() + limit_s
    for name, value in _take(measurement, stage, base).items():
        found.setdefault(name, Series()).base.append(value)
    for count in range(1, pairs + 1):
        for name, value in _take(measurement, stage, head).items():
            found[name].head.append(value)
        for name, value in _take(measurement, stage, base).items():
            found[name].base.append(value)
        decided = all(series.verdict != "open" for series in found.values())
        if count >= min(MIN_PAIRS, pairs) and (decided or time.monotonic() > deadline):
            break
    return found


def _take(measurement: Measurement, stage: Stage, side: Side) -> Figures:
    with tempfile.TemporaryDirectory(dir=stage.folder) as folder:
        return measurement.measure(stage, side, Path(folder))


def find_floor(measurement: Measurement, stage: Stage, side: Side) -> Figures:
    """Return the medians of two samples of what any program would need; empty where nothing is known."""
    if measurement.floor is None:
        return {}
    found: dict[str, list[float]] = {}
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=stage.folder) as folder:
            for name, value in measurement.floor(stage, side, Path(folder)).items():
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def trace(
    measurement: Measurement, stage: Stage, sides: Sequence[Side], seconds: float
) -> list[tuple[Side, dict[str, list[float]]]]:
    """Take samples of several commits in turn, from the oldest to the newest and back.

    Args:
        measurement: What is measured.
        stage: What measurements share.
        sides: The commits, the oldest first.
        seconds: Time after which no round is begun; there are three at least.

    Returns:
        Each commit with the samples of its figures.
    """
    found: list[tuple[Side, dict[str, list[float]]]] = [(side, {}) for side in sides]
    deadline, rounds = time.monotonic() + seconds, 0
    while rounds < 3 or time.monotonic() < deadline:
        for side, figures in found[:: 1 if rounds % 2 else -1]:
            for name, value in _take(measurement, stage, side).items():
                figures.setdefault(name, []).append(value)
        rounds += 1
    return found


def pick_commits(base: str, points: int, until: str = "HEAD") -> list[str]:
    """Return commits from a base to another one, both included, evenly spaced along first parents, the oldest first."""
    listed = _git("rev-list", "--first-parent", "--reverse", f"{base}..{until}").splitlines()
    listed.insert(0, _git("rev-parse", base))
    if len(listed) <= points:
        return listed
    return [listed[round(i * (len(listed) - 1) / (points - 1))] for i in range(points)]


@contextlib.contextmanager
def checked_out(commits: Sequence[str]) -> Iterator[tuple[Stage, list[Side]]]:
    """Check out commits, and remove all that was made for them at the end."""
    # Not below /tmp, of which the virtual hosts have their own.
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".dtctl-gate-") as name:
        folder = Path(name)
        stage = Stage(folder)
        sides = [Side(commit, folder / f"tree-{i}", folder / f"state-{i}") for i, commit in enumerate(commits)]
        try:
            for side in sides:
                side.check_out()
            yield stage, sides
        finally:
            stage.close()
            for side in sides:
                if side.tree.is_dir():
                    _git("worktree", "remove", "--force", str(side.tree))


def find_merge_base() -> str:
    """Return the commit that this branch started from: where it left the remote's or the local main branch.

    On the main branch itself that is the newest commit that the remote has; without a remote, the commit before HEAD.
    """
    for other in ("origin/HEAD", "origin/main", "main"):
        with contextlib.suppress(subprocess.CalledProcessError):
            base = _git("merge-base", "HEAD", other)
            if base != _git("rev-parse", "HEAD"):
                return base
    return _git("rev-parse", "HEAD~1")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def show_row(name: str, series: Series, floor: float | None) -> None:
    """Print one figure."""
    low, high = find_interval(series.ratios)
    noise = find_interval(series.noise)
    least = f"{floor:>9.4g}" if floor is not None else f"{'':>9}"
    print(
        f"{name:<20}{least}{statistics.median(series.base):>10.4g}{statistics.median(series.head):>10.4g}"
        f"{statistics.median(series.ratios):>8.3f} [{low:.3f}, {high:.3f}] {noise[0]:>7.3f} to {noise[1]:.3f}"
        f"{len(series.head):>4}  {series.verdict}",
        flush=True,
    )


def run_gate(base: str, names: Sequence[str], budget_s: float, *, busy: bool, pairs: int = MAX_PAIRS) -> int:
    """Compare HEAD with a commit, print and keep each row.

    Args:
        base: The commit.
        names: Measurements.
        budget_s: Seconds for all of them.
        busy: Measure on a busy machine, too, and keep nothing.
        pairs: The most that one measurement takes.

    Returns:
        1 if a ratio is above 1.03 with 95% confidence.
    """
    obstacles = {one: one.find_obstacle() for one in MEASUREMENTS if one.name in names}
    wanted = [one for one, obstacle in obstacles.items() if not obstacle]
    rows: dict[str, dict[str, Any]] = {}
    deadline, path = time.monotonic() + budget_s, None
    with checked_out([base, "HEAD"]) as (stage, (before, after)):
        print(f"base {before.commit[:10]}, head {after.commit[:10]}, seconds; base beside itself shows the noise")
        for one in obstacles.keys() - set(wanted):
            print(f"{one.name} is left out: {obstacles[one]}")
        print(f"{'':<20}{'floor':>9}{'base':>10}{'head':>10}{'ratio':>8}  95% interval     base/base{'n':>9}")
        for index, measurement in enumerate(wanted):
            if not busy:
                wait_for_quiet()
            share = measurement.weight / sum(one.weight for one in wanted[index:])
            began_s = time.monotonic()
            floor = find_floor(measurement, stage, after)
            limit_s = (deadline - began_s) * share - (time.monotonic() - began_s)
            for figure, series in compare(measurement, stage, before, after, limit_s, pairs).items():
                name = measurement.name if figure.endswith("_s") else f"{measurement.name}, {figure}"
                show_row(name, series, floor.get(figure))
                rows[name] = {"what": figure, **series.describe(), "floor": floor.get(figure)}
            rows[name]["seconds for all pairs"] = round(time.monotonic() - began_s)
            if not busy:
                figures = {"commits": {"base": before.commit, "head": after.commit}, **describe_machine(), "rows": rows}
                path = keep("gate", figures, into=path)
    slower = [name for name, row in rows.items() if row["verdict"] == "slower"]
    undecided = [name for name, row in rows.items() if row["verdict"] == "open"]
    if undecided:
        print(f"not decided with {BAR} in their intervals: {', '.join(undecided)}")
    if slower:
        print(f"slower than {BAR} times base with 95% confidence: {', '.join(slower)}")
    return 1 if slower else 0


def run_trace(base: str, name: str, points: int, seconds: float, until: str = "HEAD") -> None:
    """Print what each of some commits since a base added to one measurement."""
    measurement = next(one for one in MEASUREMENTS if one.name == name)
    with checked_out(pick_commits(base, points, until)) as (stage, sides):
        found = trace(measurement, stage, sides, seconds)
    for figure in found[0][1]:
        print(f"{measurement.name}, {figure}\n{'commit':<12}{'median':>10}{'least':>10}{'to the one before':>20}")
        before: list[float] | None = None
        for side, figures in found:
            values = figures[figure]
            change = [] if before is None else [one / other for one, other in zip(values, before, strict=True)]
            step = f"{statistics.median(change):>20.3f}" if change else ""
            print(f"{side.commit[:10]:<12}{statistics.median(values):>10.4g}{min(values):>10.4g}{step}")
            before = values
        print()


def describe_machine() -> dict[str, Any]:
    """Return date, machine and versions, as they are kept with figures."""
    from importlib.metadata import version

    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{platform.machine()}, {platform.release()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": version("torch"), "paramiko": version("paramiko")},
    }


def main() -> int:
    """Compare, or trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="the commit to compare with; default: where the branch started")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--trace", choices=NAMES, metavar="NAME", help="follow one measurement from commit to commit")
    parser.add_argument("--until", default="HEAD", metavar="COMMIT", help="the newest commit that --trace looks at")
    parser.add_argument("--points", type=int, default=9, help="commits that --trace looks at")
    parser.add_argument(
        "--seconds", type=float, help=f"for all measurements; {BUDGET_S:.0f}, with --trace {TRACE_S:.0f}"
    )
    parser.add_argument("--busy", action="store_true", help="on a busy machine, too; nothing is kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that checkouts and virtual hosts are removed
    base = options.base or find_merge_base()
    if not options.busy:
        wait_for_quiet()
    if options.trace:
        run_trace(base, options.trace, options.points, options.seconds or TRACE_S, options.until)
        return 0
    return run_gate(base, options.only, options.seconds or BUDGET_S, busy=options.busy)


if __name__ == "__main__":
    raise SystemExit(main())
