"""Inside an allocation: a launch says how to use it, and that works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.hosts import Project
from tests.integration.slurm_hosts import cluster, shared

__all__ = ["cluster", "shared"]


@pytest.mark.parametrize(("kind", "launcher"), [("direct", "auto"), ("command", "auto"), ("direct", "none")])
def test_the_sentence_of_the_refusal_uses_the_allocation(shared: Project, kind: str, launcher: str) -> None:
    program = "script: train.py" if kind == "direct" else f"command: [{json.dumps(sys.executable)}, train.py]"
    shared.write(
        "dtctl.yaml",
        f"cluster: {{transport: slurm, nodes: 2, slots: 2, python: {json.dumps(sys.executable)}}}\n"
        f"job: {{name: test, kind: {kind}, {program}}}\nslurm: {{launcher: {launcher}}}\n",
    )
    names = ("DTCTL_NODE", "MASTER_ADDR", "DTCTL_NODE_RANK", "SLURM_JOB_ID")
    shared.write("train.py", f"import os\nprint('SAID', *(os.environ[name] for name in {names}), flush=True)\n")
    dtctl = f"{sys.executable} -m dtctl"
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "bash", "-c"]

    def inside(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*salloc, command],
            cwd=shared.folder,
            env=shared.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    refused = inside(f"{dtctl} launch")
    assert refused.returncode == 7, refused.stderr
    hint = re.search(r"`(dtctl sbatch [^`]*)`", refused.stderr.replace(os.linesep, " "))
    assert hint, refused.stderr
    done = inside(re.sub(r"\bdtctl\b", dtctl, hint[1], count=1))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = sorted(line.partition("SAID ")[2].split() for line in done.stdout.splitlines() if "SAID " in line)
    assert len(rows) == (4 if kind == "direct" else 2), done.stdout + done.stderr
    assert {(node, index) for node, _, index, _ in rows} == {("node1", "0"), ("node2", "1")}
    assert len({address for _, address, _, _ in rows}) == len({job for *_, job in rows}) == 1
