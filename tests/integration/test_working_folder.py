"""A run has a working folder of its own: what its programs do there touches neither the pushed tree nor other runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.hosts import Project, spec_text, wait_until

SPEC = """\
cluster: {{transport: local, slots: 1, workdir: "{workdir}"}}
job: {{name: test, script: train.py, kind: direct, preload: [], max_restarts: {restarts}{more}}}
"""
VANDAL = """\
import os, pathlib, shutil, subprocess, sys
here = pathlib.Path.cwd()
assert here == pathlib.Path(os.environ["DTCTL_RUN_DIR"]) / "work", here
assert pathlib.Path(__file__).resolve().parent == here
print("before", sorted(path.name for path in here.rglob("*") if "fill" not in str(path)))
(here / "config.json").write_text("changed")
with open("data/appended.txt", "a") as file:
    file.write("more")
with open("data/in-place.bin", "r+b") as file:
    file.write(b"XXXX")
os.truncate("data/cut.txt", 0)
os.unlink("data/gone.txt")
os.rename("data/moved.txt", "data/elsewhere.txt")
os.chmod("run.sh", 0o755)
os.link("data/linked.txt", "data/hard.txt")
with open("data/hard.txt", "w") as file:
    file.write("through another name")
subprocess.run(["sed", "-i", "s/a/b/", "data/edited.txt"], check=True)
shutil.rmtree("folder")
os.makedirs("out/checkpoint-40")
(here / "out" / "checkpoint-40" / "weights").write_bytes(bytes(1000))
"""
NAMES = ("appended.txt", "in-place.bin", "cut.txt", "gone.txt", "moved.txt", "linked.txt", "edited.txt")


def write(project: Project, script: str, *, restarts: int = 0, more: str = "", files: int = 0) -> Path:
    """A project with a script and files to spoil; the folder that stands for the node's."""
    workdir = project.folder.parent / "node"
    project.write("dtctl.yaml", SPEC.format(workdir=workdir, restarts=restarts, more=more))
    project.write("train.py", script)
    project.write("config.json", "{}")
    project.write("run.sh", "true")
    project.write("folder/file", "x")
    for name in NAMES:
        project.write(f"data/{name}", f"a{name}")
    for number in range(files):
        project.write(f"fill/{number}", str(number))
    return workdir


