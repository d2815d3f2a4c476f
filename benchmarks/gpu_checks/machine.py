"""The GPU itself, the tools that tell of it, which of them a worker takes, and how fast it computes and copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu_checks.ground import ROOT, Ground, Point, judged, shown, skipped
from dtctl import node_facts
from dtctl.doctor.checks import hardware
from dtctl.doctor.checks.known_gpus import find_gpu_datasheet
from dtctl.doctor.node_report import NodeReport
from dtctl.runtime.distributed import affinity
from dtctl.runtime.telemetry.hardware import find_peak_flops
from dtctl.supervisor.probe import devices

FREE_GIB = 30
PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining"),
    *("dtctl.runtime.loop", "dtctl.runtime.main", "dtctl.runtime.strategies.pipeline"),
)
"""What a node's process imports before it forks workers, and more."""
IDENTIFY = (
    "import json, os\n"
    "from dtctl.errors import PlanError\n"
    "from dtctl.runtime.distributed.worker import resolve_worker_from_env\n"
    "try:\n    print(resolve_worker_from_env(os.environ).device)\n"
    "except PlanError as exc:\n    print('PlanError')\n"
)


def tools(on: Ground) -> Iterator[Point]:
    """Versions, and what nvidia-smi and the kernel say, as the doctor reads them."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    yield shown("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value))
    count = torch.cuda.device_count()
    counted = node_facts.count_gpus(os.environ)
    yield judged("GPUs that dtctl counts", f"{count}, as torch does", counted, ok=counted == count)
    facts = devices.gather_device_facts()
    if not on.gpu:
        silent = not facts["gpu"] and not facts["gpu_error"]
        yield judged("without a GPU no tool is asked", "nothing", facts["gpu_error"] or "nothing", ok=silent)
        yield skipped("free memory, rows of nvidia-smi, ECC, topology, kernel log")
        return
    free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(on.device))
    yield judged("free memory, GiB", f"above {FREE_GIB}", f"{free:.1f}", ok=free > FREE_GIB)
    rows = hardware.parse_gpu_rows(facts["gpu"])
    named = facts["gpu_error"] or "; ".join(", ".join(row.values()) for row in rows)
    yield judged("rows of nvidia-smi", f"{count} or more, without an error", named, ok=len(rows) >= count > 0)
    figures = [row.get(name, "") for row in rows for name in ("used", "total", "ecc")]
    read = all(word.isdigit() or word in ("[N/A]", "[Not Supported]", "") for word in figures)
    yield judged("figures of the rows", "digits or N/A", " ".join(figures), ok=read)
    yield shown("remapped rows", facts["remapped"].replace("\n", "; ") or "none told")
    yield shown("topology", hardware.parse_gpu_topology(facts["topology"]) or "none told")
    yield shown("fabric", facts["fabric"].replace("\n", "; ") or "none told")
    yield shown("kernel messages are read by", facts["xid_source"] or "nobody: not permitted")
    report = NodeReport(name="this node", address="", facts={**facts, "interfaces": [], "ways": {}})
    found = [one for one in hardware.check_hardware([report], {}) if one.status == "fail"]
    said = "; ".join(f"{one.check}: {one.summary} {' '.join(one.evidence)}" for one in found)
    yield judged("failures that the doctor finds in this", "none", said or "none", ok=not found)
    name = torch.cuda.get_device_name(on.device)
    yield judged(
        "its peak is known", "yes", f"{name}: {find_peak_flops(name, 'bf16')}", ok=bool(find_peak_flops(name, "bf16"))
    )
    known = find_gpu_datasheet(name) or {"memory": 0.0}
    off = abs(total / known["memory"] - 1) if known["memory"] else 1.0
    yield judged("memory, GiB", f"within 3% of {known['memory']:g}, as advise has it", f"{total:.1f}", ok=off < 0.03)


def identities(on: Ground) -> Iterator[Point]:
    """The device that a worker takes, by its variables; each in a process that has not started CUDA."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    shared = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    beyond = str(max(1, torch.cuda.device_count()))
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # One GPU that is shown to this process alone looks like that of a worker which was given one of its own.
    outside = "cuda:0" if given and "," not in given else "PlanError"
    cases = {
        "rank 0 of 1": (ranks, "cuda:0"),
        "a local rank beyond the last GPU": (
            {"RANK": beyond, "LOCAL_RANK": beyond, "WORLD_SIZE": str(int(beyond) + 1)},
            outside,
        ),
        "GPUs hidden by CUDA_VISIBLE_DEVICES=''": ({**ranks, "CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        "one GPU shown to local rank 3 of 4": ({**shared, "CUDA_VISIBLE_DEVICES": "0"}, "cuda:0"),
    }
    running = {}
    for name, (variables, _) in cases.items():
        environ = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
        running[name] = subprocess.Popen(
            [sys.executable, "-c", IDENTIFY], env=environ, cwd=on.folder, stdout=subprocess.PIPE, text=True
        )
    for name, process in running.items():
        found = process.communicate()[0].strip()
        expected = cases[name][1] if on.gpu else "cpu"
        yield judged(name, expected, found, ok=found == expected)
    near = affinity.find_cores_near_gpu(on.device) if on.gpu else affinity.parse_core_list("0-1")
    before, kept = os.sched_getaffinity(0), affinity.bind_process_to_cores(near)
    os.sched_setaffinity(0, before)
    figure = f"{len(near)} cores near it, {len(kept)} of {len(before)} kept"
    if on.gpu and not near:
        yield shown("bind_cores", "the system does not say which cores are near")
    else:
        yield judged("bind_cores", "none but cores near the GPU", figure, ok=kept <= near or not near & before)


def speed(on: Ground) -> Iterator[Point]:
    """Matrix products beside the data sheet, and copies within the GPU and to the host."""
    width = 8192 if on.gpu else 128
    name = torch.cuda.get_device_name(on.device) if on.gpu else ""
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        one = torch.randn(width, width, device=on.device, dtype=dtype)
        took_s = _timed(on, lambda: one @ one, 20 if on.gpu else 2)  # noqa: B023 - called at once
        per_s = 2 * width**3 / took_s
        peak = find_peak_flops(name, precision)
        if not on.gpu or peak is None:
            yield skipped(f"{precision} products beside the peak", "needs a GPU whose peak is known")
            continue
        share = per_s / peak
        figure = f"{per_s / 1e12:.0f} TFLOPS, {share:.0%}"
        yield judged(f"{precision} products of {width}", "65% to 102% of the peak", figure, ok=0.65 <= share <= 1.02)
    size_bytes = (1 << 30) if on.gpu else (1 << 20)
    here = torch.empty(size_bytes, dtype=torch.uint8, device=on.device)
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=on.gpu)
    for what, action in {
        "copy within the device": here.clone,
        "device to pinned host": lambda: host.copy_(here, non_blocking=True),
        "pinned host to device": lambda: here.copy_(host, non_blocking=True),
    }.items():
        took_s = _timed(on, action, 5)
        ok = bool(torch.equal(here[:4096].cpu(), host[:4096])) if "host" in what else True
        figure = f"{size_bytes / took_s / 1e9:.1f} GB/s"
        yield shown(what, figure) if ok else judged(what, "the same bytes", "other bytes", ok=False)
    yield _convolutions(on)


def _convolutions(on: Ground) -> Point:
    """What `channels_last` and `cudnn_benchmark` give a convolution network in bf16."""
    channels, side, count = (256, 56, 32) if on.gpu else (4, 8, 2)
    told, kept = [], torch.backends.cudnn.benchmark
    try:
        for form, measured in ((None, False), (torch.channels_last, False), (torch.channels_last, True)):
            torch.backends.cudnn.benchmark = measured
            layers = [torch.nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4)]
            model = torch.nn.Sequential(*layers).to(on.device)
            images = torch.randn(count, channels, side, side, device=on.device)
            if form is not None:
                model = model.to(memory_format=form)  # type: ignore[call-overload]

            def step(model: torch.nn.Module = model, images: torch.Tensor = images) -> None:
                with torch.autocast(on.device.type, dtype=torch.bfloat16):
                    loss = model(images).float().square().mean()
                loss.backward()
                model.zero_grad()

            name = "cudnn_benchmark" if measured else "channels_last" if form is not None else "plain"
            told.append(f"{name} {count / _timed(on, step, 10 if on.gpu else 1):,.0f} images/s")
    finally:
        torch.backends.cudnn.benchmark = kept
    return shown("convolutions in bf16", ", then ".join(told))


