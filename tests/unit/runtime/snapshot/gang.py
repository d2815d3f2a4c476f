"""Workers of one process group, forked from the test: what they run together takes milliseconds to start."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtctl.runtime import Worker


def gang(count: int, folder: Path, action: Callable[[Worker], Any], *, per_node: int = 1) -> list[Any]:
    """Run `action` in `count` processes, each a worker; nodes have `per_node` of them.

    Returns:
        What it returned on each, JSON.
    """
    children = []
    meeting = folder / f"meeting-{os.urandom(4).hex()}"
    for rank in range(count):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # Python 3.12: forks beside threads; these have no locks
            pid = os.fork()
        if pid == 0:
            os.close(reading)
            _child(rank, count, per_node, meeting, action, writing)
        os.close(writing)
        children.append((pid, reading))
    told = []
    for pid, reading in children:
        with os.fdopen(reading, "rb") as stream:
            told.append(stream.read())
        os.waitpid(pid, 0)
    answers = [json.loads(text) if text else {"error": "it died"} for text in told]
    failed = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer.get("error")]
    assert not failed, "\n".join(failed)
    return [answer["value"] for answer in answers]


def _child(rank: int, count: int, per_node: int, meeting: Path, action: Callable[[Worker], Any], writing: int) -> None:
    try:
        worker = Worker(
            rank=rank,
            local_rank=rank % per_node,
            world_size=count,
            local_world_size=per_node,
            node_rank=rank // per_node,
            device=torch.device("cpu"),
            backend="gloo" if count > 1 else None,
        )
        if count > 1:
            store = dist.FileStore(str(meeting), count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=30))
        answer = {"value": action(worker)}
        worker.barrier()
    except BaseException:
        answer = {"error": traceback.format_exc()}
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)
