"""Snapshots in a store that speaks S3: what is killed, damaged or cut off ends with the bits of a run left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import command_line, forked, store
from tests.facts import missing

pytestmark = pytest.mark.torch
TRAIN = """
import os, signal
import torch
from torch import nn
from dtctl.runtime import TensorData, Trainer, run
from dtctl.runtime.snapshot import commands
from dtctl.runtime.snapshot.storage import place

writes, asked = 0, place.RemotePath._query_store
def counted(self, verb, action):
    global writes
    writes += verb == "written"
    if verb == "written" and os.environ.get("HURT_WRITING") == f"{os.environ['RANK']}:{writes}":
        os.kill(os.getpid(), signal.SIGKILL)
    return asked(self, verb, action)
place.RemotePath._query_store = counted

def train(config, worker):
    inputs = torch.randn(128, 16, generator=torch.Generator().manual_seed(5))
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if os.environ.get("HURT") == f"{worker.rank}:{calls}":
            trainer.training.snapshots.saver.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    trainer = Trainer(config, worker, model, loss, TensorData(inputs, inputs.sum(1, keepdim=True)))
    outcome = trainer.run()
    if worker.is_first:
        print("digest", commands.compute_snapshot_digest(trainer.training.snapshots.folder)["digest"])
    return outcome

if __name__ == "__main__":
    defaults = {"micro_batch": 4, "steps": 12, "timeout_s": 60, "snapshot": {"every_steps": 4, "keep": 2}}
    raise SystemExit(run(train, defaults=defaults))
"""
PATIENCE_S = 6.0
"""Until a link counts as dead, in a test that waits for it twice; the store itself may be slow on a busy machine."""
SAVE = """
import os, signal, sys
import torch
from dtctl.runtime.snapshot import Saver, newest
from dtctl.runtime.snapshot.storage import place

url, step, point, patience_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
if patience_s:
    place.PATIENCE_S, place.IMPATIENCE_S = patience_s, patience_s / 4
place.BLOCK_BYTES = 5 << 20  # so that 12 MiB are uploaded in parts
calls, asked = 0, place.RemotePath._query_store
def counted(self, verb, action):
    global calls
    calls += verb == "written"
    if verb == "written" and calls == point:
        os.kill(os.getpid(), signal.SIGKILL)
    return asked(self, verb, action)
place.RemotePath._query_store = counted
with Saver(url, keep=1, complain=lambda error: None) as saver:
    found = newest(url)
    print("newest", found and found.step, *(found.rejected if found else ()), flush=True)
    saver.save(step, {"model": {"w": torch.full((3 << 20,), float(step))}}, facts={})
print("calls", calls)
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[store.Store]:
    with store.serving() as found:
        yield found


