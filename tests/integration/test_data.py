"""`job.data`: what a job reads and what is no part of its code is on every node, once, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests.facts import missing
from tests.hosts import Project

pytestmark = pytest.mark.usefixtures("sandbox")

READ = """\
import os, pathlib
where = pathlib.Path("data/x")
print("found", sorted(str(p.relative_to(where)) for p in where.rglob("*") if p.is_file()))
print("first", (where / "part-0.bin").stat().st_size, (where / "part-0.bin").read_bytes()[:4])
print("labels", pathlib.Path("labels.csv").read_text().strip())
pathlib.Path("out.txt").write_text("written")
"""


def on_node(sandbox: Sandbox, node: SandboxNode, *command: str) -> str:
    """What a command says on a node."""
    argv = control.enter_argv(sandbox, node, list(command))
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def trees_of(sandbox: Sandbox, node: SandboxNode) -> list[str]:
    """The sealed trees of data that a node keeps."""
    listed = on_node(sandbox, node, "bash", "-c", f"ls {sandbox.home}/.dtctl/node/data 2>/dev/null || true")
    return sorted(name for name in listed.split() if name.endswith(".json"))


def spec_of(data: list[dict[str, str]]) -> str:
    """A spec for three hosts with such an entry `job.data`."""
    cluster = {"transport": "sandbox", "nodes": 3, "slots": 1}
    return json.dumps({"cluster": cluster, "job": {"script": "train.py", "kind": "direct", "data": data}})


def data_set(project: Project, folder: Path, size: int = 3 << 20) -> None:
    """Write a folder of parts, a hidden file and a link to a blob as Hugging Face lays them out."""
    parts, blobs = folder / "x" / "snapshots", folder / "x" / "blobs"
    parts.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_bytes(os.urandom(size))
    (parts / "part-0.bin").symlink_to("../blobs/abc")
    (parts / ".index").write_text("hidden")
    (folder / "labels.csv").write_text("cat,dog\n")
    data = [{"from": str(parts), "to": "data/x"}, {"from": str(folder / "labels.csv"), "to": "labels.csv"}]
    project.write("dtctl.yaml", spec_of(data))
    project.write("train.py", READ)
    project.write(".gitignore", "data/\n")


def test_data_is_brought_once_and_appears_in_the_working_folder(
    project: Project, sandbox: Sandbox, tmp_path: Path
) -> None:
    data_set(project, tmp_path / "datasets")
    refused = project.run("launch")
    assert refused.code == 7
    assert not missing(refused.err, "sent nodes job.data")

    shown = project.run("launch", "--dry-run", "--yes")
    assert not missing(shown.err, f"data/x 2 files 3.0 MiB {tmp_path}/datasets/x/snapshots")
    first = project.run("launch", "--yes", "--name", "first")
    assert first.code == 0, first.err
    for node in sandbox.nodes:
        assert f"[{node.name}:" in first.out or node.name in first.out
        assert len(trees_of(sandbox, node)) == 2
    assert "found ['.index', 'part-0.bin']" in first.out
    assert f"first {3 << 20}" in first.out
    assert "labels cat,dog" in first.out

    again = project.run("launch", "--name", "again", "--json")
    assert again.code == 0, again.err
    events = [json.loads(line) for line in again.out.splitlines()]
    pushed = [event["push"] for event in events if event["event"] == "node" and event.get("state") == "pushed"]
    assert {push["bytes"] for push in pushed} == {0}, "nodes have all of it"
    assert {push["state"] for push in pushed} == {"have"}

    fetched = project.run("fetch", "first", "--out", str(tmp_path / "fetched"))
    assert fetched.code == 0, fetched.err
    brought = {path.name for path in (tmp_path / "fetched").rglob("*") if path.is_file()}
    assert brought == {"out.txt"}, "data is no output"

    cleaned = project.run("clean", "--older", "0", "--yes")
    assert cleaned.code == 0, cleaned.err
    assert [trees_of(sandbox, node) for node in sandbox.nodes] == [[], [], []]


def test_data_lies_over_code_that_is_not_copied(project: Project, sandbox: Sandbox, tmp_path: Path) -> None:
    data_set(project, tmp_path / "datasets")
    (project.folder / "weights.bin").write_bytes(bytes(20 << 20))  # the code lies under an overlay then
    project.write("other/data/kept.txt", "of the code")
    done = project.run("launch", "--yes", "--name", "over")
    assert done.code == 0, done.err
    assert "found ['.index', 'part-0.bin']" in done.out
    fetched = project.run("fetch", "over", "--out", str(tmp_path / "fetched"))
    assert fetched.code == 0, fetched.err
    assert {path.name for path in (tmp_path / "fetched").rglob("*") if path.is_file()} == {"out.txt"}


def test_a_url_is_fetched_once(project: Project, sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "store" / "set"
    source.mkdir(parents=True)
    (source / "a.txt").write_text("from a store")
    project.write("dtctl.yaml", spec_of([{"from": f"file://{source}", "to": "data"}]))
    project.write("train.py", "print('read', open('data/a.txt').read())")
    first = project.run("launch", "--yes")
    assert first.code == 0, first.err
    assert "read from a store" in first.out
    (source / "a.txt").unlink()
    again = project.run("launch", "--yes")
    assert again.code == 0, again.err
    project.write("dtctl.yaml", spec_of([{"from": f"file://{tmp_path}/none", "to": "data"}]))
    done = project.run("launch", "--yes")
    assert done.code == 4
    assert not missing(done.err, f"file://{tmp_path}/none fetched")


def test_changing_one_file_moves_that_file(project: Project, sandbox: Sandbox, tmp_path: Path) -> None:
    data_set(project, tmp_path / "datasets")
    parts = tmp_path / "datasets" / "x" / "snapshots"
    for number in range(1, 5):
        (parts / f"part-{number}.bin").write_bytes(os.urandom(1 << 20))
    assert project.run("launch", "--yes").code == 0
    (parts / "part-3.bin").write_bytes(os.urandom(1 << 20))
    done = project.run("launch", "--json")
    assert done.code == 0, done.err
    events = [json.loads(line) for line in done.out.splitlines()]
    pushed = [event["push"] for event in events if event["event"] == "node" and event.get("state") == "pushed"]
    assert {push["files"] for push in pushed} == {1}
    assert all(1 << 20 <= push["bytes"] < 1.1 * (1 << 20) for push in pushed)


def test_what_nodes_have_is_linked_and_checked(project: Project, sandbox: Sandbox) -> None:
    for node in sandbox.nodes:
        on_node(sandbox, node, "bash", "-c", f"mkdir -p {sandbox.home}/mnt && echo 7 > {sandbox.home}/mnt/seven")
    project.write("dtctl.yaml", spec_of([{"from": f"node:{sandbox.home}/mnt", "to": "mnt"}]))
    project.write("train.py", "print('read', open('mnt/seven').read())")
    done = project.run("launch")
    assert done.code == 0, done.err
    assert "read 7" in done.out
    on_node(sandbox, sandbox.nodes[1], "rm", "-r", f"{sandbox.home}/mnt")
    lacking = project.run("launch")
    assert lacking.code == 6
    assert not missing(lacking.err, f"{sandbox.home}/mnt exist")
    assert not missing(lacking.err, "node node2")


def test_data_does_not_replace_code(project: Project, sandbox: Sandbox, tmp_path: Path) -> None:
    data_set(project, tmp_path / "datasets")
    project.write("labels.csv", "of the repository")
    done = project.run("launch", "--yes")
    assert done.code == 4
    assert not missing(done.err, "labels.csv working folder already")


def test_links_of_a_folder_that_came_along_do_not_send_other_files(project: Project, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (project.folder / "shards").mkdir()
    (project.folder / "shards" / "a").symlink_to(tmp_path / "secret")
    project.write("dtctl.yaml", spec_of([{"from": "shards", "to": "data"}]))
    project.write("train.py", "")
    done = project.run("launch")
    assert done.code == 4
    assert not missing(done.err, "link shards/a points outside folder")


def test_a_file_that_was_not_sent_is_the_cause_and_its_folder_the_fix(project: Project, sandbox: Sandbox) -> None:
    project.write("train.py", "for name in ('a', 'b'):\n    print(name, open(f'data/x/{name}.bin').read())\n")
    for name in ("a", "b"):
        project.write(f"data/x/{name}.bin", name)
    project.write(".gitignore", "data/\n")
    project.write("dtctl.yaml", spec_of([]))
    failed = project.run("launch")
    assert failed.code == 8
    assert not missing(failed.err, "cause: data/x/a.bin sent 1 other file .gitignore:1 (data/)")
    (fix,) = [line for line in failed.err.splitlines() if line.strip().startswith("fix:")]
    assert not missing(fix, "job.files.include: [data/x/] job.data")
    assert failed.err.count("cause:") == 1, "the more general cause is not stated, too"
    done = project.run("launch", "--set", "job.files.include=[data/x/]")
    assert done.code == 0, done.err
