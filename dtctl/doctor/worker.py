"""What a node's Python runs for the doctor: torch, and one collective after another, as asked in JSON lines.

Sent as text, never imported by the control plane. Each line of input asks for one round: rank, world, address, port,
backend, timeout_s. The answers name the stage that was reached; the last of a round has `final`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

COUNT = {"gloo": 1 << 18, "nccl": 1 << 26}
"""Numbers of 4 bytes: enough for the bandwidth of the network to show and not the latency, which differs by backend."""
PERIOD = 251
WARM_UP = {"gloo": 0, "nccl": 5}
"""Sums before those that are timed: NCCL opens its connections in the first ones."""
TIMED = 3


def main() -> None:
    """Load torch, then answer until there are no more questions."""
    # What NCCL and others print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**facts: Any) -> None:
        answers.write(json.dumps(facts) + "\n")

    import torch
    import torch.distributed as dist

    versions: Any = torch.cuda.nccl
    loaded = ".".join(map(str, versions.version())) if torch.cuda.is_available() else ""
    say(stage="torch", nccl=loaded, final=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(stage="start", wrong=0, error="", silent=False)
            all_reduce(asked, say, torch, dist)
        except Exception as exc:  # noqa: BLE001 - whatever torch raises is the answer
            say(error=str(exc).strip().split("\n")[0][:400] or type(exc).__name__, final=True)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def all_reduce(asked: dict[str, Any], say: Any, torch: Any, dist: Any) -> None:
    """Meet the others, add up numbers that come out exact, and tell how many are wrong and how long it took."""
    rank, world = asked["rank"], asked["world"]
    limit = timedelta(seconds=asked["timeout_s"])
    store = dist.TCPStore(asked["address"], asked["port"], world, rank == 0, limit)
    say(stage="store")
    backend, on_gpu = asked["backend"], asked["backend"] == "nccl"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    bad = 0
    if on_gpu:
        bad = wrong_gpus(torch)
        say(wrong=bad)
        # Without both, barrier() takes the GPU of the rank's number, and the next sum waits on another.
        torch.cuda.set_device(device)
    bound = {"device_id": device} if on_gpu else {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, **bound)
    dist.barrier()
    say(stage="group")
    count = COUNT[backend]
    places = torch.arange(count, device=device) % PERIOD
    data = (places + rank % 16).to(torch.float32)
    dist.all_reduce(data)
    wrong = int((data != (places * world + sum(other % 16 for other in range(world)))).sum())
    say(stage="sum", wrong=wrong + bad)
    for _ in range(WARM_UP[backend]):
        dist.all_reduce(data.fill_(1.0))
    if on_gpu:
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(TIMED):
        dist.all_reduce(data)
    if on_gpu:  # what was measured until here is how long it takes to ask for sums
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begun) / TIMED
    dist.barrier()
    say(stage="done", bytes=count * 4, seconds=seconds, final=True)


def wrong_gpus(torch: Any) -> int:
    """How many of this node's GPUs cannot add up numbers by themselves; only the first takes part in the exchange."""
    count = COUNT["gloo"]
    right = sum(place % PERIOD for place in range(count))
    sums = [
        int((torch.arange(count, device=f"cuda:{index}") % PERIOD).sum()) for index in range(torch.cuda.device_count())
    ]
    return sum(found != right for found in sums)


if __name__ == "__main__":
    main()
