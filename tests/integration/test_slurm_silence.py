"""A controller of Slurm that is slow or says nothing: a launch goes on by the job's files, and says so."""

from __future__ import annotations

import json
import shutil
import sys
import time

import pytest

from tests.facts import missing
from tests.hosts import Project, wait_until
from tests.integration.slurm_hosts import cluster, shared

__all__ = ["cluster", "shared"]

pytestmark = pytest.mark.slow
SPEC = """\
cluster: {{transport: slurm, nodes: 2, slots: 1, python: {python}}}
job: {{name: test, script: train.py, kind: direct, grace_s: 1}}
"""
WRAPPER = """\
#!/bin/sh
case "$*" in
{words}) {act} ;;
esac
exec {real} "$@"
"""


def write(project: Project, script: str, act: str, words: str = "show\\ job*") -> dict[str, str]:
    """A PATH, here and on the job's nodes, whose scontrol does something before it answers to some words."""
    project.write("dtctl.yaml", SPEC.format(python=json.dumps(sys.executable)))
    project.write("train.py", "import os, sys, time\nprint('up', flush=True)\n" + script)
    folder = project.folder / "ways"
    folder.mkdir()
    real = shutil.which("scontrol", path=project.env["PATH"])
    (folder / "scontrol").write_text(WRAPPER.format(words=words, act=act, real=real))
    (folder / "scontrol").chmod(0o755)
    return {"PATH": f"{folder}:{project.env['PATH']}"}


@pytest.mark.parametrize(("script", "code"), [("time.sleep(1)\n", 0), ("sys.exit(int(os.environ['RANK']) * 3)\n", 8)])
def test_a_launch_ends_with_its_job_though_each_answer_takes_12_s(shared: Project, script: str, code: int) -> None:
    env = write(shared, script, "sleep 12")
    done = shared.run("launch", "--json", env=env, timeout_s=300)
    assert done.code == code, done.err
    assert done.done["left_behind"] in (0, None)
    first = done.done["first_failure"]
    assert (first is None) is (code == 0)


def test_a_job_whose_scontrol_never_ends_waits_for_it_once(shared: Project) -> None:
    """Slurm itself is well, and so is srun: the program is stuck, as behind a site's wrapper or a dead file server."""
    act = f'echo "$*" >>{shared.folder}/asked; exec sleep 3000'
    env = write(shared, "time.sleep(1)\n", act, "show\\ [jn]o[bd]*")
    begun = time.monotonic()
    done = shared.run("launch", "--json", env=env, timeout_s=400)
    assert done.code == 0, done.err
    assert time.monotonic() - begun < 300, "it was waited for more than once"
    [log] = (shared.folder / ".dtctl" / "slurm").glob("*/job.log")
    assert "scontrol has printed nothing for 60 s: the launcher goes on without it" in log.read_text()
    assert "show node" not in (shared.folder / "asked").read_text()


def test_status_says_that_slurm_is_silent_and_a_launch_goes_on(shared: Project) -> None:
    env = write(shared, "time.sleep(30)\n", 'echo "Unable to contact slurm controller" >&2; exit 1')
    assert shared.run("launch", "--detach").code == 0
    wait_until(lambda: "up" in shared.run("logs", env=env).out, what="its output is read")
    wait_until(
        lambda: not missing(shared.run("status", env=env).err, "Slurm answer Unable contact"),
        what="its silence is told",
    )
    followed = shared.run("logs", "-f", env=env, timeout_s=300)
    assert followed.code == 0, followed.err
    assert json.loads(shared.run("status", "--json", env=env).out)["status"] == "succeeded"
