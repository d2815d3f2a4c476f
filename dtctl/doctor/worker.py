"""Program that a node's Python runs for the doctor: torch, and one collective after another, by requests in JSON lines.

Sent as text, never imported by the control plane; the workers of `dtctl bench` use its sums and its clock. Each line of
input requests one round: rank, world, address, port, backend, timeout_s, and `gpu`, if each GPU of a node has a process
of its own; or, with `what: gpus`, figures of this node's GPUs. The answers name the stage that was reached; the last of
a round has `final`.
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
    hidden = json.loads(sys.argv[1]) if len(sys.argv) > 1 else []
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    used = [name for name in hidden if name in sys.modules]
    say(stage="torch", nccl=loaded, devices=devices, uses=used, final=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(stage="start", wrong=0, error="", silent=False)
            if asked.get("what") == "gpus":
                measure_gpus(say, torch)
            else:
                all_reduce(asked, say, torch, dist)
        except Exception as exc:  # noqa: BLE001 - whatever torch raises is the answer
            say(error=str(exc).strip().split("\n")[0][:400] or type(exc).__name__, final=True)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def all_reduce(asked: dict[str, Any], say: Any, torch: Any, dist: Any) -> None:
    """Join the others, add up numbers with an exact sum, and report how many are wrong and how long it took."""
    rank, world = asked["rank"], asked["world"]
    limit = timedelta(seconds=asked["timeout_s"])
    store = dist.TCPStore(asked["address"], asked["port"], world, rank == 0, limit)
    say(stage="store")
    backend, on_gpu = asked["backend"], asked["backend"] == "nccl"
    device = torch.device("cuda", asked.get("gpu", 0)) if on_gpu else torch.device("cpu")
    bad = 0
    if on_gpu:
        if "gpu" not in asked:
            bad = wrong_gpus(torch)
            say(wrong=bad)
        # Without both, barrier() takes the GPU of the rank's number, and the next sum waits on another.
        torch.cuda.set_device(device)
    bound = {"device_id": device} if on_gpu else {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, **bound)
    dist.barrier()
    say(stage="group")
    count = COUNT[backend]
    data = make_numbers(torch, rank, count, device)
    dist.all_reduce(data)
    wrong = int((data != add_numbers(torch, world, count, device)).sum())
    say(stage="sum", wrong=wrong + bad)
    data.fill_(1.0)
    gpus = [device] if on_gpu else []
    seconds = time_calls(torch, gpus, lambda: dist.all_reduce(data), TIMED, warm_up=WARM_UP[backend])
    dist.barrier()
    say(stage="done", bytes=count * 4, seconds=seconds, final=True)


def make_numbers(torch: Any, rank: int, count: int, device: Any, shift: int = 0) -> Any:
    """Return what a rank adds: small whole numbers, different on every rank and at every place."""
    return ((torch.arange(count, device=device) + shift) % PERIOD + rank % 16).to(torch.float32)


def add_numbers(torch: Any, world: int, count: int, device: Any, shift: int = 0) -> Any:
    """Return the sum of these over all ranks, which float32 holds exactly on any number of workers that there is."""
    places = (torch.arange(count, device=device) + shift) % PERIOD
    return (places * world + sum(rank % 16 for rank in range(world))).to(torch.float32)


def wrong_gpus(torch: Any) -> int:
    """Return how many of this node's GPUs cannot add up numbers by themselves, where only the first takes part."""
    count = COUNT["gloo"]
    right = sum(place % PERIOD for place in range(count))
    sums = [
        int((torch.arange(count, device=f"cuda:{index}") % PERIOD).sum()) for index in range(torch.cuda.device_count())
    ]
    return sum(total != right for total in sums)


WIDTH = 8192
"""Width of the matrices that are multiplied: large enough for the most that a GPU can do."""
COPIED = 256 << 20
"""Bytes of a copy."""


def measure_gpus(say: Any, torch: Any) -> None:
    """Measure each GPU by itself, then a sum over all of them, timed on the GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        say(stage="none", error=no_gpu(torch), final=True)
        return
    found = []
    for index in range(count):
        say(stage=f"GPU {index}")
        one: dict[str, Any] = {"name": str(torch.cuda.get_device_name(index)), "error": ""}
        try:
            one.update(figures(torch, index))
        except RuntimeError as exc:
            one["error"] = str(exc).strip().split("\n")[0][:200]
        found.append(one)
        torch.cuda.empty_cache()
    say(stage="NCCL", gpus=found)
    if count > 1 and not any(one["error"] for one in found):
        say(busbw_gb_s=sum_of_node(torch, count))
    say(stage="measured", final=True)


def no_gpu(torch: Any) -> str:
    """Return why torch sees none, in its own words."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as exc:
        return str(exc).strip().split("\n")[0][:400]
    return "torch sees no GPU"


def figures(torch: Any, index: int) -> dict[str, float]:
    """Products in 1e12 operations a second, and copies in GB/s: from the host, to it, and within the GPU."""
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    # Before 2020 tensor cores took fp16 alone; HIP counts its GPUs otherwise, and all of them take bf16.
    half = torch.bfloat16 if torch.version.hip or torch.cuda.get_device_capability(index)[0] >= 8 else torch.float16
    one = torch.randn(WIDTH, WIDTH, device=device, dtype=half)
    product_s = time_calls(torch, [device], lambda: one @ one, 20)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    here = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    to_s = time_calls(torch, [device], lambda: there.copy_(here, non_blocking=True), 5)
    from_s = time_calls(torch, [device], lambda: here.copy_(there, non_blocking=True), 5)
    within_s = time_calls(torch, [device], lambda: there.clone(), 10)  # noqa: PLW0108 - made and dropped each time
    return {
        "tflops": 2 * WIDTH**3 / product_s / 1e12,
        "to_gb_s": COPIED / to_s / 1e9,
        "from_gb_s": COPIED / from_s / 1e9,
        "within_gb_s": 2 * COPIED / within_s / 1e9,
    }


def sum_of_node(torch: Any, count: int) -> float:
    """Bus bandwidth in GB/s, as nccl-tests defines it, of an all_reduce over the GPUs of this node."""
    data = [torch.ones(COUNT["nccl"], device=torch.device("cuda", index)) for index in range(count)]

    def add_up() -> None:
        torch.cuda.nccl.all_reduce(data)

    seconds = time_calls(torch, range(count), add_up, 5)
    return COUNT["nccl"] * 4 / seconds / 1e9 * 2 * (count - 1) / count


def time_calls(torch: Any, gpus: Any, action: Any, times: int, *, warm_up: int = 3) -> float:
    """Return the seconds of one call, after some that do not count.

    Args:
        torch: the module.
        gpus: those that the call uses; what a call takes without waiting for them is the time to ask for it.
        action: is called.
        times: how often it is timed.
        warm_up: how often it is called before.
    """

    def wait() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    for _ in range(warm_up):
        action()
    wait()
    begun = time.perf_counter()
    for _ in range(times):
        action()
    wait()
    return (time.perf_counter() - begun) / times


if __name__ == "__main__":
    main()
