"""Inputs that nobody wrote: `python -m tests.security.fuzz --count 100000` mutates real ones of each kind, and counts.

Real are: the specs of the examples, dumps and logs of failed trainings, the programs of the linter's tests, snapshots,
run folders, what a probe says, and the bytes of a launch on this machine that is recorded at the start. Each mutation
has to end as an answer or as an error of dtctl's, within limits of time and memory, without a process that is started,
a connection that is made, a class that is unpickled, or a file that is touched outside of the fuzzer's folder.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import functools
import io
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dtctl.errors import DtctlError
from dtctl.launch.control import deadlines, node_sessions
from tests.security.inputs import KINDS

ROOT = Path(__file__).parents[2]
LIMIT_S, PATIENCE_S, MEMORY_BYTES = 10.0, 120.0, 1 << 30
"""Of one input: processor time, time, and memory beyond what this process has anyway."""
FORBIDDEN = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class", "socket.connect",
     "os.kill", "ctypes.dlopen"}
)  # fmt: skip
CHANGES = frozenset(
    {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod", "shutil.rmtree"}
)


class Hung(BaseException):
    """An input took too long."""


class Guard:
    """Watches what this process does while an input is read."""

    def __init__(self, folder: Path) -> None:
        self.allowed = str(folder.resolve())
        self.on, self.seen = False, list[str]()
        sys.dont_write_bytecode = True  # of a module that an input is the first to need, beside its source
        sys.addaudithook(self._saw)

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in FORBIDDEN:
            self.seen.append(f"{event} {arguments!r}"[:300])
        elif event in CHANGES or (event == "open" and self._writes(arguments)):
            for word in arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]:
                # Names in an open folder are checked where that was opened.
                path = os.fsdecode(word) if isinstance(word, str | bytes) else ""
                whole = os.path.normpath(path)
                if path.startswith("/") and whole != "/dev/null" and not f"{whole}/".startswith(f"{self.allowed}/"):
                    self.seen.append(f"{event} {arguments!r}"[:300])

    @staticmethod
    def _writes(arguments: tuple[Any, ...]) -> bool:
        return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Of time, in this thread."""

    def hung(*_: object) -> None:
        raise Hung

    for number, timer, limit_s in (
        (signal.SIGPROF, signal.ITIMER_PROF, LIMIT_S),
        (signal.SIGALRM, signal.ITIMER_REAL, PATIENCE_S),
    ):
        signal.signal(number, hung)
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


def read_one(read: Callable[[], object], guard: Guard) -> tuple[str, str]:
    """Read one input; its outcome, and what is to be said of it."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            with limited():
                guard.on = True
                read()
        except DtctlError as exc:
            return "error", "its error is a bug in dtctl" if "bug" in f"{exc} {exc.hint}" else ""
        except Hung:
            return "hang", traceback.format_exc()[-3000:]
        except MemoryError:
            return "memory", traceback.format_exc()[-3000:]
        except Exception:
            return "bug", traceback.format_exc()[-3000:]
        finally:
            guard.on = False
    return "answer", ""


def fuzz(
    count: int,
    *,
    seed: int,
    kinds: Sequence[str],
    folder: Path,
    keep: Path | None = None,
    only: Collection[int] | None = None,
) -> dict[str, Any]:
    """Read so many inputs, or `only` those of these numbers: how often each outcome of a kind, and which were wrong."""
    node_sessions.START_SILENCE_S = node_sessions.PUSH_SILENCE_S = deadlines.START_LIMIT_S = 5.0
    guard = Guard(folder)
    readers = {}
    for name in kinds:
        real = folder / "real" / name.replace(" ", "-")
        real.mkdir(parents=True, mode=0o700)
        readers[name] = KINDS[name].make(real)
    shares = [KINDS[name].share for name in kinds]
    order = random.Random(seed).choices(list(kinds), shares, k=count)
    outcomes: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in kinds}
    bad: list[dict[str, Any]] = []
    kept_bytes = memory()
    resource.setrlimit(resource.RLIMIT_AS, (virtual() + 4 * MEMORY_BYTES, -1))
    for number, name in enumerate(order):
        if only is not None and number not in only:
            continue
        place = folder / "input"
        place.mkdir(mode=0o700)
        guard.seen.clear()
        outcome, trouble = read_one(functools.partial(readers[name], place, random.Random(f"{seed}-{number}")), guard)
        if guard.seen:
            outcome, trouble = "escape", "; ".join(guard.seen[:3])
        if memory() - kept_bytes > MEMORY_BYTES:
            outcome, trouble, kept_bytes = "memory", f"{memory() >> 20} MiB", memory()
        if trouble and outcome in ("answer", "error"):
            outcome = "bug"
        outcomes[name][outcome] += 1
        if outcome not in ("answer", "error"):
            bad.append({"kind": name, "number": number, "outcome": outcome, "trouble": trouble})
            print(f"{name} {number}: {outcome}\n{trouble}", file=sys.stderr, flush=True)
        shutil.rmtree(place)
        if number % 2000 == 1999:
            print(f"{number + 1} of {count}: {sum(map(len, [bad]))} bad", file=sys.stderr, flush=True)
            if keep is not None:
                write_result(keep, number + 1, seed, outcomes, bad)
    return {"outcomes": {name: dict(counted) for name, counted in outcomes.items()}, "bad": bad}


def memory() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def write_result(path: Path, count: int, seed: int, outcomes: dict[str, Any], bad: Sequence[dict[str, Any]]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{platform.machine()}, {platform.release()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "commit": commit},
        "seed": seed,
        "inputs": count,
        "limits": {"processor_s": LIMIT_S, "s": PATIENCE_S, "memory_mib": MEMORY_BYTES >> 20},
        "peak_memory_mib": memory() >> 20,
        "outcomes": {name: dict(sorted(counted.items())) for name, counted in outcomes.items()},
        "bad": list(bad),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def again(path: Path) -> int:
    """Read the wrong inputs of a result again, with the code of today; how many are still wrong."""
    result = json.loads(path.read_text())
    numbers = [one["number"] for one in result["bad"]]
    with tempfile.TemporaryDirectory(prefix="dtctl-fuzz-") as name:
        kinds = [*result["outcomes"]]
        found = fuzz(result["inputs"], seed=result["seed"], kinds=kinds, folder=Path(name), only=numbers)
    still = {one["number"] for one in found["bad"]}
    for one in result["bad"]:
        one["again"] = "wrong" if one["number"] in still else "answer or error"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(numbers)} inputs read again, {len(still)} wrong; kept in {path}")
    return len(still)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="Only this one; may be given again.")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / f"fuzz-{time.strftime('%Y%m%d-%H%M')}.json"
    )
    parser.add_argument("--again", type=Path, help="A result: read again what was wrong, and write down how it ends.")
    options = parser.parse_args()
    faulthandler.enable()
    if options.again is not None:
        return again(options.again)
    with tempfile.TemporaryDirectory(prefix="dtctl-fuzz-") as name:
        folder = Path(name)
        os.environ["HOME"] = str(folder)  # whoever writes there is seen
        begun = time.monotonic()
        found = fuzz(options.count, seed=options.seed, kinds=options.kind or [*KINDS], folder=folder, keep=options.out)
        counted = {key: collections.Counter(value) for key, value in found["outcomes"].items()}
        write_result(options.out, options.count, options.seed, counted, found["bad"])
    print(json.dumps(found["outcomes"], indent=1))
    print(f"{options.count} inputs in {time.monotonic() - begun:.0f} s, {len(found['bad'])} bad; kept in {options.out}")
    return 1 if found["bad"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
