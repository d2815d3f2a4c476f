"""A worker that waits in a process group of its program hears of a lost peer, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.torch

SCRIPT = """\
import os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from dtctl.runtime.live.control import SupervisorLink
from dtctl.supervisor.replacement_pipes import ReplacementPipes
from dtctl.supervisor.messages.attempt import Heal

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
pipes = ReplacementPipes(str(folder / f"pipes-{rank}"), [rank])
control = SupervisorLink(folder / f"pipes-{rank}", rank, 2, epoch=0)
control.joining()
dist.init_process_group("gloo")
control.is_joined()
assert not control.has_own_groups()
with control.making_groups():
    dist.new_group()
assert not control.has_own_groups()
own = dist.new_group(timeout=timedelta(seconds=60))
dist.all_reduce(torch.ones(1), group=own)
assert control.has_own_groups()
if rank == 1:
    while not (folder / "ended").exists():  # a peer that does not come
        time.sleep(0.02)
else:
    threading.Timer(0.2, lambda: pipes.heal(Heal(epoch=1, lost=[1], host=1))).start()
    try:
        dist.all_reduce(torch.ones(1), group=own)
    except RuntimeError as exc:
        (folder / "ended").write_text(str(exc))
os._exit(0)
"""


def test_who_waits_in_a_group_of_the_program_is_freed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = forked.launch([script, tmp_path], 2, cwd=tmp_path)
    assert (tmp_path / "ended").exists(), ended.output
    assert "Timed out" not in (tmp_path / "ended").read_text()
