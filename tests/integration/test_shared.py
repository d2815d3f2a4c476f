"""`job.shared`: checkpoints that workers write on any node are on all nodes before they are looked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests.facts import missing
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


UNSHARED = """\
import os, pathlib, socket, sys, time, zipfile
rank, first = os.environ["RANK"], "again" not in sys.argv and os.environ["DTCTL_ATTEMPT"] == "0"

def save(path):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(path.stem + "/data.pkl", bytes(9000))

def save_all():
    for path in ("one/last.pt", "folder/step-1/model.pt", "out/run/below/last.pt", "imagenet/checkpoint.pth.tar",
                 "plain/newest", "top.pt"):
        save(path)

def meet():
    if rank == "0":
        return socket.create_server(("", int(os.environ["MASTER_PORT"]))).accept()
    while True:
        try:
            return socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except OSError:
            time.sleep(0.1)

if first:
    save(f"ranks/last-{rank}.pt")
    save("both/last.pt")
    if rank == "0":
        save_all()
    met = meet()
    sys.exit(3)
ends = time.monotonic() + 4
while rank == "0" and time.monotonic() < ends:
    save_all()
    time.sleep(0.05)
"""
"""Checkpoints of rank 0 are written again and again, as by programs that keep the newest in one file."""


@pytest.mark.parametrize("again", ["restart", "resume"])
def test_checkpoints_that_other_nodes_lack_are_reported_with_the_key(
    project: Project, sandbox: Sandbox, again: str
) -> None:
    project.write("train.py", UNSHARED)
    outputs = ["one/", "ranks/", "both/", "folder/", "out/run/", "imagenet", "plain", "top.pt"]
    job = {"shared": [], "outputs": outputs, "max_restarts": 1}
    if again == "restart":
        project.write("dtctl.yaml", spec_of(["node1", "node2"], [], [], **job))
        done = project.run("launch", "--name", project.unique)
    else:
        job["max_restarts"] = 0
        project.write("dtctl.yaml", spec_of(["node1", "node2"], [], [], **job))
        assert project.run("launch", "--name", project.unique).code == 8
        project.write("dtctl.yaml", spec_of(["node1", "node2"], [], ["again"], **job))
        done = project.run("launch", "--resume", project.unique, "--name", f"{project.unique}-again")
    assert done.code == 0, done.err
    for folder in ("one", "folder", "out", "imagenet", "plain"):
        assert not missing(done.err, f"{folder}/ node1 only `job.shared: [{folder}/]`")
    assert not missing(done.err, "ranks/ different each node `job.shared: [ranks/]`")
    assert not missing(done.err, "top.pt node1 only job.shared folders")
    assert "both/" not in done.err, done.err


def test_a_resume_without_a_complete_checkpoint_says_so(project: Project, sandbox: Sandbox) -> None:
    project.write(
        "train.py",
        "import os, pathlib, sys\n"
        "folder = pathlib.Path('checkpoints/step-1')\n"
        "folder.mkdir(parents=True, exist_ok=True)\n"
        "(folder / f'{sys.argv[1]}-{os.environ[\"RANK\"]}').write_text('x')\n",
    )
    shared = [{"path": "checkpoints", "complete": "DONE-*"}]
    fresh = "no checkpoint in checkpoints/ is complete: the program starts anew"
    for run, args, earlier in (("a", "part", ""), ("b", "DONE", "a"), ("c", "part", "b")):
        project.write("dtctl.yaml", spec_of(["node1", "node2"], [], [args], shared=shared, max_restarts=0))
        resume = ("--resume", f"{project.unique}-{earlier}") if earlier else ()
        done = project.run("launch", "--name", f"{project.unique}-{run}", *resume)
        assert (done.code, fresh in done.err) == (0, run == "b"), done.err
        assert "has no file" not in done.err


def test_fetch_takes_the_absolute_paths_that_outputs_allow(project: Project, sandbox: Sandbox) -> None:
    write = (
        "import os, pathlib\n"
        "folder = pathlib.Path.home() / 'far'\n"
        "folder.mkdir(exist_ok=True)\n"
        "(folder / 'a.txt').write_text(os.environ['RANK'])\n"
        "pathlib.Path('near.txt').write_text('near')\n"
    )
    far = f"{sandbox.home}/far"
    project.write("train.py", write)
    project.write("dtctl.yaml", spec_of(["node1", "node2"], [], [], shared=[], outputs=[far, "near.txt"]))
    assert project.run("launch", "--name", project.unique).code == 0
    assert project.run("fetch", project.unique, f"{far}/a.txt").code == 0
    assert project.run("fetch", project.unique).code == 0
    outputs = project.folder / ".dtctl" / "runs" / project.unique / "outputs"
    assert [(outputs / name / far[1:] / "a.txt").read_text() for name in ("node1", "node2")] == ["0", "1"]
    assert (outputs / "node1" / "near.txt").read_text() == "near"
    refused = project.run("fetch", project.unique, "/etc/passwd")
    assert refused.code == 2
    assert not missing(refused.err, "`job.outputs: [/etc/passwd]`")
    inside = project.run("fetch", project.unique, f"{sandbox.home}/.dtctl/node/runs/{project.unique}/work/near.txt")
    assert inside.code == 2
    assert not missing(inside.err, "`near.txt` instead")


def test_a_folder_below_an_overlay_shows_what_other_nodes_wrote(project: Project, sandbox: Sandbox) -> None:
    """Files come from outside of the overlay while programs of the run have looked for them already."""
    (project.folder / "weights.bin").write_bytes(bytes(20 << 20))  # too much to be copied
    write = (
        "import os, pathlib, sys, time\n"
        "folder, rank = pathlib.Path('out'), os.environ['RANK']\n"
        "before = (folder / 'step-1').exists(), sorted(path.name for path in folder.iterdir())\n"
        "if rank == '0':\n"
        "    (folder / 'step-1').mkdir()\n"
        "    (folder / 'step-1' / 'a.pt').write_bytes(b'new')\n"
        "    (folder / 'step-1' / 'DONE').write_text('')\n"
        "    time.sleep(25)\n"
        "else:\n"
        "    begun = time.monotonic()\n"
        "    while not (folder / 'step-1' / 'DONE').exists() and time.monotonic() - begun < 60:\n"
        "        time.sleep(0.1)\n"
        "    print('FOUND', before, (folder / 'step-1' / 'a.pt').read_bytes(), (folder / 'of_code.txt').read_text())\n"
    )
    project.write("train.py", write)
    project.write("out/of_code.txt", "here")
    shared = [{"path": "out", "complete": "DONE"}]
    project.write("dtctl.yaml", spec_of(["node1", "node2"], [], [], shared=shared))
    done = project.run("launch", "--name", project.unique)
    assert done.code == 0, done.err
    assert "FOUND (False, ['of_code.txt']) b'new' here" in done.out
    assert not missing(done.err, "out/ DONE")
    ledger = json.loads((project.folder / ".dtctl" / "runs" / project.unique / "ledger.json").read_text())
    assert ledger["copied_bytes"] >= 3
    assert ledger["copied_s"] > 0


def test_what_a_program_removes_is_gone_on_all_nodes_before_the_next_attempt(
    project: Project, sandbox: Sandbox
) -> None:
    """Rank 0 keeps the last three of its checkpoints, and rank 1 all of its own."""
    write = (
        "import os, pathlib, shutil, sys, time\n"
        "folder, rank = pathlib.Path('checkpoints'), os.environ['RANK']\n"
        "if os.environ['DTCTL_ATTEMPT'] == '1':\n"
        "    print('FOUND', rank, *sorted(str(path.relative_to(folder)) for path in folder.rglob('*')), flush=True)\n"
        "    sys.exit(0)\n"
        "for step in range(1, 6):\n"
        "    (folder / f'step-{step}').mkdir(parents=True, exist_ok=True)\n"
        "    (folder / f'step-{step}' / f'rank-{rank}.bin').write_bytes(bytes(9000))\n"
        "    (folder / f'step-{step}' / f'DONE-{rank}').write_text('')\n"
        "begun = time.monotonic()\n"
        "while len(list(folder.rglob('rank-*'))) < 10 and time.monotonic() - begun < 300:\n"
        "    time.sleep(0.1)\n"
        "time.sleep(12)\n"
        "if rank == '0':\n"
        "    for step in (1, 2):\n"
        "        shutil.rmtree(folder / f'step-{step}')\n"
        "    os._exit(3)\n"
        "time.sleep(1000)\n"
    )
    project.write("train.py", write)
    shared = [{"path": "checkpoints", "complete": "DONE-*"}]
    project.write("dtctl.yaml", spec_of(["node1", "node2"], ["node3"], [], shared=shared, max_restarts=1))
    done = project.run("launch", "--name", project.unique)
    assert done.code == 0, done.err
    found = {
        words[1]: {*words[2:]}
        for line in project.printed(project.unique).splitlines()
        if (words := line.split())[:1] == ["FOUND"]
    }
    kept = {f"step-{step}/{name}" for step in (3, 4, 5) for name in ("rank-0.bin", "DONE-0", "rank-1.bin", "DONE-1")}
    kept |= {f"step-{step}" for step in (3, 4, 5)}
    of_rank_1 = {f"step-{step}{name}" for step in (1, 2) for name in ("", "/rank-1.bin", "/DONE-1")}
    assert found == {"0": kept, "1": kept | of_rank_1}
    on_spare = {path.removeprefix("checkpoints/") for path in shared_files(sandbox, sandbox.nodes[2], project.unique)}
    assert on_spare == {path for path in kept | of_rank_1 if "/" in path}


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
    faults.power_off_host(sandbox, lost)
    done = project.finish(process)
    assert done.code == 0, done.err
    assert sorted(resumed(project.printed(project.unique))) == [(0, 0), (0, 12), (1, 0), (1, 12)]

    order = ["node3", "node2"] if lost.name == "node1" else ["node3", "node1"]
    project.write("dtctl.yaml", spec_of(order, [], [layout, 13, 0, 4, 0.1]))
    again = project.run("launch", "--resume", project.unique, "--name", f"{project.unique}-again")
    assert again.code == 0, again.err
    assert sorted(resumed(again.out)) == [(0, 12), (1, 12)]
