"""How often Slurm's controller is asked, by all machines and all who follow a run together."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import Project, wait_until
from tests.integration.slurm_hosts import cluster, shared

__all__ = ["cluster", "shared"]

SPEC = """\
cluster: {{transport: slurm, nodes: 2, slots: 1, python: {python}}}
job: {{name: test, script: train.py, kind: direct}}
"""
WRAPPER = """\
#!/bin/sh
case "$*" in
*hostnames*) ;;  # answered without the controller
*) echo "$(date +%s.%N) $(hostname) {name} $*" >>{log} ;;
esac
exec {real} "$@"
"""


def counted(project: Project) -> tuple[dict[str, str], Path]:
    """A PATH whose commands of Slurm write down each call, here and on the job's nodes; and where."""
    folder, log = project.folder / "ways", project.folder / "calls"
    folder.mkdir()
    for name in ("scontrol", "squeue", "sacct", "sinfo"):
        real = shutil.which(name, path=project.env["PATH"])
        (folder / name).write_text(WRAPPER.format(name=name, log=log, real=real))
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{project.env['PATH']}"}, log


@pytest.mark.slow
def test_the_controller_is_asked_four_times_a_minute(shared: Project) -> None:
    """At the beginning and at the end it is asked at once."""
    shared.write("dtctl.yaml", SPEC.format(python=json.dumps(sys.executable)))
    shared.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(45)\nprint('over', flush=True)\n")
    env, log = counted(shared)
    launcher = shared.start("launch", "--json", env=env)
    wait_until(lambda: len(list(shared.folder.glob(".dtctl/runs/*/logs/*/rank-*.log"))) == 2, 60, "it runs")
    others = [shared.start("logs", "-f", env=env) for _ in range(2)]
    begun = time.time()
    while time.time() - begun < 40:
        assert shared.run("status", env=env).code == 0
        time.sleep(4)
    done = shared.finish(launcher)
    ended = time.time()
    assert done.code == 0, done.err
    assert all(shared.finish(other).code == 0 for other in others)
    calls = [line.split(maxsplit=2) for line in log.read_text().splitlines()]
    while_it_runs = [call for call in calls if begun < float(call[0]) < begun + 40]
    assert len(while_it_runs) <= 4, while_it_runs
    assert len(calls) <= 12, calls
    over = max(path.stat().st_mtime for path in shared.folder.glob(".dtctl/slurm/*/control/logs/*/rank-*.log"))
    assert ended - over < 10, "the end is not waited for"
