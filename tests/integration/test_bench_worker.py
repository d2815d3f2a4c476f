"""The worker of `dtctl bench` on its own: right results are called right, and wrong ones wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtctl.bench.figures import OPS
from dtctl.bench.job import MARK, SCRIPT, write_code

pytestmark = pytest.mark.torch

LIAR = """\
import os
import torch.distributed as dist
right = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", "recv")}
def lying(name):
    def call(tensor, *args, **named):
        done = right[name](tensor, *args, **named)
        if os.environ["RANK"] == "1" and tensor.numel() > 100:
            tensor.view(-1)[7] += 1
        return done
    return call
for name in right:
    setattr(dist, name, lying(name))
"""


def run(tmp_path: Path, workers: int, *, lie: bool = False, **asked: Any) -> list[dict[str, Any]]:
    write_code(tmp_path)
    if lie:
        (tmp_path / "sitecustomize.py").write_text(LIAR)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    wanted = {"ops": OPS, "sizes": [1000, 4096], "repeats": 2, "warm_up": 1, "seconds": 1.0, "backend": "auto"}
    argument = json.dumps({**wanted, "training": None, **asked})
    # Only what is pushed is there: dtctl itself need not be on a node.
    plain = {**os.environ, "PYTHONPATH": str(tmp_path) if lie else "", "CUDA_VISIBLE_DEVICES": ""}
    place = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **plain}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, argument],
            cwd=tmp_path,
            env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    ended = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * workers, [err[-800:] for _, err in ended]
    assert all(MARK not in out for out, _ in ended[1:])
    return [json.loads(line[len(MARK) :]) for line in ended[0][0].splitlines() if line.startswith(MARK)]


def test_every_operation_gives_the_right_result_on_three_workers(tmp_path: Path) -> None:
    first, *said, last = run(tmp_path, 3)
    assert (first["backend"], first["world"], last) == ("gloo", 3, {"finished": True})
    assert [one["op"] for one in said] == [op for op in OPS if op != "p2p" for _ in range(2)] + ["p2p"] * 2
    assert all(one["wrong"] == 0 for one in said)
    assert all(one["seconds"] > 0 for one in said if one["op"] != "p2p")
    for one in said[-2:]:
        assert [[seconds > 0 for seconds in row] for row in one["matrix"]] == [
            [i != j for j in range(3)] for i in range(3)
        ]


def test_a_rank_that_gets_wrong_numbers_is_noticed(tmp_path: Path) -> None:
    said = run(tmp_path, 2, lie=True, ops=["all_reduce", "all_to_all", "broadcast", "p2p"], sizes=[4096])
    assert {one["op"]: one["wrong"] for one in said[1:-1]} == {
        "all_reduce": 1, "all_to_all": 1, "broadcast": 0, "p2p": 1,
    }  # fmt: skip


@pytest.mark.slow
def test_a_training_step_is_timed_on_one_two_and_all_workers(tmp_path: Path) -> None:
    training = {"width": 16, "depth": 2, "batch": 8, "steps": 3}
    said = run(tmp_path, 3, ops=["broadcast"], sizes=[64], training=training)
    assert [(one["training"], one["ok"]) for one in said if "training" in one] == [(1, True), (2, True), (3, True)]
