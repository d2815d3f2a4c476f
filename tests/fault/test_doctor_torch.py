"""Faults that only torch itself shows: wrong sums, a rank that hangs, a torch that does not load."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.fault.examining import bad, examine, expect, placed, wrapper
from tests.hosts import wait_until, workers

pytestmark = [pytest.mark.integration, pytest.mark.torch]

PATCH = """\
import sys
if any("init_process_group" in word for word in sys.orig_argv):
    import torch, torch.distributed as dist, time
    right = dist.all_reduce
    def other(data, *args, **named):
        {body}
    dist.all_reduce = other
"""
"""Only of the process that takes part in the collective: every other start of Python need not load torch."""
WRONG_AFTER = "right(data, *args, **named); data[5] += 1"
WRONG_BEFORE = "data[5] += 1; right(data, *args, **named)"
HANGS = "time.sleep(1000)"
TORCH_ALONE = ("--skip", "links")
"""These faults are torch's; measuring the cables would only take time."""


def with_stub(sandbox: Sandbox, name: str, text: str, **more: Any) -> dict[str, Any]:
    """The spec's changes that let node2's Python find this file before all others."""
    folder = placed(sandbox, "node2", name, text).removesuffix("/" + name)
    # By no variable of the job: without those that may matter the doctor tries again before it blames a machine.
    python = wrapper(sandbox, "node2", f'PYTHONPATH={folder} exec {sys.executable} "$@"')
    nodes = ["node1", {"name": "node2", "python": python}, "node3"]
    return {"cluster.nodes": nodes, "cluster.python": sys.executable, **more}


def test_a_healthy_cluster_adds_up_right_and_nothing_is_left_running(sandbox: Sandbox, project: Any) -> None:
    code, said = examine(project, {"cluster.python": sys.executable}, full=True)
    assert (code, bad(said)) == (0, [])
    assert said["all_reduce"]["backend"] == "gloo"
    assert said["all_reduce"]["busbw_gb_s"] > 0
    assert {"check": "collective", "status": "ok"}.items() <= said["findings"][-1].items()
    wait_until(lambda: not any(workers(node) for node in sandbox.nodes), 20, "nothing is left running")


def test_a_node_that_receives_wrong_sums_is_named(sandbox: Sandbox, project: Any) -> None:
    changes = with_stub(sandbox, "sitecustomize.py", PATCH.format(body=WRONG_AFTER))
    expect(examine(project, changes, *TORCH_ALONE, full=True), "collective", ["node2"], said="wrong sums")


@pytest.mark.slow
def test_a_node_that_sends_wrong_numbers_is_found_by_bisection(sandbox: Sandbox, project: Any) -> None:
    changes = with_stub(sandbox, "sitecustomize.py", PATCH.format(body=WRONG_BEFORE))
    expect(examine(project, changes, *TORCH_ALONE, full=True), "collective", ["node2"], said="by bisection")


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(sandbox: Sandbox, project: Any) -> None:
    changes = with_stub(sandbox, "sitecustomize.py", PATCH.format(body=HANGS))
    result = examine(project, changes, *TORCH_ALONE, full=True)
    expect(result, "collective", ["node2"], peers=["node1", "node3"], said="never finishes")
    assert "then nothing for" in json.dumps(bad(result[1])[0]["evidence"])
    wait_until(lambda: not any(workers(node) for node in sandbox.nodes), 20, "nothing is left running")


def test_a_torch_that_does_not_load_is_named_with_its_own_words(sandbox: Sandbox, project: Any) -> None:
    changes = with_stub(sandbox, "torch/__init__.py", "raise ImportError('libcudart.so.12: cannot open')\n")
    expect(
        examine(project, changes, *TORCH_ALONE, full=True),
        "collective",
        ["node2"],
        said="libcudart.so.12: cannot open",
    )


def test_torch_is_not_asked_where_something_below_it_has_failed(sandbox: Sandbox, project: Any) -> None:
    nodes = ["node1", {"name": "node2", "env": {"NCCL_BUFFSIZE": "8388608"}}, "node3"]
    _, said = examine(project, {"cluster.nodes": nodes, "cluster.python": sys.executable}, full=True)
    assert [one["check"] for one in bad(said)] == ["env-differs"]
    assert said["all_reduce"] is None