def dtctl(*arguments: str, cwd: Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return command_line.dtctl(*arguments, cwd=cwd, env={**(environ or {}), "NO_COLOR": "1"})


@pytest.fixture
def train(tmp_path: Path, s3: store.Store) -> Callable[..., forked.Ended]:
    """Trains in two workers; the last word of one that ends well is the digest of its newest snapshot."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(strategy: str, place: str, **hurt: str) -> forked.Ended:
        argv = ["train.py", f"--train.strategy={strategy}", f"--train.snapshot.dir={place}"]
        return forked.launch(argv, 2, cwd=tmp_path, environ={**s3.environ, **hurt})

    return run


def digest(ended: forked.Ended) -> str:
    assert ended.code == 0, ended.output
    word, found = ended.output.splitlines()[-1].split()
    assert word == "digest"
    return found


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_newest_good_one(s3: store.Store, train: Callable[..., forked.Ended]) -> None:
    url = f"{s3.url}/ddp"
    assert "rank 1 ended by SIGKILL" in train("ddp", url, HURT="1:10").output
    newest = sorted(name for name in s3.names("ddp/") if name.endswith("/COMMIT"))[-1].removesuffix("/COMMIT")
    s3.flip(f"{newest}/optimizer.safetensors")
    again = train("ddp", url)
    bad = f"{newest.split('/')[1]} is corrupt: optimizer.safetensors does not have the digest that was recorded"
    assert bad in again.output
    assert "resumed at step 4 of 12: nothing known differs\nexact: steps 5 to 6 repeated bit for bit" in again.output
    assert digest(again) == digest(train("ddp", "straight"))
    steps = sorted(name.split("/")[1][:13] for name in s3.names("ddp/") if name.endswith("/COMMIT"))
    assert steps == ["step-00000008", "step-00000012"]


@pytest.mark.slow
def test_a_worker_is_killed_while_all_write(s3: store.Store, train: Callable[..., forked.Ended]) -> None:
    """In the snapshot of step 8, of which rank 1 has then written one of its two files."""
    url = f"{s3.url}/fsdp"
    assert "rank 1 ended by SIGKILL" in train("fsdp", url, HURT_WRITING="1:14").output
    assert any("step-00000008" in name for name in s3.names("fsdp/"))
    again = train("fsdp", url)
    assert not missing(again.output, "COMMIT missing")
    assert "resumed at step 4 of 12: nothing known differs\nexact: steps 5 to 6 repeated bit for bit" in again.output
    assert digest(again) == digest(train("fsdp", "straight"))
    assert any(name.endswith("model.00001.safetensors") for name in s3.names("fsdp/step-00000012"))


Save = Callable[..., forked.Ended]


@pytest.fixture
def save(tmp_path: Path, s3: store.Store) -> Save:
    """Saves a step in a process of its own, which kills itself the `point`th time that it asks the store to write.

    With a patience, that is how long it waits for an answer: only for a link that is cut, since a busy store is slow.
    """
    (tmp_path / "save.py").write_text(SAVE)

    def run(url: str, step: int, point: int = 0, patience_s: float = 0.0) -> forked.Ended:
        argv = ["save.py", url, str(step), str(point), str(patience_s)]
        return forked.launch(argv, 1, cwd=tmp_path, environ=s3.environ)

    return run


def test_killed_anywhere_in_a_save(s3: store.Store, save: Save) -> None:
    """SIGKILL before a request that writes: without a commit record there is nothing, with it there is everything."""
    url = f"{s3.url}/killed"
    first = save(url, 1)
    assert first.code == 0, first.output
    assert first.output.startswith("newest None\n")
    calls = int(first.output.split()[-1])
    for point in (1, calls // 2, calls):  # the last is that of the commit record
        assert "rank 0 ended by SIGKILL" in save(url, 2, point).output
        assert not any("step-00000002" in name and name.endswith("/COMMIT") for name in s3.names("killed/"))
    assert any("step-00000002" in name for name in s3.names("killed/"))
    again = save(url, 2)
    assert again.code == 0, again.output
    assert again.output.startswith("newest 1 step-00000002."), again.output
    assert not missing(again.output, "COMMIT missing")
    left = s3.names("killed/")
    assert ({name.split("/")[1][:13] for name in left}, len(left)) == ({"step-00000002"}, 3), "what was left is gone"


@pytest.mark.slow
def test_a_link_that_dies_in_an_upload_and_one_that_is_dead_at_a_resume(s3: store.Store, save: Save) -> None:
    url = f"{s3.url}/cut"
    assert save(url, 1).code == 0
    before = s3.names("cut/")
    s3.link.cut_after(7 << 20)  # of 12 MiB, in the second part
    try:
        cut = save(url, 2, patience_s=PATIENCE_S)
        assert cut.code == 1
        assert not missing(cut.output, "snapshot step 2 written")
        assert not missing(cut.output, f"answer {PATIENCE_S:g} s")
        assert s3.link.is_cut
        left = [name for name in s3.names("cut/") if "/.lease-" not in name]  # no way to it, to let go of it
        assert left == before, "the older one is intact"
        dead = save(url, 3, patience_s=PATIENCE_S)
        assert dead.code == 1
        assert "newest" not in dead.output.splitlines(), "it must not begin anew because a link is down"
        assert not missing(dead.output, "s3://bucket/cut listed")
    finally:
        s3.link.cut_after(None)
    mended = save(url, 4)
    assert mended.code == 0, mended.output
    assert mended.output.startswith("newest 1\n")


@pytest.mark.slow
def test_a_run_and_commands_on_what_it_keeps(s3: store.Store, tmp_path: Path) -> None:
    """The run's own way to the store is used; on a URL itself, that of whoever asks."""
    (tmp_path / "train.py").write_text(TRAIN)
    url = f"{s3.url}/run"
    spec = {
        "cluster": {"slots": 1, "workdir": str(tmp_path / "node"), "python": sys.executable},
        "job": {"script": "train.py", "kind": "direct", "env": s3.environ},
        "train": {"micro_batch": 4, "steps": 12, "snapshot": {"dir": url, "every_steps": 4, "keep": 3}},
    }
    (tmp_path / "dtctl.yaml").write_text(json.dumps(spec))
    launched = dtctl("launch", "--name", "one", cwd=tmp_path)
    assert launched.returncode == 0, launched.stderr

    by_run = json.loads(dtctl("snapshot", "ls", "one", "--json", cwd=tmp_path).stdout)["snapshots"]
    by_url = json.loads(dtctl("snapshot", "ls", url, "--json", cwd=tmp_path, environ=s3.environ).stdout)["snapshots"]
    assert [{**row, "node": "localhost"} for row in by_url] == by_run
    assert [row["step"] for row in by_run] == [12, 8, 4]

    s3.flip(f"{by_run[0]['path'].removeprefix(s3.url + '/')}/model.safetensors")
    verified = dtctl("snapshot", "verify", url, "--json", cwd=tmp_path, environ=s3.environ)
    assert verified.returncode == 10
    assert json.loads(verified.stdout)["newest_good"] == by_run[1]["path"]
    exported = dtctl("snapshot", "export", "one", "-o", "a", cwd=tmp_path)
    assert "a: model of step 8" in exported.stdout
    pruned = json.loads(dtctl("snapshot", "prune", "one", "--keep", "1", "--json", cwd=tmp_path).stdout)
    assert pruned["places"][0]["removed"] == [by_run[0]["path"], by_run[2]["path"]]
    assert {name.split("/")[1] for name in s3.names("run/")} == {by_run[1]["path"].rsplit("/", 1)[1]}
