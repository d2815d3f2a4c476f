"""A session with a real supervisor on this machine, up to the start."""

from __future__ import annotations

import queue
import sys
from pathlib import Path

import pytest

from dtctl.launch.control.session import NodeMessage, NodeSession, NodeSetup, SessionFailed
from dtctl.supervisor.messages.setup import EndOrphanedRun, NodeReady, Prepare
from dtctl.transport.base import Target
from dtctl.transport.local import LocalTransport


@pytest.mark.parametrize("shared", [False, True], ids=["own folder", "shared folder"])
def test_a_node_whose_code_is_there_is_swept_before_it_is_prepared_again(tmp_path: Path, shared: bool) -> None:
    code, workdir = tmp_path / "code", tmp_path / "node"
    code.mkdir()
    (code / "train.py").touch()
    inbox: queue.Queue[NodeMessage] = queue.Queue()

    def prepare(cwd: str) -> Prepare:
        return Prepare(
            run="a", fresh=False, cwd=cwd, pushed=False, shared=shared, files=["train.py"], programs=[sys.executable]
        )

    for _ in range(2):  # the second time the run's folder is there
        sweep = EndOrphanedRun(run="a", token="0123456789abcdef", grace_s=0.0)
        setup = NodeSetup(
            python=sys.executable, workdir=str(workdir), ports=(), push=None, prepare=prepare, code=str(code),
            sweep=sweep,
        )  # fmt: skip
        session = NodeSession(Target(name="here", address="127.0.0.1"), LocalTransport(), setup, inbox)
        session.start()
        while not isinstance(content := inbox.get(timeout=600).content, NodeReady):
            assert not isinstance(content, SessionFailed), content
        session.close()
    top = workdir / "runs" / "a" / "work"
    assert (top / "train.py").is_file()
    assert (top.resolve() == code.resolve()) is shared
