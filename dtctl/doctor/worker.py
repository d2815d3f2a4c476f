"""Program that a node's Python runs for the doctor: torch, and one collective after another, by requests in JSON lines.

The program is sent as text, and the control machine never imports it; the workers of `dtctl bench` use its sums and its
clock. Each line of input requests one round: rank, world, address, port, backend, timeout_s, and `gpu`, if each GPU of
a node has a process of its own; or, with `what: gpus`, figures of this node's GPUs. The answers name the stage that was
reached; the last one of a round has `final`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

COUNT = {"gloo": 1 << 18, "nccl": 1 << 26}
"""Number of 4-byte elements, large enough to show the bandwidth of the network and not the latency; by backend."""
PERIOD = 251
WARM_UP = {"gloo": 0, "nccl": 5}
"""Number of sums before the measurement: NCCL opens its connections during the first ones."""
TIMED = 3


def main() -> None:
    """Load torch, then answer requests until the input ends."""
    # The output of NCCL and other libraries must not mix with the answers.
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
                run_all_reduce(asked, say, torch, dist)
        except Exception as exc:  # noqa: BLE001 - any error of torch is the answer
            say(error=str(exc).strip().split("\n")[0][:400] or type(exc).__name__, final=True)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def run_all_reduce(asked: dict[str, Any], say: Any, torch: Any, dist: Any) -> None:
    """Join the process group, run an exact all_reduce, and report the number of wrong elements and the duration."""
    rank, world = asked["rank"], asked["world"]
    limit = timedelta(seconds=asked["timeout_s"])
    store = dist.TCPStore(asked["address"], asked["port"], world, rank == 0, limit)
    say(stage="store")
    backend, on_gpu = asked["backend"], asked["backend"] == "nccl"
    device = torch.device("cuda", asked.get("gpu", 0)) if on_gpu else torch.device("cpu")
    bad = 0
    if on_gpu:
        if "gpu" not in asked:
            bad = count_wrong_gpus(torch)
            say(wrong=bad)
        # Without both, barrier() uses the GPU with the number of the rank, and the next all_reduce waits on another
        # one.
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
    """Return the elements of a rank: small integers that differ between ranks and positions."""
    return ((torch.arange(count, device=device) + shift) % PERIOD + rank % 16).to(torch.float32)


def add_numbers(torch: Any, world: int, count: int, device: Any, shift: int = 0) -> Any:
    """Return the sum of `make_numbers` over all ranks, which float32 represents exactly for any number of workers."""
    places = (torch.arange(count, device=device) + shift) % PERIOD
    return (places * world + sum(rank % 16 for rank in range(world))).to(torch.float32)


def count_wrong_gpus(torch: Any) -> int:
    """Return the number of this node's GPUs that compute wrong sums, if only the first takes part."""
    count = COUNT["gloo"]
    right = sum(place % PERIOD for place in range(count))
    sums = [
        int((torch.arange(count, device=f"cuda:{index}") % PERIOD).sum()) for index in range(torch.cuda.device_count())
    ]
    return sum(total != right for total in sums)


WIDTH = 8192
"""Width of the multiplied matrices, large enough to reach the peak rate of a GPU."""
COPIED = 256 << 20
"""Size of a copy in bytes."""


def measure_gpus(say: Any, torch: Any) -> None:
    """Measure each GPU by itself, then an all_reduce over all of them, timed on the GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        say(stage="none", error=explain_missing_gpu(torch), final=True)
        return
    found = []
    for index in range(count):
        say(stage=f"GPU {index}")
        one: dict[str, Any] = {"name": str(torch.cuda.get_device_name(index)), "error": ""}
        try:
            one.update(measure_gpu_figures(torch, index))
        except RuntimeError as exc:
            one["error"] = str(exc).strip().split("\n")[0][:200]
        found.append(one)
        torch.cuda.empty_cache()
    say(stage="NCCL", gpus=found)
    if count > 1 and not any(one["error"] for one in found):
        say(busbw_gb_s=sum_of_node(torch, count))
    say(stage="measured", final=True)


def explain_missing_gpu(torch: Any) -> str:
    """Return the reason why torch sees no GPU, in torch's words."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as exc:
        return str(exc).strip().split("\n")[0][:400]
    return "torch sees no GPU"


def measure_gpu_figures(torch: Any, index: int) -> dict[str, float]:
    """Return rates of products in 1e12 operations/s, and of copies from, to and within the GPU in GB/s."""
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    # Before 2020 tensor cores had only fp16. HIP numbers its GPUs differently, and all of them support bf16.
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
    """Return the bus bandwidth in GB/s, by the definition of nccl-tests, of an all_reduce over this node's GPUs."""
    data = [torch.ones(COUNT["nccl"], device=torch.device("cuda", index)) for index in range(count)]

    def add_up() -> None:
        torch.cuda.nccl.all_reduce(data)

    seconds = time_calls(torch, range(count), add_up, 5)
    return COUNT["nccl"] * 4 / seconds / 1e9 * 2 * (count - 1) / count


def time_calls(torch: Any, gpus: Any, action: Any, times: int, *, warm_up: int = 3) -> float:
    """Return the mean duration of a call in seconds, without the first calls.

    Args:
        torch: the module.
        gpus: GPUs that the call uses; without waiting for them, only the launch of the call would be timed.
        action: function that is timed.
        times: number of timed calls.
        warm_up: number of calls before the measurement.
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