def contents(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("files", [0, 500], ids=["few files", "many files"])
def test_a_program_that_writes_never_touches_the_shared_tree(project: Project, files: int) -> None:
    workdir = write(project, VANDAL, files=files)
    project.write("train.py", "pass")
    assert project.run("launch").code == 0
    project.write("train.py", VANDAL)
    for _ in range(2):  # the second finds what was pushed, and no checkpoint of the first
        done = project.run("launch", "--json")
        assert done.code == 0, done.err
        (line,) = [line for line in done.err.splitlines() if "before" in line]
        assert "gone.txt" in line
        assert "out" not in line
        (tree,) = [
            tree for tree in (workdir / "code").iterdir() if tree.is_dir() and (tree / "train.py").read_text() == VANDAL
        ]
        pushed = {path: text for path, (text, _, _) in contents(tree).items()}
        assert pushed == {path: text for path, (text, _, _) in contents(project.folder).items() if ".dtctl" not in path}
        outputs = done.done["outputs"]
        run_dir = workdir / "runs" / str(done.done["run"])
        assert outputs == {"localhost": {"folder": str(run_dir / "work"), **outputs["localhost"]}}  # type: ignore[index]
        assert (run_dir / "work" / "out" / "checkpoint-40" / "weights").stat().st_size == 1000
        assert outputs["localhost"]["files"] == 9 + bool(files)  # type: ignore[index]  # an overlay has the new mode, too
    how = json.loads((run_dir / "work.json").read_text())["how"]
    assert how == ("overlay" if files else "copy")


RESTARTS = """\
import os, pathlib, sys
out = pathlib.Path("out")
print("found", sorted(path.name for path in out.iterdir()) if out.exists() else None)
out.mkdir(exist_ok=True)
(out / f"attempt-{os.environ['DTCTL_ATTEMPT']}-{os.environ['DTCTL_RUN_ID']}").touch()
sys.exit(3 if os.environ["DTCTL_ATTEMPT"] == "0" and len(sys.argv) == 1 else 0)
"""


@pytest.mark.parametrize("files", [0, 500], ids=["few files", "many files"])
def test_outputs_are_kept_over_restarts_and_over_launches_if_asked(project: Project, files: int) -> None:
    write(project, RESTARTS, restarts=1, more=", outputs: [out/]", files=files)
    first = project.run("launch", "--name", project.unique)
    assert first.code == 0, first.err
    assert f"found ['attempt-0-{project.unique}']" in first.out
    fresh = project.run("launch", "--", "no-failure")
    assert "found None" in fresh.out
    project.write("config.json", "the tree is another one now")
    resumed = project.run("launch", "--resume", project.unique, "--name", f"{project.unique}-2", "--", "no-failure")
    assert resumed.code == 0, resumed.err
    names = [f"attempt-0-{project.unique}", f"attempt-1-{project.unique}"]
    assert f"found {names}" in resumed.out
    again = project.run("launch", "--resume", f"{project.unique}-2", "--", "no-failure")
    assert f"found {[names[0], f'attempt-0-{project.unique}-2', names[1]]}" in again.out


def test_outputs_of_a_run_that_continues_another_are_listed_and_fetched(project: Project, sandbox: Sandbox) -> None:
    """`job.shared` then has a link to the folder of the earlier run; `dtctl fetch` left it out."""
    script = "import os\nos.makedirs('out', exist_ok=True)\n"
    script += "open(f\"out/{os.environ['DTCTL_RUN_ID']}-{os.environ['RANK']}\", 'w').close()\n"
    project.write("dtctl.yaml", spec_text(nodes=2).replace("script:", "shared: [out/], script:"))
    project.write("train.py", script)
    first = project.run("launch", "--name", project.unique)
    assert first.code == 0, first.err
    resumed = project.run("launch", "--resume", project.unique, "--name", f"{project.unique}-2")
    assert resumed.code == 0, resumed.err
    assert f"`dtctl fetch {project.unique}-2` brings them here" in resumed.err
    fetched = project.run("fetch", f"{project.unique}-2")
    assert "not fetched" not in fetched.err
    outputs = project.folder / ".dtctl" / "runs" / f"{project.unique}-2" / "outputs"
    assert (outputs / "node1" / "out" / f"{project.unique}-2-0").is_file()
    assert (outputs / "node2" / "out" / f"{project.unique}-2-1").is_file()


def test_on_virtual_hosts(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text(nodes=2))
    project.write("train.py", "import os\nopen('mine', 'w').write(os.environ['RANK'])\n")
    done = project.run("launch", "--json", "--name", project.unique)
    assert done.code == 0, done.err
    outputs = done.done["outputs"]
    assert {node: value["files"] for node, value in outputs.items()} == {"node1": 1, "node2": 1}  # type: ignore[attr-defined]
    for rank, node in enumerate(sandbox.nodes[:2]):
        home = sandbox.state / "hosts" / node.name / "home"
        assert (home / ".dtctl" / "node" / "runs" / project.unique / "work" / "mine").read_text() == str(rank)


def test_outputs_of_all_nodes_come_back(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text(nodes=2).replace("kind: direct", "kind: direct, outputs: [out/]"))
    script = "import os\nos.mkdir('out')\nopen('out/rank', 'w').write(os.environ['RANK'] * 100_000)\nopen('x', 'w')\n"
    project.write("train.py", script)
    launched = project.run("launch", "--name", project.unique)
    assert launched.code == 0, launched.err
    assert f"dtctl fetch {project.unique}" in launched.err
    assert f"dtctl fetch {project.unique}" in project.run("status").out
    fetched = project.run("fetch", "--json")
    assert fetched.code == 0, fetched.err
    folder = project.folder / ".dtctl" / "runs" / project.unique / "outputs"
    said = json.loads(fetched.out)
    assert said["folder"] == str(folder)
    assert {node: row["files"] for node, row in said["nodes"].items()} == {"node1": 1, "node2": 1}
    assert (folder / "node2" / "out" / "rank").read_text() == "1" * 100_000
    one = project.run("fetch", project.unique, "x", "--node", "node1", "--out", "here")
    assert one.code == 0, one.err
    assert [str(path.relative_to(project.folder)) for path in (project.folder / "here").rglob("x")] == ["here/node1/x"]
    nothing = project.run("fetch", project.unique, "absent")
    assert nothing.code == 7
    assert "absent" in nothing.err
    assert project.run("fetch", project.unique, "../attempt-0").code == 2


@pytest.mark.parametrize("files", [0, 500], ids=["few files", "many files"])
def test_a_command_inside_of_the_run_sees_what_its_programs_see(project: Project, files: int) -> None:
    write(
        project,
        "import time\nopen('written', 'w').write('yes')\nprint('on', flush=True)\ntime.sleep(1000)\n",
        files=files,
    )
    assert project.run("launch", "--detach", "--name", project.unique).code == 0
    try:
        log = project.folder / ".dtctl" / "runs" / project.unique / "logs" / "localhost" / "rank-0.log"
        wait_until(lambda: log.exists() and "on" in log.read_text(), what="the program has written")
        done = project.run("exec", project.unique, "localhost", "--", "cat", "written", "config.json")
        assert (done.code, done.out) == (0, "yes{}"), done.err
    finally:
        assert project.run("stop").code == 0


@pytest.mark.parametrize("root", [".", "absolute"])
def test_a_folder_that_is_not_pushed_is_as_safe_as_one_that_is(project: Project, root: str) -> None:
    write(project, VANDAL)
    code = project.folder
    if root == "absolute":
        code = project.folder.parent / "app"
        shutil.copytree(project.folder, code)
        (project.folder / "train.py").unlink()
    push = f"job.files={{push: false, root: {code if root == 'absolute' else root}}}"
    before = {path: held for path, held in contents(code).items() if not path.startswith(".dtctl")}
    for _ in range(2):  # the second meets no checkpoint of the first
        done = project.run("launch", "--set", push)
        assert done.code == 0, done.err
        (line,) = [line for line in done.out.splitlines() if "before" in line]
        assert "gone.txt" in line
        assert "out" not in line
    assert {path: held for path, held in contents(code).items() if not path.startswith(".dtctl")} == before
    fetched = project.run("fetch", "--json")
    assert fetched.code == 0, fetched.err
    (here,) = project.folder.glob(".dtctl/runs/*/outputs/*")
    assert (here / "out" / "checkpoint-40" / "weights").stat().st_size == 1000
    missing = project.run("launch", "--set", "job.files={push: false, root: /nowhere}", "--json")
    assert missing.code == 6, missing.err
    assert "/nowhere" in missing.err


@pytest.mark.parametrize("preload", ["[]", "[json]"], ids=["fresh", "forked"])
def test_what_programs_write_has_the_modes_of_the_login(project: Project, preload: str) -> None:
    """What dtctl writes is for its user alone; a checkpoint for the group is not dtctl's to hide."""
    workdir = write(project, "import os\nprint('UMASK', oct(os.umask(0)))\n")
    spec = project.folder / "dtctl.yaml"
    spec.write_text(spec.read_text().replace("preload: []", f"preload: {preload}").replace("slots: 1", "slots: 2"))
    before = os.umask(0o002)
    try:
        done = project.run("launch")
    finally:
        os.umask(before)
    assert done.out.count("UMASK 0o2") == 2, done.out + done.err
    assert workdir.stat().st_mode & 0o777 == 0o700
