"""Ctrl-C during an examination."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox
from tests.fault.examining import examine
from tests.hosts import wait_until, workers

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("words", ["testing every pair", "round 2 of 3", "adding up"])
def test_it_says_so_and_leaves_no_worker(sandbox: Sandbox, project: Any, words: str) -> None:
    examine(project, None, "--quick")  # writes the spec
    process = project.start("doctor", "--json")
    for line in process.stderr:
        if words in line:
            break
    process.send_signal(signal.SIGINT)
    done = project.finish(process)
    assert done.code == 130
    assert "stopped before the examination was complete" in done.err
    assert done.out == ""
    current = control.find_running_sandbox(sandbox.name)
    assert current is not None
    wait_until(lambda: not any(workers(node) for node in current.nodes), what="the probes and workers have ended")
