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

COUNT = 1 << 18
PERIOD = 251


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
    device = torch.device("cuda", 0) if asked["backend"] == "nccl" else torch.device("cpu")
    dist.init_process_group(asked["backend"], store=store, rank=rank, world_size=world, timeout=limit)
    dist.barrier()
    say(stage="group")
    places = torch.arange(COUNT, device=device) % PERIOD
    data = (places + rank % 16).to(torch.float32)
    dist.all_reduce(data)
    wrong = int((data != (places * world + sum(other % 16 for other in range(world)))).sum())
    say(stage="sum", wrong=wrong)
    begun = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(data)
    seconds = (time.perf_counter() - begun) / 3
    dist.barrier()
    say(stage="done", bytes=COUNT * 4, seconds=seconds, final=True)


if __name__ == "__main__":
    main()
