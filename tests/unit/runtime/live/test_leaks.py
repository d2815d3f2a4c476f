"""A group that is left and made anew, again and again, leaves no thread and no socket behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.torch

EPOCHS = 7
SCRIPT = """\
import gc, json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from dtctl.runtime.live import recovery, sockets
from dtctl.runtime.live.control import SupervisorLink
from dtctl.supervisor.replacement_pipes import ReplacementPipes

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
known = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, is_master=False)
pipes = ReplacementPipes(str(folder / f"pipes-{rank}"), [rank])
control = SupervisorLink(folder / f"pipes-{rank}", rank, 2, epoch=0)
sizes = []
for epoch in range(1, EPOCHS + 1):
    recovery.destroy_broken_group()
    control.joining(epoch)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        known.set(f"port-{epoch}", str(store.port))
    else:
        store = TCPStore("127.0.0.1", int(known.get(f"port-{epoch}")), 2, is_master=False)
    dist.init_process_group("gloo", store=PrefixStore(f"epoch-{epoch}", store), rank=rank, world_size=2)
    control.is_joined()
    dist.all_reduce(torch.ones(1))
    gc.collect()
    sizes.append([len(os.listdir("/proc/self/task")), len(sockets.list_open_sockets())])
    dist.barrier()  # nobody is cut off in the midst of its sum
    sockets.shut_down(control._group)
(folder / f"sizes-{rank}").write_text(json.dumps(sizes))
known.set(f"done-{rank}", "1")
known.get(f"done-{1 - rank}")
""".replace("EPOCHS", str(EPOCHS))


def test_threads_and_sockets_do_not_grow_from_healing_to_healing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = forked.launch([script, tmp_path], 2, cwd=tmp_path)
    assert ended.code == 0, ended.output
    for rank in range(2):
        sizes = json.loads((tmp_path / f"sizes-{rank}").read_text())
        assert len(sizes) == EPOCHS
        threads, sockets = zip(*sizes, strict=True)
        # One that is ended at the moment of counting may still be there.
        assert max(threads[2:]) <= min(threads[1:]) + 2, sizes
        assert max(sockets[2:]) <= min(sockets[1:]) + 2, sizes