def _timed(on: Ground, action: object, times: int) -> float:
    """Seconds of one call, after three that do not count."""
    assert callable(action)
    for _ in range(3):
        action()
    on.sync()
    begun = time.perf_counter()
    for _ in range(times):
        action()
    on.sync()
    return (time.perf_counter() - begun) / times


def warm_start(on: Ground) -> Iterator[Point]:
    """Workers forked from a process that has imported everything: they can use the GPU, and are not forked if not."""
    text = (
        "import json, os, sys\n"
        "import torch\n"
        "from dtctl.supervisor import fork_server_main\n"
        "if sys.argv[2] == 'asked':\n"
        "    torch.cuda.is_available()\n"
        "why = fork_server_main.load(sys.argv[3:])\n"
        "code = -1\n"
        "if not why:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        one = torch.ones(64, 64, device=sys.argv[1])\n"
        "        os._exit(0 if float((one @ one).sum()) == 64**3 else 1)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "print(json.dumps([why, code]))\n"
    )
    script = Path(on.folder, "warm.py")
    script.write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = {}
    for how in ("plain", "asked"):
        done = subprocess.run(
            [sys.executable, str(script), on.device.type, how, *PRELOADED], env=environ, cwd=on.folder,
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        found[how] = json.loads(done.stdout.strip().splitlines()[-1]) if not done.returncode else [done.stderr, -1]
    why, code = found["plain"]
    yield judged("a product in a forked worker", "exit code 0", why or f"exit code {code}", ok=not why and code == 0)
    why, code = found["asked"]
    if not on.gpu:
        yield skipped("a parent that has started CUDA is not forked")
        return
    # Asking may go by NVML, which poisons no fork; what counts is that no worker is forked that cannot compute.
    fine = bool(why) or code == 0
    yield judged(
        "after is_available() in the parent", "refused, or the child computes", why or f"exit code {code}", ok=fine
    )
