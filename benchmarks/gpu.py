"""`make gpu`: what only a GPU can show, in 16 checks, the ones that may break everything first.

    python -m benchmarks.gpu                 all of them on this machine's first GPU; 8 to 11 minutes on an H100
    python -m benchmarks.gpu --only 4 9      some of them
    python -m benchmarks.gpu --cpu           the part of each that a CPU shows, with tiny sizes, in minutes
    python -m benchmarks.gpu --table FILE    a table, in Markdown, of what was kept

No network is needed. Each check runs in a process of its own, with a limit; what it has found is kept before the next
one begins, in benchmarks/results/gpu-DATE.json, so that a run that is cut short loses nothing. Exit code 0: nothing has
failed; 1: something has; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 900.0
"""For all checks: half as much again as the slower of two machines with an H100 took."""
BUSY = 6
"""How many times as long checks may take on CPUs, where others may be at work."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A check in the programme."""

    number: int
    name: str
    where: str
    """`module.function` below gpu_checks."""
    limit_s: float
    """After which it is ended; three times what it is to take."""
    expected: str


PROGRAMME = (
    Listed(1, "tools", "machine.tools", 60, "GPUs counted alike; nvidia-smi, ECC and topology read; nothing broken"),
    Listed(2, "warm start", "machine.warm_start", 60, "workers forked from a warm process compute on the GPU"),
    Listed(3, "devices", "machine.identities", 60, "the right GPU for each rank, and no CPU by accident"),
    Listed(4, "groups", "exchange.groups", 120, "NCCL and gloo in one group; strategies as a single worker"),
    Listed(5, "losses", "numbers.courses", 90, "fp32 as the CPU, bf16 near it, fp16 as GradScaler to the bit"),
    Listed(6, "exactness", "numbers.exactness", 240, "deterministic: equal bits; otherwise: no claim of them"),
    Listed(7, "snapshot", "memory.snapshots", 200, "8 GiB written beside training, right, in 1.1 times their memory"),
    Listed(8, "out of memory", "exchange.lack_of_memory", 150, "halves and trains on; peers learn of it; none hangs"),
    Listed(9, "synchronizations", "steps.synchronizations", 90, "none in single, ddp, fsdp and hsdp"),
    Listed(10, "batches", "steps.batches", 60, "every class of batch is page-locked and moved"),
    Listed(11, "compile", "numbers.compiled", 240, "no compilation after step 3; losses as without"),
    Listed(12, "attention in parts", "numbers.attention", 90, "as whole attention, by flash, without masks"),
    Listed(13, "signals", "steps.signals", 60, "a profile with kernels; a snapshot and exit code 75"),
    Listed(14, "speed", "machine.speed", 60, "65% to 102% of the data sheet's products"),
    Listed(15, "loop by hand", "steps.beside_by_hand", 240, "98% of its tokens per second, the same memory"),
    Listed(16, "predicted memory", "memory.predictions", 240, "advise within 15% for a dozen models and meshes"),
)


def verdict_of(points: list[dict[str, str]], ended: str) -> str:
    """Of a check: failed, ok, or skipped if nothing could be looked at."""
    verdicts = {point["verdict"] for point in points}
    if ended or "failed" in verdicts:
        return "failed"
    return "ok" if verdicts & {"ok", "shown"} else "skipped"


