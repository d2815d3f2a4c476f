"""Whether programs go on from the right checkpoint after a host is gone, and how fast checkpoints are copied.

    python benchmarks/shared.py                20 runs of six layouts, and copies of 400 MB over links of 400 Mbit/s
    python benchmarks/shared.py --runs 0       the copies alone

A run has two nodes and a spare, no disk in common and a checkpoint every two seconds. One host, chosen by chance, is
switched off at a moment chosen by chance. The step is right if all workers go on from the same one with the contents
that were saved, and it is not older than what all hosts had just before; a run of which they had nothing begins anew.
Then the run is resumed on the hosts that are left, in another order. Figures are kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import keep, wait_for_quiet

ROOT = Path(__file__).parents[1]
LAYOUTS = ("rank0", "ranks", "dcp", "hf", "lightning", "nanochat")
SIZE = 20_000
RATE_MBIT = 400
COPY_BYTES = 400_000_000
DTCTL = [sys.executable, "-m", "dtctl"]


def spec_of(nodes: list[str], spares: list[str], args: list[object]) -> str:
    """Return a spec with a shared folder."""
    cluster = {
        "transport": "sandbox", "nodes": nodes, "spares": spares, "slots": 1, "connect_timeout_s": 2,
        "link_timeout_s": 3,
    }  # fmt: skip
    job = {
        "script": "train.py", "kind": "direct", "grace_s": 1, "max_restarts": 2, "args": [str(each) for each in args],
        "env": {"OMP_NUM_THREADS": "1", "SIZE": str(SIZE)}, "shared": ["checkpoints/"],
    }  # fmt: skip
    return json.dumps({"cluster": cluster, "job": job})


def digest_of(step: int, part: int) -> str:
    """Return the digest that the program prints of what it has saved."""
    return hashlib.sha256(struct.pack("<f", float(step * 100 + part + 1)) * SIZE).hexdigest()[:8]


class Bench:
    """Virtual hosts and a project."""

    def __init__(self, folder: Path) -> None:
        from dtctl.sandbox import control

        self.folder = folder
        self.env = {**os.environ, "DTCTL_SANDBOX": "shared", "NO_COLOR": "1"}
        self.sandbox = control.start_sandbox("shared", nodes=3)
        shutil.copy(ROOT / "tests" / "integration" / "checkpoint_layouts.py", folder / "train.py")

    def close(self) -> None:
        """Take the hosts down."""
        from dtctl.sandbox import control

        control.remove_sandbox("shared")

    def heal(self) -> None:
        """Switch all hosts on."""
        from dtctl.sandbox import control, faults

        current = control.find_running_sandbox("shared")
        assert current is not None
        faults.remove_host_faults(current, current.nodes)
        self.sandbox = control.find_running_sandbox("shared") or current

    def printed(self, run: str) -> str:
        """Return what all workers of a run have printed."""
        logs = self.folder / ".dtctl" / "runs" / run / "logs"
        return "".join(path.read_text() for path in logs.rglob("rank-*.log"))

    def last_saved(self, run: str) -> int:
        """Return the newest step that was saved before anything went on from a checkpoint."""
        logs = self.folder / ".dtctl" / "runs" / run / "logs"
        first = [re.split(r"RESUMED .* step=[1-9]", path.read_text())[0] for path in logs.rglob("rank-*.log")]
        return max((int(step) for text in first for step in re.findall(r"SAVED (\d+)", text)), default=0)

    def steps_on(self, node: int, run: str) -> list[int]:
        """Return the steps of which a host has files."""
        from dtctl.sandbox import control

        folder = f"{self.sandbox.home}/.dtctl/node/runs/{run}"
        script = f"cd {folder} && find work/checkpoints ahead/checkpoints 2>/dev/null; true"
        argv = control.enter_argv(self.sandbox, self.sandbox.nodes[node], ["bash", "-c", script])
        found = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        return [int(step) for step in re.findall(r"(?:step[-=]|checkpoint-|model_|optim_)0*(\d+)", found)]

    def run(self, number: int, chance: random.Random) -> dict[str, object]:
        """Launch, switch a host off, and see from where the run goes on."""
        from dtctl.sandbox import faults

        layout, run = LAYOUTS[number % len(LAYOUTS)], f"{LAYOUTS[number % len(LAYOUTS)]}-{number}-{os.getpid()}"
        (self.folder / "dtctl.yaml").write_text(spec_of(["node1", "node2"], ["node3"], [layout, 400, 0, 4, 0.5]))
        process = subprocess.Popen(
            [*DTCTL, "launch", "--name", run], cwd=self.folder, env=self.env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        while "SAVED 4\n" not in self.printed(run) and process.poll() is None:
            time.sleep(0.1)
        time.sleep(chance.uniform(8, 25))
        lost = chance.randrange(2)
        on_all = min(max(self.steps_on(node, run), default=0) for node in (1 - lost, 2))
        faults.power_off_host(self.sandbox, self.sandbox.nodes[lost])
        killed = time.monotonic()
        text = process.communicate(timeout=600)[0]
        saved = self.last_saved(run)
        resumes = re.findall(r"RESUMED rank=(\d) step=(\d+) digest=(\w+|-)", self.printed(run))
        again = [(int(rank), int(step), name) for rank, step, name in resumes if step != "0"]
        order = ["node3", "node2" if lost == 0 else "node1"]
        (self.folder / "dtctl.yaml").write_text(spec_of(order, [], [layout, 0, 0, 1000, 0.01]))
        done = subprocess.run(
            [*DTCTL, "launch", "--resume", run, "--name", f"{run}-again"], cwd=self.folder,
            env=self.env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        later = re.findall(r"RESUMED rank=\d step=(\d+)", done.stdout)
        self.heal()
        steps = {step for _, step, _ in again}
        alone = layout in ("rank0", "lightning")
        right = all(name == digest_of(step, -1 if alone else rank) for rank, step, name in again)
        row = {
            "layout": layout, "lost": f"node{lost + 1}", "seconds": round(time.monotonic() - killed, 1),
            "exit_code": process.returncode, "on_all_before": on_all, "last_saved": saved, "resumed": sorted(steps),
            "contents_right": right and len(again) == 2, "resume_again": sorted({int(step) for step in later}),
            "exit_code_again": done.returncode,
        }  # fmt: skip
        # The digest of the contents shows that a step was saved, even if the line that says so was lost with its host.
        row["begun_anew"] = not again and on_all == 0 and len(resumes) == 4
        is_right = len(steps) == 1 and bool(row["contents_right"]) and on_all <= min(steps)
        has_ended = process.returncode == 0 and done.returncode == 0 and len(set(later)) == 1
        row["right"] = has_ended and (is_right or bool(row["begun_anew"]))
        print(row, flush=True)
        if not row["right"]:
            print(text[-3000:], done.stdout[-500:], done.stderr[-2000:], self.printed(run)[-1500:], flush=True)
        return row

    def copy(self, share: str) -> dict[str, object]:
        """Copy a large checkpoint over a limited link: before an attempt, or while workers run."""
        from dtctl.sandbox import faults

        for node in self.sandbox.nodes[:2]:
            faults.limit_bandwidth(self.sandbox, node, rate=f"{RATE_MBIT}mbit")
        name = f"copy-{share}-{os.getpid()}"
        write = (
            "import os, pathlib, time\n"
            "folder = pathlib.Path('checkpoints/step-1'); attempt = os.environ['DTCTL_ATTEMPT']\n"
            "if os.environ['RANK'] == '0' and attempt == '0':\n"
            "    folder.mkdir(parents=True)\n"
            f"    data = os.urandom({COPY_BYTES})\n"
            "    (folder / 'a.raw').write_bytes(data)\n"
            "    os.utime(folder / 'a.raw', (time.time() - 60, time.time() - 60))\n"
            f"    time.sleep({60 if share == 'beside' else 0})\n"
            f"    raise SystemExit({0 if share == 'beside' else 1})\n"
            f"time.sleep({60 if share == 'beside' else 1} if attempt == '0' else 0)\n"
        )
        (self.folder / "copies.py").write_text(write)
        spec = json.loads(spec_of(["node1", "node2"], [], []))
        spec["job"]["script"] = "copies.py"
        (self.folder / "dtctl.yaml").write_text(json.dumps(spec))
        done = subprocess.run(
            [*DTCTL, "launch", "--name", name], cwd=self.folder, env=self.env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        ledger = json.loads((self.folder / ".dtctl" / "runs" / name / "ledger.json").read_text())
        self.heal()
        seconds = ledger["phases_s"]["copy"] if share == "before" else ledger["copied_s"]
        notes = [line for line in done.stderr.splitlines() if "job.shared" in line or "copied" in line]
        mbit_s = COPY_BYTES * 8 / 1e6 / seconds if seconds else 0.0
        row = {
            "when": share, "bytes": COPY_BYTES, "seconds": seconds, "mbit_s": round(mbit_s, 1),
            "share_of_link": round(mbit_s / RATE_MBIT, 3), "exit_code": done.returncode, "notes": notes,
        }  # fmt: skip
        print(row, flush=True)
        return row


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=38)
    parser.add_argument("--no-copies", action="store_true", help="runs alone")
    parser.add_argument("--busy", action="store_true", help="measure although the machine does something else")
    options = parser.parse_args()
    if not options.busy:
        wait_for_quiet()
    base = Path.home() / ".cache"
    base.mkdir(exist_ok=True)
    folder, chance = Path(tempfile.mkdtemp(prefix="dtctl-shared-", dir=base)), random.Random(options.seed)
    bench = Bench(folder)
    try:
        copies = [] if options.no_copies else [bench.copy(share) for share in ("before", "beside")]
        runs = [bench.run(number, chance) for number in range(options.runs)]
        right = sum(bool(row["right"]) for row in runs)
        keep("shared", {"runs": runs, "right": right, "of": len(runs), "rate_mbit_s": RATE_MBIT, "copies": copies})
        print(f"{right} of {len(runs)} went on from the right step")
    finally:
        bench.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
