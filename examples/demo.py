"""The demonstration behind `make demo`: a GPT on three virtual hosts survives the murder of one of its workers.

Everything that is shown is real: three hosts with their own network, SSH server and home folder, the code pushed to
each, DDP over their network, a kill -9 in mid-run, the recovery. Nothing is left behind; only if the demonstration
fails, the project with the run's logs stays, and is named.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

EXAMPLE = Path(__file__).parent / "gpt"
SANDBOX = "demo"
STEPS = 160
KILL_AT_STEP = 70
SETTINGS = {
    "cluster.transport": "sandbox",
    "cluster.nodes": "3",
    "cluster.slots": "1",
    "job.kind": "direct",
    "train.steps": str(STEPS),
    "train.micro_batch": "8",
    "train.snapshot.every_steps": "20",
    "train.model.layers": "2",
    "train.model.embed": "64",
    "train.model.context": "64",
}


def dtctl(*arguments: str) -> list[str]:
    """The argv of a dtctl command."""
    return [sys.executable, "-m", "dtctl", *arguments]


def say(text: str) -> None:
    """A headline."""
    print(f"\n=== {text}", flush=True)


def metrics(records: Path) -> list[dict[str, float]]:
    """What rank 0 has logged so far."""
    path = records / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the line is being written
    return found


def kill_a_worker(records: Path, finished: threading.Event) -> None:
    """Wait until training is under way, then end the worker on node2 as the kernel's OOM killer would."""
    from dtctl.sandbox import control

    sandbox = control.find_running_sandbox(SANDBOX)
    if sandbox is None:
        return
    while not finished.wait(0.1):
        logged = metrics(records)
        if logged and logged[-1]["step"] >= KILL_AT_STEP:
            break
    processes = control.list_host_processes(sandbox.node("node2"))
    # Forked from a process that had torch already, a worker has that one's command line, and its own name.
    named = [pid for pid in processes if Path(f"/proc/{pid}/comm").read_text().strip() == "train.py"]
    for pid in named or [pid for pid, line in processes.items() if line.endswith("train.py")]:
        say(f"kill -9 of the worker on node2 (process {pid}), after step {logged[-1]['step']:.0f}")
        os.kill(pid, signal.SIGKILL)


def curve(records: Path) -> None:
    """The loss, as a line of bars."""
    logged = metrics(records)
    losses = [row["loss"] for row in logged]
    low, high = min(losses), max(losses)
    bars = "".join(" ▁▂▃▄▅▆▇█"[1 + round(7 * (loss - low) / max(high - low, 1e-9))] for loss in losses)
    print(f"loss {losses[0]:.2f} {bars} {losses[-1]:.2f} over steps 1 to {logged[-1]['step']:.0f}")


def train(project: Path, records: Path) -> int:
    """Launch, and kill a worker meanwhile; the exit code."""
    finished = threading.Event()
    killer = threading.Thread(target=kill_a_worker, args=(records, finished))
    killer.start()
    overrides = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    try:
        return subprocess.run(dtctl("launch", "--name", records.name, *overrides), cwd=project, check=False).returncode
    finally:
        finished.set()
        killer.join()


def main() -> int:
    """Run it in a copy of the example, which is removed; 0 if everything went as it should."""
    folder = Path(tempfile.mkdtemp(prefix="dtctl-demo-"))
    project = folder / EXAMPLE.name
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns(".dtctl", "data", "snapshots", "__pycache__"))
    code = demonstrate(project)
    if code in (0, 130):
        shutil.rmtree(folder)
    else:
        print(f"the project with the run's logs is kept: {project}")
    return code


def demonstrate(project: Path) -> int:
    """Virtual hosts, the training and its end; the exit code."""
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # taken down then, too
    os.environ["DTCTL_SANDBOX"] = SANDBOX
    records = project / ".dtctl" / "runs" / f"demo-{time.strftime('%m%d-%H%M%S')}"
    say("three virtual hosts, each with its own network, SSH server and home folder")
    try:
        up = subprocess.run(dtctl("sandbox", "up", "--nodes", "3"), check=False).returncode
        if up:
            return up
        say("a small GPT, trained with DDP on all three; the text is Python's standard library")
        code = train(project, records)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        say("everything is taken down")
        subprocess.run(dtctl("sandbox", "down", "--yes"), check=False)
    if code:
        return code
    lines = (records / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    done, replaced = events[-1], sum(event["event"] == "heal" for event in events)
    losses = [row["loss"] for row in metrics(records)]
    say("summary")
    curve(records)
    how = f"{replaced} worker replaced while the others stayed" if replaced else f"{done['attempts']} attempts"
    print(f"{how}, {done['left_behind']} processes left, {time.monotonic() - begun:.0f} s in all")
    lost_and_back = replaced > 0 or done["attempts"] == 2
    recovered = lost_and_back and done["left_behind"] == 0 and losses[-1] < 0.8 * losses[0]
    print("the run recovered by itself" if recovered else "something did not go as it should")
    return 0 if recovered else 1


if __name__ == "__main__":
    raise SystemExit(main())
