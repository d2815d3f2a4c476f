"""Makes the logs `logs/own-*.log`: real runs of torch with gloo, each with one mistake or fault.

    python tests/unit/doctor/own_runs.py FOLDER [CASE...]

Each case is a worker program; rank 1 of two does something wrong, or all do. The folder gets one file per case, with
the output of every rank behind the prefix `[rankN]: ` or, for cases under torchrun, as torchrun prints it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

HEAD = """
import os, sys, signal, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ.get("RANK", 0))
def init(seconds=5, **more):
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds), **more)
"""

CASES = {
    "user-exception": "init(); dist.barrier()\nif rank == 1: raise ValueError('sample 17 has no label')\n"
    "dist.all_reduce(torch.ones(4))",
    "key-error": "init(); dist.barrier()\nif rank == 1: {}['input_ids']\ndist.all_reduce(torch.ones(4))",
    "late-rank": "init(3); dist.barrier()\nif rank == 1: time.sleep(6)\ndist.all_reduce(torch.ones(4))",
    "wrong-order": "init(3); dist.barrier()\nt = torch.ones(4)\n"
    "dist.all_reduce(t) if rank else dist.all_gather([torch.ones(4), torch.ones(4)], t)\ndist.barrier()",
    "monitored-barrier": "init(3)\nif rank == 1: time.sleep(8)\ndist.monitored_barrier(timeout=timedelta(seconds=2))",
    "different-sizes": "init(3); dist.barrier()\ndist.all_reduce(torch.ones(1000 if rank else 4)); dist.barrier()",
    "init-twice": "init(); init()",
    "unused-parameters": "init()\nclass M(nn.Module):\n def __init__(s):\n  super().__init__(); s.a = nn.Linear(2, 2); "
    "s.b = nn.Linear(2, 2)\n def forward(s, x): return s.a(x)\nm = DDP(M())\n"
    "for _ in range(2): m(torch.ones(1, 2)).sum().backward()",
    "no-gradients": "init()\nm = nn.Linear(2, 2).requires_grad_(False)\nDDP(m)",
    "attribute-of-ddp": "init()\nDDP(nn.Linear(2, 2)).in_features",
    "batchnorm-on-cpu": "init()\nnn.SyncBatchNorm(2)(torch.ones(2, 2))",
    "no-cuda": "torch.cuda.set_device(rank)",
    "no-nccl": "dist.init_process_group('nccl')",
    "old-pipeline": "from torch.distributed.pipeline.sync import Pipe",
    "missing-module": "import flash_attn",
    "weights-only": "class Thing: pass\nfile = f'/tmp/doctor-{rank}.pt'\ntorch.save(Thing(), file)\ntorch.load(file)",
    "wrong-shapes": "nn.Linear(3, 3).load_state_dict(nn.Linear(2, 2).state_dict())",
    "no-space": "open('/dev/full', 'w').write('x' * 100000)",
    "missing-data": "open('/data/imagenet/train.bin')",
    "rank-0-gone": "init()\nif rank == 0: os._exit(3)\ntime.sleep(2)\ndist.new_group([0, 1])",
    "loader-killed": "from torch.utils.data import DataLoader, Dataset\nclass D(Dataset):\n def __len__(s): return 8\n"
    " def __getitem__(s, i): os.kill(os.getpid(), signal.SIGKILL)\nlist(DataLoader(D(), num_workers=1))",
    "open-files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
    "keep = [open('/dev/null') for _ in range(100)]",
    "local-rank-argument": "import argparse; p = argparse.ArgumentParser('train.py'); p.add_argument('--local_rank'); "
    "p.parse_args(['--local-rank=0'])",
}
ENVIRONMENT = {
    "wrong-order-detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "wrong-interface": {"GLOO_SOCKET_IFNAME": "eth9"},
    "no-store": {"MASTER_ADDR": "127.0.0.1"},
}
CASES["wrong-order-detail"] = CASES["wrong-order"]
CASES["wrong-interface"] = "init()"
CASES["no-store"] = "if rank == 1: init(3)"
CASES["one-missing"] = "if rank == 0: init(3)"
CASES["port-taken"] = "if rank == 0: init(3)"
UNDER_TORCHRUN = {
    "torchrun-killed": "init(); dist.barrier()\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(20)",
    "torchrun-segfault": "init(); dist.barrier()\nif rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(20)",
    "torchrun-exception": "init(); dist.barrier()\nif rank == 1: raise ValueError('sample 17 has no label')\n"
    "dist.all_reduce(torch.ones(4))",
    "torchrun-oom-kernel": "init(); dist.barrier()\nif rank == 1: os.kill(os.getpid(), signal.SIGBUS)\ntime.sleep(20)",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_ranks(program: Path, case: str) -> str:
    port = free_port()
    taken = socket.socket()
    if case == "port-taken":
        taken.bind(("0.0.0.0", port))
        taken.listen()
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**base, **ENVIRONMENT.get(case, {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=600)[0] for process in ranks]
    taken.close()
    return "".join(f"[rank{rank}]: {line}\n" for rank, text in enumerate(said) for line in bare(text))


def bare(text: str) -> list[str]:
    """Lines without the prefix that torch puts before tracebacks by itself, so that each has exactly one."""
    return [
        line.partition("]: ")[2] if line.startswith("[rank") and "]: " in line else line for line in text.splitlines()
    ]


def under_torchrun(program: Path) -> str:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    return done.stdout + done.stderr


def main(folder: Path, wanted: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case, body in {**CASES, **UNDER_TORCHRUN}.items():
        if wanted and case not in wanted:
            continue
        program = folder / "train.py"
        program.write_text(HEAD + body + "\n")
        text = under_torchrun(program) if case in UNDER_TORCHRUN else two_ranks(program, case)
        text = text.replace(str(program), "/job/train.py").replace(sys.prefix, "/venv")
        (folder / f"own-{case}.log").write_text(text)
        program.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
