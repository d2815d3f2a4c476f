"""Real workers: what is killed, damaged or stopped ends with the bits of a run that was left alone.

Three workers are needed to see whether DDP's buckets are as they were: with two, every order of additions is the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl import names
from dtctl.runtime.snapshot.format import layout
from tests import forked
from tests.facts import missing
from tests.verdicts import read_verdict

pytestmark = pytest.mark.torch

SAMPLES = 250

SCRIPT = f"""
import json, os, signal, time
from pathlib import Path
import torch
from torch import nn
from dtctl.runtime import Outcome, TensorData, Trainer, run
from dtctl.runtime.snapshot import state

def network():
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1),
    )

def train(config, worker):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn({SAMPLES} + (worker.rank if config.data.get("uneven") else 0), 16, generator=generator)
    data = TensorData(inputs, inputs[:, :1] - inputs[:, 1:2], torch.arange(len(inputs)))
    # Nothing of the training, which would be put back: every launch counts its own calls, in variables of a launch.
    os.environ["DTCTL_TEST_CALLS"] = "0"
    before = set(Path("snapshots").glob("step-*"))

    def loss(model, batch):
        calls = os.environ["DTCTL_TEST_CALLS"] = str(int(os.environ["DTCTL_TEST_CALLS"]) + 1)
        if os.environ.get("DTCTL_TEST_HURT") == f"{{worker.rank}}:{{calls}}":
            while os.environ["DTCTL_TEST_HURT_SAVED"] and not set(Path("snapshots").glob("step-*")) - before:
                time.sleep(0.01)
            os.kill(os.getpid(), getattr(signal, os.environ["DTCTL_TEST_HURT_WITH"]))
        inputs, targets, ids = batch
        with open(f"seen.{{worker.rank}}", "a") as file:
            file.write(json.dumps([trainer.step, ids.tolist()]) + "\\n")
        return nn.functional.mse_loss(model(inputs), targets)

    trainer = Trainer(config, worker, network(), loss, data)
    outcome = trainer.run()
    if worker.is_first and outcome is Outcome.FINISHED:
        tree = state.optimizer_tree(trainer.model, trainer.optimizer)
        print("digest", state.compute_state_digest(trainer.model.state_dict(), tree), flush=True)
    return outcome

if __name__ == "__main__":
    defaults = {{
        "micro_batch": 4, "accumulate": 2, "clip_norm": 0.5, "steps": 20, "lr": 1e-2, "log_every": 4, "timeout_s": 60,
        "snapshot": {{"every_steps": 4, "keep": 3}},
    }}
    raise SystemExit(run(train, defaults=defaults))
