"""`dtctl bench` over virtual hosts."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from dtctl.bench.figures import OPS
from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox

SPEC = """\
cluster: {{transport: sandbox, nodes: 3, slots: 1, python: {python}}}
job: {{name: t, script: train.py, kind: {kind}}}
"""


@pytest.mark.slow
def test_all_operations_over_the_nodes_of_a_spec(sandbox: Sandbox, project: Any) -> None:
    project.write("dtctl.yaml", SPEC.format(kind="direct", python=sys.executable))
    options = ["--sizes", "64K:256K", "--repeats", "3", "--training", "--plot", "bench.svg"]
    done = project.run("bench", "--json", *options)
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (said["ok"], said["backend"], said["world_size"]) == (True, "gloo", 3)
    assert said["ranks"] == ["node1", "node2", "node3"]
    assert {row["op"] for row in said["results"]} == set(OPS)
    assert all(row["wrong"] == 0 and row["busbw_gb_s"] > 0 for row in said["results"])
    assert len(said["pairs"]["gb_s"]) == 3
    assert [row["workers"] for row in said["training"]] == [1, 2, 3]
    assert "<svg" in (project.folder / "bench.svg").read_text()
    assert not (project.folder / ".dtctl" / "runs").exists(), "a benchmark is no run of the user's"


@pytest.mark.slow
def test_the_map_of_pairs_shows_the_slow_cable(sandbox: Sandbox, project: Any) -> None:
    faults.limit_bandwidth(sandbox, sandbox.node("node2"), rate="100mbit")
    faults.write_recorded_faults(sandbox, ["limit node2"])
    project.write("dtctl.yaml", SPEC.format(kind="torchrun", python=sys.executable))
    done = project.run("bench", "--json", "--op", "p2p", "--sizes", "1M")
    assert done.code == 0, done.err
    rates = json.loads(done.out)["pairs"]["gb_s"]
    for one, other in ((0, 1), (1, 0), (1, 2), (2, 1)):
        assert 0.005 < rates[one][other] < 0.0125 * 1.15, "100 Mbit/s are 0.0125 GB/s"
    assert min(rates[0][2], rates[2][0]) > 0.03
