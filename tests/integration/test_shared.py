"""`job.shared`: checkpoints that workers write on any node are on all nodes before they are looked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests.hosts import Project, wait_until
from tests.integration.test_data import on_node

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("sandbox")]

PROGRAM = Path(__file__).with_name("checkpoint_layouts.py")
LAYOUTS = ("rank0", "ranks", "dcp", "hf", "lightning", "nanochat")


def spec_of(nodes: list[str], spares: list[str], args: list[object], **job: object) -> str:
    cluster = {
        "transport": "sandbox", "nodes": nodes, "spares": spares, "slots": 1, "connect_timeout_s": 2,
        "link_timeout_s": 3,
    }  # fmt: skip
    job = {
        "script": "train.py", "kind": "direct", "grace_s": 1, "max_restarts": 2, "args": [str(each) for each in args],
        "env": {"OMP_NUM_THREADS": "1"}, "shared": ["checkpoints/"], **job,
    }  # fmt: skip
    return json.dumps({"cluster": cluster, "job": job})


def resumed(text: str) -> list[tuple[int, int]]:
    """Rank and step of each worker that has begun."""
    return [(int(rank), int(step)) for rank, step in re.findall(r"RESUMED rank=(\d) step=(\d+)", text)]


def shared_files(sandbox: Sandbox, node: SandboxNode, run: str) -> list[str]:
    """Files below the shared folder of a run on a node, wherever they wait."""
    folder = f"{sandbox.home}/.dtctl/node/runs/{run}"
    found = on_node(
        sandbox,
        node,
        "bash",
        "-c",
        f"cd {folder} && find -L work/checkpoints ahead/checkpoints -type f 2>/dev/null; true",
    )
    return sorted(path.partition("/")[2] for path in found.split())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_from_its_newest_checkpoint_though_a_host_is_gone(
    project: Project, sandbox: Sandbox, layout: str
) -> None:
    project.write("train.py", PROGRAM.read_text())
    project.write("dtctl.yaml", spec_of(["node1", "node2"], ["node3"], [layout, 14, 12, 4, 0.1]))
    process = project.start("launch", "--name", project.unique)
    lost = sandbox.nodes[0 if layout in ("rank0", "hf") else 1]
    wait_until(lambda: "HALTED" in project.printed(project.unique), 120)

    def is_copied() -> bool:
        names = [shared_files(sandbox, node, project.unique) for node in sandbox.nodes]
        return bool(names[0]) and names[0] == names[1] == names[2] and "12" in " ".join(names[2])

    wait_until(is_copied, 60)
    faults.kill(sandbox, lost)
    done = project.finish(process)
    assert done.code == 0, done.err
    assert sorted(resumed(project.printed(project.unique))) == [(0, 0), (0, 12), (1, 0), (1, 12)]

    order = ["node3", "node2"] if lost.name == "node1" else ["node3", "node1"]
    project.write("dtctl.yaml", spec_of(order, [], [layout, 13, 0, 4, 0.1]))
    again = project.run("launch", "--resume", project.unique, "--name", f"{project.unique}-again")
    assert again.code == 0, again.err
    assert sorted(resumed(again.out)) == [(0, 12), (1, 12)]