"""


def launch(
    folder: Path, workers: int, *settings: str, hurt: str = "", hurt_with: str = "SIGKILL", saved: bool = False
) -> forked.Ended:
    """Train in `folder`.

    Args:
        folder: of the run.
        workers: processes.
        settings: of the configuration, `key=value`.
        hurt: `RANK:CALL`, the worker that sends itself a signal, and at which call of the loss function.
        hurt_with: name of the signal.
        saved: not before a snapshot of this launch is there: a busy machine may take its time with the first one.
    """
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    argv = ["train.py", *(f"--train.{setting}" for setting in settings)]
    environ = {
        "DTCTL_TEST_HURT": hurt,
        "DTCTL_TEST_HURT_WITH": hurt_with,
        "DTCTL_TEST_HURT_SAVED": "1" if saved else "",
    }
    return forked.launch(argv, workers, cwd=folder, environ=environ)


def torchrun(folder: Path, workers: int, *settings: str) -> forked.Ended:
    """The same, as it is started without dtctl."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DTCTL_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", "train.py"]
    done = subprocess.run(
        [*command, *(f"--train.{setting}" for setting in settings)],
        cwd=folder,
        env=environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return forked.Ended(code=done.returncode, output=done.stdout)


def digest(ended: forked.Ended) -> str:
    """That the script printed."""
    return next(line.split()[1] for line in ended.output.splitlines() if line.startswith("digest "))


def rows(folder: Path) -> list[tuple[int, float, float]]:
    lines = (folder / names.METRICS_FILE).read_text().splitlines()
    return [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


@pytest.mark.parametrize(("workers", "hurt", "damage"), [(2, "1:29", True), (3, "2:21", False)])
def test_a_killed_run_ends_with_the_bits_of_one_left_alone(
    tmp_path: Path, workers: int, hurt: str, damage: bool
) -> None:
    straight = launch(tmp_path / "straight", workers)
    assert straight.code == 0, straight.output
    losses = [loss for _, loss, _ in rows(tmp_path / "straight")]
    assert losses[-1] < losses[0]

    killed = launch(tmp_path / "killed", workers, hurt=hurt)
    assert killed.code != 0
    assert "SIGKILL" in killed.output
    snapshots = layout.list_step_folders(tmp_path / "killed" / "snapshots")
    newest = (int(hurt.split(":")[1]) - 1) // 2 // 4 * 4
    assert snapshots[0][0] == newest
    if damage:
        path = snapshots[0][1] / "optimizer.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    resumed = launch(tmp_path / "killed", workers)
    assert resumed.code == 0, resumed.output
    if damage:
        assert f"snapshot skipped: step-{newest:08d} is corrupt: optimizer.safetensors does not have" in resumed.output
        newest -= 4
    assert f"resumed at step {newest} of 20: nothing known differs" in resumed.output
    unrecorded = f"not confirmed: step {newest + 1} was not recorded before the last attempt ended"
    assert read_verdict(resumed.output) in ("exact", unrecorded)
    assert digest(resumed) == digest(straight)
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")


def test_one_signal_stops_all_and_other_numbers_of_workers_go_on(tmp_path: Path) -> None:
    """SIGTERM to one of three; then two go on, and one: each sample of each epoch is seen exactly once."""
    epochs = ("steps=null", "epochs=4", "global_batch=24", "accumulate=null")
    three = launch(tmp_path, 3, *epochs, "micro_batch=4", hurt="1:10", hurt_with="SIGTERM")
    assert three.output.count("ended with exit code 75") == 3, three.output
    ((stopped, _), *_) = layout.list_step_folders(tmp_path / "snapshots")
    assert not missing(three.output, f"stopped {stopped} 42 snapshot")
    assert 5 <= stopped < 42
    seen = Counter(take_seen(tmp_path, 0, stopped))

    two = launch(tmp_path, 2, *epochs, "micro_batch=3", hurt="0:20", hurt_with="SIGUSR1")
    known = "known to differ: micro_batch changed from 4 to 3"
    assert f"resumed at step {stopped} of 42: {known}" in two.output, two.output
    assert not missing(two.output, "workers 3 2")
    ((again, _), *_) = layout.list_step_folders(tmp_path / "snapshots")
    assert "ended with exit code 75" in two.output, two.output
    assert not missing(two.output, f"stopped {again} 42 snapshot")
    assert stopped < again < 42
    seen.update(take_seen(tmp_path, stopped, again))

    one = launch(tmp_path, 1, *epochs, "micro_batch=8")
    assert one.code == 0, one.output
    seen.update(take_seen(tmp_path, again, 42))
    assert seen == Counter(list(range(SAMPLES)) * 4)


def take_seen(folder: Path, first: int, end: int) -> Iterator[int]:
    """Samples of the steps of a launch that count; the steps ahead of a stop, which the next launch repeats, do not."""
    for path in folder.glob("seen.*"):
        # A resume throws one pass away, with the samples of the first that counts: the same line twice.
        for line in dict.fromkeys(path.read_text().splitlines()):
            step, ids = json.loads(line)
            yield from ids if first <= step < end else ()
        path.unlink()


def test_four_two_three_and_four_workers_see_each_sample_once_per_epoch_whoever_is_killed(tmp_path: Path) -> None:
    """Of the steps that count: what comes after the last snapshot of a killed launch is done again."""
    epochs = ("steps=null", "epochs=2", "global_batch=24", "accumulate=null")
    seen: Counter[int] = Counter()
    begun, worlds = 0, []
    for workers, micro, hurt in ((4, 6, "2:8"), (2, 4, "1:19"), (3, 4, "0:13"), (4, 6, "")):
        for path in tmp_path.glob("seen.*"):
            path.unlink()
        ended = launch(tmp_path, workers, *epochs, f"micro_batch={micro}", hurt=hurt, saved=True)
        assert (ended.code == 0) == (hurt == ""), ended.output
        assert (f"resumed at step {begun} of 21" in ended.output) == (begun > 0)
        ((kept, _), *_) = layout.list_step_folders(tmp_path / "snapshots")
        assert kept > begun
        for path in tmp_path.glob("seen.*"):
            # A resume throws one pass away, with the samples of the first that counts: the same line twice.
            for step, ids in map(json.loads, dict.fromkeys(path.read_text().splitlines())):
                if step < kept:
                    seen.update(ids)
        begun = kept
        worlds.append(workers)
    assert (worlds, begun) == ([4, 2, 3, 4], 21)
    assert seen == Counter(list(range(SAMPLES)) * 2)


def test_workers_that_differ_are_all_told(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, 2, 'data={"uneven": true}')
    message = f"the workers do not agree on the length of the data: {SAMPLES} on rank 0; {SAMPLES + 1} on rank 1"
    assert ended.output.count(f"error: {message}") == 2, ended.output
    assert "exitcode  : 4" in ended.output


def test_a_run_without_its_snapshots_begins_anew(tmp_path: Path) -> None:
    """And ends with the same bits under torchrun, since everything random comes from the seed."""
    straight = launch(tmp_path / "run", 2, "steps=4")
    shutil.rmtree(tmp_path / "run" / "snapshots")
    assert digest(torchrun(tmp_path / "run", 2, "steps=4")) == digest(straight)
