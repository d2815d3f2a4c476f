"""Workers of a loop of one's own that are killed and stopped, and end with the bits of the plain script."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
import torch

from dtctl import names
from dtctl.runtime.snapshot.format import layout
from tests import forked
from tests.verdicts import is_unrecorded, read_verdict

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).with_name("own_loop.py")


def launch(
    folder: Path,
    kind: str,
    workers: int,
    *,
    kill: forked.Kill | None = None,
    pace: float = 0.0,
    rows: int = 0,
    epochs: int = 4,
    own: bool = False,
) -> forked.Ended:
    folder.mkdir(exist_ok=True)
    for path in folder.glob("steps.*"):
        path.unlink()
    (folder / "steps.0").touch()
    environ = {"DTCTL_TEST_PACE": str(pace), "DTCTL_TEST_ROWS": str(rows), "DTCTL_TEST_EPOCHS": str(epochs)}
    environ["DTCTL_TEST_OWN"] = str(int(own))
    return forked.launch([SCRIPT, kind], workers, cwd=folder, environ=environ, kill=kill)


def kill_after(
    folder: Path, steps: int, rank: int, *, stop: bool = False, delay_s: float = 0.0, draft: bool = False
) -> forked.Kill:
    """SIGKILL, or SIGTERM to all, once rank 0 has done so many steps in this attempt."""
    drafts = str(folder / "snapshots") if draft else None
    return forked.Kill(
        rank=rank, progress=str(folder / "steps.0"), after=steps, stop=stop, delay_s=delay_s, drafts=drafts
    )


def read_final(folder: Path) -> list[torch.Tensor]:
    return torch.load(folder / "final.pt")


def require_equal(folder: Path, other: Path) -> None:
    assert all(map(torch.equal, read_final(folder), read_final(other)))


@pytest.mark.parametrize(("kind", "workers"), [("ddp", 3), ("fsdp", 2)])
def test_a_killed_and_stopped_loop_ends_with_the_bits_of_a_calm_one(tmp_path: Path, kind: str, workers: int) -> None:
    calm, hit = tmp_path / "calm", tmp_path / "hit"
    assert launch(calm, "plain" if kind == "ddp" else kind, workers).code == 0
    killed = launch(hit, kind, workers, kill=kill_after(hit, 8, workers - 1), pace=0.05)
    assert killed.code == 1
    assert "SIGKILL" in killed.output
    stopped = launch(hit, kind, workers, kill=kill_after(hit, 8, 0, stop=True), pace=0.05)
    assert stopped.output.count(f"ended with exit code {names.REQUEUE_EXIT}") == workers, stopped.output
    verdict = read_verdict(stopped.output)
    assert verdict == "exact" or is_unrecorded(verdict), stopped.output
    assert len({path.read_text() for path in hit.glob("steps.*")}) == 1, "they did not leave at the same step"
    at = int(re.findall(r"stopped after step (\d+)", stopped.output)[0])
    assert layout.list_step_folders(hit / "snapshots")[0][0] == at
    ended = launch(hit, kind, workers)
    assert ended.code == 0, ended.output
    assert f"exact: steps {at + 1} to {at + 2} repeated bit for bit" in ended.output
    require_equal(calm, hit)
    if kind == "fsdp":
        newest = layout.list_step_folders(hit / "snapshots")[0][1]
        assert {path.name for path in newest.glob("model.*")} == {"model.00000.safetensors", "model.00001.safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("ddp", 3), ("fsdp", 2)])
def test_a_loop_that_is_killed_many_times_ends_with_the_bits_of_a_calm_one(
    tmp_path: Path, kind: str, workers: int
) -> None:
    """20 kills in `make soak`, and 5 elsewhere."""
    kills = 20 if os.environ.get("DTCTL_SOAK") else 5
    calm, hit, chosen, epochs = tmp_path / "calm", tmp_path / "hit", random.Random(5), kills
    assert launch(calm, "plain" if kind == "ddp" else kind, workers, epochs=epochs).code == 0
    for number in range(kills):
        kill = kill_after(
            hit, chosen.randrange(8), chosen.randrange(workers), delay_s=chosen.random() * 0.1, draft=number % 4 == 3
        )
        killed = launch(hit, kind, workers, kill=kill, pace=0.05, epochs=epochs)
        assert "SIGKILL" in killed.output, "the loop was through before all kills"
        verdict = read_verdict(killed.output)
        assert verdict in ("exact", "") or is_unrecorded(verdict) or "nothing known differs" in verdict, killed.output
    assert launch(hit, kind, workers, epochs=epochs).code == 0
    require_equal(calm, hit)


def test_fewer_workers_go_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """160 samples in batches of 8: 5 batches for each of 4 workers, 10 for each of 2."""
    stopped = launch(tmp_path, "ddp", 4, kill=kill_after(tmp_path, 6, 0, stop=True), pace=0.05, own=True)
    at = int(re.findall(r"stopped after step (\d+)", stopped.output)[0])
    fewer = launch(tmp_path, "ddp", 2, own=True)
    assert fewer.code == 0, fewer.output
    assert "workers changed from 4 to 2" in fewer.output
    assert "extra_state (seen) of 2 workers is left out: each of 4 workers kept its own" in fewer.output
    assert (tmp_path / "steps.0").stat().st_size == 10 - 2 * (at % 5) + 10 * (3 - at // 5)


def test_a_loader_that_is_shorter_on_one_worker_is_refused_on_all(tmp_path: Path) -> None:
    ended = launch(tmp_path, "ddp", 2, rows=16)
    assert ended.output.count("ended with exit code 4") == 2, ended.output
    assert "the same number of batches on all workers: 10 on rank 0; 8 on rank 1" in ended.output


def test_a_stop_before_the_first_step_and_a_kill_during_a_snapshot(tmp_path: Path) -> None:
    calm, hit = tmp_path / "calm", tmp_path / "hit"
    assert launch(calm, "plain", 2).code == 0
    stopped = launch(hit, "ddp", 2, kill=kill_after(hit, 0, 0, stop=True, delay_s=0.2), pace=0.3)
    assert stopped.code == 1, stopped.output
    killed = launch(hit, "ddp", 2, kill=kill_after(hit, 2, 0, draft=True), pace=0.05)
    assert "SIGKILL" in killed.output, killed.output
    assert launch(hit, "ddp", 2).code == 0
    require_equal(calm, hit)
