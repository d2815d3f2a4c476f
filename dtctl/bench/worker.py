"""Program of every worker: the operations over the sizes, each checked and timed. Pushed to the nodes alone.

Its argument is one JSON object: ops, sizes (bytes), repeats, warm_up, seconds, backend, training. Rank 0 prints what
was measured, a line each that begins with MARK.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dtctl.doctor.rounds import arrange_all_pairs
from dtctl.doctor.worker import add_numbers, make_numbers, time_calls

MARK = "DTCTL-BENCH "
WORD = 4
P2P_REPEATS = 5
"""Repeats of a pair; both sides have to call equally often, so the number is fixed."""


def send_bench_message(**facts: Any) -> None:
    """Send facts to the control machine, as a line of output; rank 0 only."""
    if dist.get_rank() == 0:
        sys.stdout.write(MARK + json.dumps(facts) + "\n")
        sys.stdout.flush()


values, summed = functools.partial(make_numbers, torch), functools.partial(add_numbers, torch)


class CollectiveOperation:
    """A collective on buffers of one size: how to call it, and how many elements are wrong afterwards."""

    def __init__(self, op: str, size: int, device: torch.device) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.part = max(1, size // WORD // world)
        self.count = max(1, size // WORD)
        same_size = op in ("all_reduce", "reduce", "broadcast")
        self.size = WORD * (self.count if same_size else self.part * world)
        prepare: dict[str, Callable[[int, int, torch.device], tuple[Callable[[], Any], Callable[[], int]]]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._build_reduce_call,
            "broadcast": self._build_broadcast_call,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "gather": self._build_gather_call,
            "scatter": self._build_scatter_call,
        }
        self.call, self.wrong = prepare[op](rank, world, device)

    def _all_reduce(self, rank: int, world: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], int]]:
        mine = values(rank, self.count, device)
        data = mine.clone()

        def check() -> int:
            data.copy_(mine)
            dist.all_reduce(data)
            return _count_differing_elements(data, summed(world, self.count, device))

        return lambda: dist.all_reduce(data), check

    def _build_reduce_call(
        self, rank: int, world: int, device: torch.device
    ) -> tuple[Callable[[], Any], Callable[[], int]]:
        mine = values(rank, self.count, device)
        data = mine.clone()

        def check() -> int:
            data.copy_(mine)
            dist.reduce(data, 0)
            return _count_differing_elements(data, summed(world, self.count, device)) if rank == 0 else 0

        return lambda: dist.reduce(data, 0), check

    def _build_broadcast_call(
        self, rank: int, _: int, device: torch.device
    ) -> tuple[Callable[[], Any], Callable[[], int]]:
        data = values(rank, self.count, device)

        def check() -> int:
            dist.broadcast(data, 0)
            return _count_differing_elements(data, values(0, self.count, device))

        return lambda: dist.broadcast(data, 0), check

    def _all_gather(self, rank: int, world: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], int]]:
        mine = values(rank, self.part, device)
        received = [torch.zeros(self.part, device=device) for _ in range(world)]

        def check() -> int:
            dist.all_gather(received, mine)
            return sum(
                _count_differing_elements(part, values(other, self.part, device)) for other, part in enumerate(received)
            )

        return lambda: dist.all_gather(received, mine), check

    def _reduce_scatter(
        self, rank: int, world: int, device: torch.device
    ) -> tuple[Callable[[], Any], Callable[[], int]]:
        mine = values(rank, self.part * world, device)
        received = torch.zeros(self.part, device=device)

        def check() -> int:
            dist.reduce_scatter_tensor(received, mine)
            return _count_differing_elements(received, summed(world, self.part, device, shift=rank * self.part))

        return lambda: dist.reduce_scatter_tensor(received, mine), check

    def _all_to_all(self, rank: int, world: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], int]]:
        mine = values(rank, self.part * world, device)
        received = torch.zeros(self.part * world, device=device)

        def check() -> int:
            dist.all_to_all_single(received, mine)
            expected = [values(other, self.part, device, shift=rank * self.part) for other in range(world)]
            return _count_differing_elements(received, torch.cat(expected))

        return lambda: dist.all_to_all_single(received, mine), check

    def _build_gather_call(
        self, rank: int, world: int, device: torch.device
    ) -> tuple[Callable[[], Any], Callable[[], int]]:
        mine = values(rank, self.part, device)
        received = [torch.zeros(self.part, device=device) for _ in range(world)] if rank == 0 else None

        def check() -> int:
            dist.gather(mine, received, 0)
            return sum(
                _count_differing_elements(part, values(other, self.part, device))
                for other, part in enumerate(received or [])
            )

        return lambda: dist.gather(mine, received, 0), check

    def _build_scatter_call(
        self, rank: int, world: int, device: torch.device
    ) -> tuple[Callable[[], Any], Callable[[], int]]:
        parts = [values(other, self.part, device) for other in range(world)] if rank == 0 else None
        received = torch.zeros(self.part, device=device)

        def check() -> int:
            dist.scatter(received, parts, 0)
            return _count_differing_elements(received, values(rank, self.part, device))

        return lambda: dist.scatter(received, parts, 0), check


def _count_differing_elements(actual: torch.Tensor, expected: torch.Tensor) -> int:
    return int((actual != expected).sum())


def reduce_over_ranks(number: float, device: torch.device, reduction: Any = dist.ReduceOp.SUM) -> float:
    """Return one number that is reduced over all ranks."""
    tensor = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, reduction)
    return float(tensor)


def time_together(
    call: Callable[[], Any], device: torch.device, *, repeats: int, warm_up: int, seconds: float
) -> float:
    """Return the seconds that one call takes, on the rank that needs longest.

    Args:
        call: the same collective on all ranks.
        device: where it runs.
        repeats: how often, at most.
        warm_up: calls before the clock starts.
        seconds: about how long it may take altogether; the repeats are lowered to that.
    """
    slowest = functools.partial(reduce_over_ranks, device=device, reduction=dist.ReduceOp.MAX)
    time_calls(torch, list_gpus_to_wait_for(device), call, 1, warm_up=warm_up)
    dist.barrier()
    once = slowest(time_calls(torch, list_gpus_to_wait_for(device), call, 1, warm_up=0))
    repeats = max(1, min(repeats, int(seconds / max(once, 1e-9))))
    dist.barrier()
    return slowest(time_calls(torch, list_gpus_to_wait_for(device), call, repeats, warm_up=0))


def list_gpus_to_wait_for(device: torch.device) -> list[torch.device]:
    """Return the GPUs to wait for."""
    return [device] if device.type == "cuda" else []


def measure_collectives(request: dict[str, Any], device: torch.device) -> None:
    """Measure every operation but p2p, over all sizes."""
    for op in request["ops"]:
        for size in request["sizes"] if op != "p2p" else ():
            operation = CollectiveOperation(op, size, device)
            wrong = int(reduce_over_ranks(operation.wrong(), device))
            limits = {name: request[name] for name in ("repeats", "warm_up", "seconds")}
            seconds = time_together(operation.call, device, **limits)
            send_bench_message(op=op, size=operation.size, seconds=seconds, wrong=wrong)


def measure_point_to_point(request: dict[str, Any], device: torch.device) -> None:
    """Measure from every rank to every other, in rounds of disjoint pairs: no two measurements share a link."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rounds = [
        [(int(sender), int(receiver)) for sender, receiver in pairs]
        for pairs in arrange_all_pairs([str(i) for i in range(world)])
    ]
    for size in request["sizes"]:
        count = max(1, size // WORD)
        took = torch.zeros(world, world, dtype=torch.float64, device=device)
        wrong = 0
        for pairs in rounds:
            for sender, receiver in [
                direction for pair in pairs for direction in (pair, pair[::-1]) if rank in direction
            ]:
                seconds, wrong_values = _measure_direction(
                    sender, receiver, count, min(P2P_REPEATS, request["repeats"]), device
                )
                wrong += wrong_values
                took[sender, receiver] = seconds if rank == sender else 0.0
            dist.barrier()
        dist.all_reduce(took, dist.ReduceOp.MAX)
        send_bench_message(
            op="p2p", size=count * WORD, matrix=took.tolist(), wrong=int(reduce_over_ranks(wrong, device))
        )


def _measure_direction(sender: int, receiver: int, count: int, repeats: int, device: torch.device) -> tuple[float, int]:
    """Return one way of one pair: seconds for one message, a round trip less the empty way back; and wrong elements."""
    mine = dist.get_rank() == sender
    data = values(sender, count, device) if mine else torch.zeros(count, device=device)
    token = torch.zeros(1, device=device)

    def trip(tensor: torch.Tensor) -> None:
        if mine:
            dist.send(tensor, receiver)
            dist.recv(token, receiver)
        else:
            dist.recv(tensor, sender)
            dist.send(token, sender)

    trip(data)
    wrong = 0 if mine else _count_differing_elements(data, values(sender, count, device))
    round_trip_s = _measure_median_seconds(lambda: trip(data), repeats, device)
    empty = _measure_median_seconds(lambda: trip(token), repeats, device)
    return max(round_trip_s - empty / 2, 1e-9), wrong


def _measure_median_seconds(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    took = [time_calls(torch, list_gpus_to_wait_for(device), call, 1, warm_up=0) for _ in range(repeats)]
    return sorted(took)[len(took) // 2]


def measure_training_scaling(request: dict[str, Any], device: torch.device) -> None:
    """A training step of the same work per worker on 1, 2, 4, ... and all workers."""
    world, rank = dist.get_world_size(), dist.get_rank()
    counts = sorted({*(2**i for i in range(world.bit_length()) if 2**i <= world), world})
    for workers in counts:
        group = dist.new_group(list(range(workers)))
        if rank < workers:
            step_s, identical = _measure_training_step(request, device, group)
        else:
            step_s, identical = 0.0, True
        slowest = reduce_over_ranks(step_s, device, dist.ReduceOp.MAX)
        different = reduce_over_ranks(0.0 if identical else 1.0, device)
        send_bench_message(training=workers, step_s=slowest, ok=different == 0)


def _measure_training_step(request: dict[str, Any], device: torch.device, group: Any) -> tuple[float, bool]:
    """Return the seconds of one step (median), and whether all workers have the same weights afterwards."""
    torch.manual_seed(0)
    width, depth, batch = request["training"]["width"], request["training"]["depth"], request["training"]["batch"]
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    bare = torch.nn.Sequential(*layers).to(device)
    ids = [device.index] if device.type == "cuda" else None
    model = torch.nn.parallel.DistributedDataParallel(bare, process_group=group, device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    data = torch.randn(batch, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    took = []
    for _ in range(2 + request["training"]["steps"]):
        dist.barrier(group)
        took.append(time_calls(torch, list_gpus_to_wait_for(device), step, 1, warm_up=0))
    first = next(bare.parameters()).detach().sum().double().reshape(1)
    low, high = first.clone(), first.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group)
    rest = sorted(took[2:])
    return rest[len(rest) // 2], bool(low == high)


def main() -> None:
    """Run the measurements that the argument requests."""
    request = json.loads(sys.argv[1])
    backend = request["backend"]
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if backend == "auto":
        backend = "nccl" if torch.cuda.device_count() > local else "gloo"
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
        dist.init_process_group(backend, device_id=device)
    else:
        dist.init_process_group(backend)
    send_bench_message(backend=backend, world=dist.get_world_size(), torch=str(torch.__version__))
    measure_collectives(request, device)
    if "p2p" in request["ops"] and dist.get_world_size() > 1:
        measure_point_to_point(request, device)
    if request["training"]:
        measure_training_scaling(request, device)
    send_bench_message(finished=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