def run_one(check: Listed, *, cpu: bool, limit_s: float) -> dict[str, Any]:
    """One check in a process of its own; what it found, and why it ended if it did not come to its end."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    if cpu:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    begun, ended = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="dtctl-gpu-") as folder:
        said = Path(folder, "said.jsonl")
        argv = [sys.executable, "-m", "benchmarks.gpu", "--check", str(check.number), "--said", str(said)]
        with Path(folder, "output").open("w+") as output:
            process = subprocess.Popen(
                [*argv, *(["--cpu"] if cpu else [])], cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
                code = process.wait()
                ended = f"it has not come to its end after {limit_s:.0f} s"
            output.seek(0)
            words = output.read().strip().splitlines()
        if code and not ended:
            ended = f"exit code {code}: {words[-1] if words else 'no word'}"
        lines = said.read_text().splitlines() if said.exists() else []
    points = [json.loads(line) for line in lines if line.endswith("}")]
    return {
        "number": check.number, "name": check.name, "expected": check.expected, "verdict": verdict_of(points, ended),
        "took_s": round(time.monotonic() - begun, 1), "ended": ended, "points": points,
        "output": words[-20:] if ended else [],
    }  # fmt: skip


def keep(kept: dict[str, Any], path: Path) -> None:
    """Write all of it, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(json.dumps(kept, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def table(kept: dict[str, Any]) -> str:
    """What was kept, in Markdown: a row for each check with its figures, and what has failed below."""
    versions = ", ".join(f"{name} {value}" for name, value in kept["versions"].items() if value)
    lines = [
        f"{kept['device']}, {kept['date']}, {versions}; {kept['took_s']:.0f} s in all.",
        "",
        "| # | check | expected | verdict | s | figures |",
        "|--:|---|---|---|--:|---|",
    ]
    for row in kept["checks"]:
        good = [point for point in row["points"] if point["verdict"] in ("ok", "shown")]
        told = "; ".join(f"{point['what']}: {point['found']}" for point in good[:3])
        if row["verdict"] == "skipped":
            told = "; ".join(dict.fromkeys(point["found"] for point in row["points"])) or row["ended"]
        more = f"; and {len(good) - 3} more" if len(good) > 3 else ""
        cells = (row["number"], row["name"], row["expected"], row["verdict"], f"{row['took_s']:.0f}", told + more)
        lines.append("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    failed = [(row, point) for row in kept["checks"] for point in row["points"] if point["verdict"] == "failed"]
    lines += [""] if failed else []
    lines += [
        f"- {row['name']}: {point['what']}: expected {point['expected']}, found {point['found']}"
        for row, point in failed
    ]
    lines += [
        f"- {row['name']}: {row['ended']}" for row in kept["checks"] if row["ended"] and row["verdict"] == "failed"
    ]
    return "\n".join(lines) + "\n"


def told(row: dict[str, Any]) -> str:
    """A check's lines for people."""
    lines = [f"{row['number']:2} {row['name']:18} {row['verdict']:8} {row['took_s']:6.1f} s  {row['ended']}".rstrip()]
    for point in row["points"]:
        expected = f" (expected {point['expected']})" if point["verdict"] == "failed" else ""
        lines.append(f"     {point['verdict']:8} {point['what']}: {point['found']}{expected}")
    return "\n".join(lines)


def programme(numbers: list[int], out: Path, *, cpu: bool, budget_s: float) -> int:
    """Run checks one after the other, and keep what each has found; the exit code."""
    import torch

    begun = time.monotonic()
    device = torch.cuda.get_device_name() if not cpu else f"CPU, tiny sizes ({platform.machine()})"
    versions = {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }  # fmt: skip
    checks: list[dict[str, Any]] = []
    kept = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": device,
        "versions": versions,
        "took_s": 0.0,
        "checks": checks,
    }
    for check in PROGRAMME:
        if check.number not in numbers:
            continue
        left_s = budget_s - (time.monotonic() - begun)
        if left_s < 1:
            checks.append(
                dataclasses.asdict(check) | {
                    "verdict": "skipped", "took_s": 0.0, "ended": f"not reached within {budget_s:.0f} s", "points": [],
                }
            )  # fmt: skip
        else:
            limit_s = check.limit_s * (BUSY if cpu else 1)
            checks.append(run_one(check, cpu=cpu, limit_s=min(limit_s, left_s)))
        kept["took_s"] = round(time.monotonic() - begun, 1)
        keep(kept, out)
        print(told(checks[-1]), flush=True)
    bad = [row["name"] for row in checks if row["verdict"] == "failed" or row["ended"]]
    print(f"\n{len(checks)} checks in {kept['took_s']:.0f} s, kept in {out}")
    print(f"failed or not reached: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


def here(cpu: bool) -> Any:
    """The ground of a check in this process."""
    import torch

    from benchmarks.gpu_checks.ground import Ground

    return Ground(torch.device("cpu") if cpu else torch.device("cuda", 0), Path.cwd())


def named(where: str) -> Any:
    """A function below gpu_checks."""
    module, _, name = where.partition(".")
    return getattr(importlib.import_module(f"benchmarks.gpu_checks.{module}"), name)


def check(number: int, said: Path, *, cpu: bool) -> int:
    """In a process of its own: one check, a line for each point as soon as it is known."""
    listed = next(one for one in PROGRAMME if one.number == number)
    with said.open("a") as file:
        for point in named(listed.where)(here(cpu)):
            file.write(json.dumps(dataclasses.asdict(point)) + "\n")
            file.flush()
    return 0


def main() -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="numbers of checks")
    parser.add_argument("--cpu", action="store_true", help="the CPU's part of each check, with tiny sizes")
    parser.add_argument("--out", type=Path, help="where the result is kept")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for all checks (default: %(default)g)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a result")
    for hidden in ("--check", "--said", "--part", "--given"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.table:
        print(table(json.loads(asked.table.read_text())), end="")
        return 0
    if asked.part:
        answer = named(asked.part)(here(asked.cpu), **json.loads(asked.given))
        print("\n" + json.dumps(answer), flush=True)
        return 0
    if asked.check:
        return check(int(asked.check), Path(asked.said), cpu=asked.cpu)
    numbers = asked.only or [one.number for one in PROGRAMME]
    unknown = {*numbers} - {one.number for one in PROGRAMME}
    if unknown:
        parser.error(f"there is no check {min(unknown)}; there are 1 to {len(PROGRAMME)}")
    if not asked.cpu:
        import torch

        if not torch.cuda.is_available():
            print(
                "make gpu needs a GPU that torch can use, and there is none here; "
                "`python -m benchmarks.gpu --cpu` runs the part of each check that a CPU shows",
                file=sys.stderr,
            )
            return 2
    RESULTS.mkdir(exist_ok=True)
    default = Path("gpu-cpu.json") if asked.cpu else RESULTS / f"gpu-{time.strftime('%Y%m%d-%H%M')}.json"
    budget_s = asked.seconds if not asked.cpu else max(asked.seconds, 3600.0)
    return programme(numbers, (asked.out or default).resolve(), cpu=asked.cpu, budget_s=budget_s)


if __name__ == "__main__":
    raise SystemExit(main())
