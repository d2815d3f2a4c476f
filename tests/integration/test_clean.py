"""Old runs and trees go when that is agreed to; what runs, and what a run that stays was continued from, does not."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, spec_text, wait_until


def runs_of(sandbox: Sandbox, node: int) -> list[str]:
    folder = sandbox.state / "hosts" / sandbox.nodes[node].name / "home" / ".dtctl" / "node" / "runs"
    return sorted(path.name for path in folder.iterdir())


def items(project: Project, *arguments: str) -> list[dict[str, object]]:
    done = project.run("clean", "--json", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)["items"]


def test_what_is_shown_goes_and_a_run_that_is_on_stays(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text(nodes=2, grace_s=1))
    project.write("train.py", "open('out', 'wb').write(bytes(3_000_000))\n")
    assert project.run("launch", "--name", f"{project.unique}-old").code == 0
    project.write("train.py", "import time\nprint('on', flush=True)\ntime.sleep(10_000)\n")
    assert project.run("launch", "--detach", "--name", project.unique).code == 0
    mine = lambda rows: [row for row in rows if str(row["name"]).startswith(project.unique)]  # noqa: E731
    found = mine(items(project, "--older", "0s"))
    assert sorted((row["node"] or "here", row["kind"]) for row in found) == [
        ("here", "run"), ("node1", "run"), ("node2", "run"),
    ]  # fmt: skip
    assert {row["name"] for row in found} == {f"{project.unique}-old"}
    assert all(int(str(row["bytes"])) > 3_000_000 for row in found if row["node"])
    assert mine(items(project)) == [], "nothing is as old as two weeks"
    assert len(mine(items(project, "--older", "0s", "--larger", "2M"))) == 2
    shown = project.run("clean", "--older", "0s")
    assert "nothing was removed" in shown.err
    assert f"{project.unique}-old" in runs_of(sandbox, 0)
    done = project.run("clean", "--older", "0s", "--yes")
    assert done.code == 0, done.err
    for node in (0, 1):
        assert f"{project.unique}-old" not in runs_of(sandbox, node)
        assert project.unique in runs_of(sandbox, node)
    assert not (project.folder / ".dtctl" / "runs" / f"{project.unique}-old").exists()
    assert json.loads(project.run("status", "--json").out)["status"] == "running"
    assert project.run("stop").code == 0


def test_what_a_run_that_stays_was_continued_from_stays(project: Project) -> None:
    workdir = project.folder.parent / "node"
    project.write(
        "dtctl.yaml",
        f'cluster: {{transport: local, slots: 1, workdir: "{workdir}"}}\n'
        "job: {name: test, script: train.py, kind: direct, preload: [], outputs: [out/]}\n",
    )
    project.write("train.py", "import os\nos.makedirs('out', exist_ok=True)\nopen('out/x', 'a').write('x')\n")
    assert project.run("launch", "--name", "first").code == 0
    assert project.run("launch", "--name", "other").code == 0
    assert project.run("launch", "--resume", "first", "--name", "second").code == 0
    two_days = time.time() - 2 * 86400
    for top in (workdir / "runs", project.folder / ".dtctl" / "runs"):
        for run in ("first", "other"):
            for path in [top / run, *(top / run).rglob("*")]:
                os.utime(path, (two_days, two_days), follow_symlinks=False)
    done = project.run("clean", "--older", "1d", "--yes")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (workdir / "runs").iterdir()) == ["first", "second"]
    assert (workdir / "runs" / "second" / "work" / "out" / "x").read_text() == "xx"
    (project.folder / "dtctl.yaml").unlink()
    assert project.run("clean", "--older", "0s", "--yes").code == 0
    assert sorted(path.name for path in (project.folder / ".dtctl" / "runs").iterdir()) == ["first", "second"], (
        "their files are on a node that nobody has asked"
    )


def test_trees_that_nobody_uses_go_and_what_is_not_ours_stays(project: Project) -> None:
    workdir = project.folder.parent / "node"
    project.write(
        "dtctl.yaml",
        f'cluster: {{transport: local, slots: 1, workdir: "{workdir}"}}\n'
        "job: {name: test, script: train.py, kind: direct, preload: []}\n",
    )
    project.write("train.py", "pass")
    assert project.run("launch").code == 0
    (workdir / "runs" / "mine").mkdir()
    (workdir / "runs" / "mine" / "thesis").write_text("mine")
    precious = project.folder.parent / "precious"
    precious.mkdir()
    (precious / "work.json").write_text("{}")
    (workdir / "runs" / "link").symlink_to(precious)
    assert project.run("clean", "--older", "0s", "--yes").code == 0
    assert [path.name for path in (workdir / "code").iterdir() if path.is_dir()] == []
    assert sorted(path.name for path in (workdir / "runs").iterdir()) == ["link", "mine"]
    assert Path(precious / "work.json").exists()
    wait_until(lambda: project.run("launch").code == 0, what="the store can be used again")


def test_what_is_kept_for_being_young_is_named(project: Project) -> None:
    project.write("dtctl.yaml", "cluster: {transport: sandbox, nodes: 3}\njob: {command: 'true'}\n")
    assert project.run("launch", "--name", project.unique).code == 0
    done = project.run("clean")
    assert done.code == 0, done.err
    assert "no removable file or folder is at least 14d old; `dtctl clean --older 0d` shows the rest" in done.err


@pytest.mark.parametrize("words", [("runs", "--nodes"), ("status", "no-such-run"), ("clean",)])
def test_a_sandbox_that_is_down_is_no_bug(project: Project, words: tuple[str, ...]) -> None:
    project.write("dtctl.yaml", "cluster: {transport: sandbox, nodes: 3}\njob: {command: 'true'}\n")
    done = project.run(*words, env={"DTCTL_SANDBOX": "not-up"})
    assert "bug" not in done.err, done.err
    assert "Traceback" not in done.err


def test_runs_of_another_folder_stand_apart(project: Project) -> None:
    workdir = project.folder.parent / "node"
    other = replace(project, folder=project.folder.parent / "other", _running=[])
    other.folder.mkdir()
    for each, run in ((project, "mine"), (other, "theirs")):
        each.write("dtctl.yaml", f'cluster: {{transport: local, workdir: "{workdir}"}}\njob: {{command: ["true"]}}\n')
        assert each.run("launch", "--name", run).code == 0
    rows = items(project, "--older", "0s")
    assert {str(row["name"]): row["of_other_folder"] for row in rows if row["kind"] == "run"} == {
        "mine": False, "theirs": True,
    }  # fmt: skip
    own, _, others = project.run("clean", "--older", "0s").out.partition("other folders")
    assert ("mine" in own, "theirs" in own, "theirs" in others, "mine" in others) == (True, False, True, False)
    assert "other folders" not in other.run("clean", "--older", "100d").out


def test_runs_of_another_folder_need_an_option_of_their_own(project: Project) -> None:
    workdir = project.folder.parent / "node"
    other = replace(project, folder=project.folder.parent / "other", _running=[])
    other.folder.mkdir()
    spec = f'cluster: {{transport: local, workdir: "{workdir}"}}\njob: {{command: ["touch", "out"]}}\n'
    for each, run in ((project, "mine"), (other, "theirs")):
        each.write("dtctl.yaml", spec)
        assert each.run("launch", "--name", run).code == 0
    done = project.run("clean", "--older", "0s", "--yes")
    assert done.code == 0, done.err
    assert "`--yes --others` removes" in done.err
    assert [path.name for path in (workdir / "runs").iterdir()] == ["theirs"]
    assert other.run("fetch", "theirs").code == 0
    again = project.run("clean", "--older", "0s", "--yes", "--json")
    assert (json.loads(again.out)["removed"], [path.name for path in (workdir / "runs").iterdir()]) == (
        False,
        ["theirs"],
    )
    assert project.run("clean", "--older", "0s", "--yes", "--others").code == 0
    assert not [*(workdir / "runs").iterdir()]
    gone = other.run("fetch", "theirs")
    assert (gone.code, "there are no files of run theirs on localhost" in gone.err) == (7, True), gone.err


def test_a_removed_run_is_not_said_to_have_files(project: Project) -> None:
    workdir = project.folder.parent / "node"
    project.write(
        "dtctl.yaml",
        f'cluster: {{transport: local, workdir: "{workdir}"}}\n'
        "job: {script: train.py, kind: direct, preload: [], outputs: [out]}\n",
    )
    project.write("train.py", "open('out', 'wb').write(bytes(3_000_000))\n")
    assert project.run("launch", "--name", "big").code == 0
    assert project.run("clean", "--older", "0s", "--larger", "2M", "--yes").code == 0
    assert not (workdir / "runs" / "big").exists()
    fetched = project.run("fetch", "big")
    assert fetched.code == 7
    assert "`dtctl clean` has removed the files of run big from localhost" in fetched.err
    assert "snapshot export" not in fetched.err
    status = project.run("status", "big")
    assert "outputs: `dtctl clean` has removed those on localhost" in status.out, status.out
    resumed = project.run("launch", "--resume", "big")
    assert (resumed.code, "has removed the files of run big from localhost" in resumed.err) == (7, True), resumed.err
    shown = project.run("snapshot", "ls", "big")
    assert "has removed the files of run big from localhost" in shown.err, shown.err
    project.write("train.py", "pass\n")
    assert project.run("launch", "--name", "nothing").code == 0
    empty = project.run("fetch", "nothing")
    assert (empty.code, "no file was written into out (job.outputs) on localhost" in empty.err) == (0, True), empty.err
    assert project.run("fetch", "nothing", "out").code == 7
