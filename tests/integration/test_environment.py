"""`job.environment`: uv makes it on every node, once, from a lock with hashes, and workers run in it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dtctl.launch.files.environment import find_uv
from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests.hosts import Project, wait_until, workers

pytestmark = pytest.mark.usefixtures("sandbox")

SHOW = """\
import sys
import {first}
print("runs in", sys.prefix, flush=True)
print("has", {first}.VERSION, flush=True)
"""


def make_wheel(folder: Path, name: str, version: str, needs: Sequence[str] = (), tag: str = "py3-none-any") -> Path:
    """Write a wheel with one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {each}\n" for each in needs)
    files = {
        f"{name}.py": f"VERSION = '{name} {version}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    rows = []
    for inner, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{inner},sha256={digest},{len(text)}\n")
    with zipfile.ZipFile(path, "w") as wheel:
        for inner, text in {**files, f"{info}/RECORD": f"{''.join(rows)}{info}/RECORD,,\n"}.items():
            wheel.writestr(zipfile.ZipInfo(inner), text)
    return path


@pytest.fixture
def index() -> Iterator[Path]:
    """A folder of wheels that the hosts see, too; their /tmp is their own."""
    folder = Path.home() / ".cache" / f"dtctl-index-{os.getpid()}"
    make_wheel(folder, "alpha", "1.0", ["beta>=1"])
    make_wheel(folder, "beta", "1.2")
    yield folder
    shutil.rmtree(folder)


def write_spec(where: Project, **environment: object) -> None:
    cluster = {"transport": "sandbox", "nodes": 3, "slots": 1}
    job = {"script": "train.py", "kind": "direct", "environment": environment}
    where.write("dtctl.yaml", json.dumps({"cluster": cluster, "job": job}))


def on_node(sandbox: Sandbox, node: SandboxNode, command: str) -> str:
    """What a command for bash says on a node."""
    argv = control.enter_argv(sandbox, node, ["bash", "-c", command])
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def folder_of(sandbox: Sandbox) -> str:
    """Where nodes keep environments."""
    return f"{sandbox.home}/.dtctl/node/envs"


def environments(sandbox: Sandbox, node: SandboxNode) -> list[str]:
    """Names of the environments of a node."""
    listed = on_node(sandbox, node, f"ls {folder_of(sandbox)} 2>/dev/null || true").split()
    return sorted(name for name in listed if len(name) == 32)


def test_requirements_are_locked_and_installed_once(project: Project, sandbox: Sandbox, index: Path) -> None:
    write_spec(project, requirements="requirements.txt", index=[str(index)])
    project.write("requirements.txt", "alpha\n")
    project.write("train.py", SHOW.format(first="alpha"))
    first = project.run("launch", "--name", "first")
    assert first.code == 0, first.err
    assert first.out.count("has alpha 1.0") == 3
    for node in sandbox.nodes:
        (made,) = environments(sandbox, node)
        assert f"[{node.name}" in first.out
        assert f"runs in {folder_of(sandbox)}/{made}" in first.out
        assert json.loads(on_node(sandbox, node, f"cat {folder_of(sandbox)}/{made}/dtctl.json"))["packages"] == 2
    assert "uv has installed 2 packages" in first.err
    lock = (project.folder / "requirements.txt.dtctl.lock").read_text()
    assert "alpha==1.0" in lock
    assert lock.count("--hash=sha256:") == 2

    lines = first.err
    again = project.run("launch", "--name", "again")
    assert again.code == 0, again.err
    assert "uv " not in again.err
    assert "its lock was made" in lines
    assert "its lock was made" not in again.err
    assert (project.folder / "requirements.txt.dtctl.lock").read_text() == lock

    checked = project.run("validate")
    assert "2 packages of requirements.txt for Python" in checked.out
    shown = project.run("launch", "--dry-run")
    assert "environment: 2 packages of requirements.txt" in shown.err
    assert f"/envs/{made}/bin/python" in shown.out

    cleaned = project.run("clean", "--older", "0", "--yes")
    assert cleaned.code == 0, cleaned.err
    assert [environments(sandbox, node) for node in sandbox.nodes] == [[], [], []]
    assert on_node(sandbox, sandbox.nodes[0], f"ls {folder_of(sandbox)}") == ""


def test_a_file_with_hashes_is_its_own_lock(project: Project, sandbox: Sandbox, index: Path) -> None:
    digest = hashlib.sha256((index / "beta-1.2-py3-none-any.whl").read_bytes()).hexdigest()
    write_spec(project, requirements="requirements.txt", index=[str(index)])
    project.write("requirements.txt", f"beta==1.2 --hash=sha256:{digest}\n")
    project.write("train.py", SHOW.format(first="beta"))
    done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("has beta 1.2") == 3
    assert not (project.folder / "requirements.txt.dtctl.lock").exists()

    project.write("requirements.txt", f"beta==1.2 --hash=sha256:{digest[::-1]}\n")
    refused = project.run("launch")
    assert refused.code == 6
    assert "node1: requirements.txt:1: beta: uv:" in refused.err
    assert "Hash mismatch" in refused.err


def test_a_wheel_of_the_project_is_brought(project: Project, sandbox: Sandbox, index: Path) -> None:
    write_spec(project, requirements="requirements.txt", index=[str(index)])
    make_wheel(project.folder / "wheels", "private", "0.3", ["beta"])
    project.write("requirements.txt", "./wheels/private-0.3-py3-none-any.whl\n")
    project.write("train.py", SHOW.format(first="private"))
    done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("has private 0.3") == 3


def test_requirements_may_change_between_launches(project: Project, sandbox: Sandbox, index: Path) -> None:
    write_spec(project, requirements="requirements.txt", index=[str(index)])
    make_wheel(index, "private", "0.3")
    project.write("requirements.txt", "private\n")
    project.write("train.py", SHOW.format(first="private"))
    assert project.run("launch").code == 0
    # The same version from elsewhere: the hash in the old lock is another file's. And the lock, which is made anew by
    # the launch, is one of the files that it sends.
    make_wheel(project.folder / "wheels", "private", "0.3", ["beta"])
    project.write(".gitignore", "wheels/\n")
    project.write("requirements.txt", "./wheels/private-0.3-py3-none-any.whl\nalpha\n")
    done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("has private 0.3") == 3
    assert "not sent" not in done.err, "the wheels go along"


@pytest.fixture
def served(sandbox: Sandbox, index: Path) -> Iterator[str]:
    """The same wheels as an index of the network (PEP 503), at an address that the hosts reach."""
    for wheel in [*index.glob("*.whl")]:
        page = index / "simple" / wheel.name.partition("-")[0] / "index.html"
        page.parent.mkdir(parents=True)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        page.write_text(f'<a href="../../{wheel.name}#sha256={digest}">{wheel.name}</a>')
    server = ThreadingHTTPServer((sandbox.bridge_address, 0), partial(SimpleHTTPRequestHandler, directory=str(index)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{sandbox.bridge_address}:{server.server_port}/simple"
    server.shutdown()
    server.server_close()


def test_a_project_with_uv_lock(project: Project, sandbox: Sandbox, served: str) -> None:
    write_spec(project, project=".", index=served)
    project.write(
        "pyproject.toml",
        '[project]\nname = "job"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["alpha"]\n'
        '[dependency-groups]\ndev = ["beta"]\n',
    )
    missing = project.run("launch")
    assert missing.code == 4
    assert "uv.lock cannot be read" in missing.err
    assert "uv lock" in missing.err
    env = {**os.environ, "UV_DEFAULT_INDEX": served}
    subprocess.run([find_uv(), "lock", "--quiet"], cwd=project.folder, env=env, check=True)
    project.write("train.py", SHOW.format(first="alpha"))
    done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("has alpha 1.0") == 3
    assert "2 packages of uv.lock" in done.err, "not the project itself"
    assert project.run("launch").err.count("uv installs") == 0


def slow_uv(sandbox: Sandbox, seconds: float) -> str:
    """Give all nodes a uv that takes its time; its folder."""
    script = f'#!/bin/sh\necho $$ >> ~/uv-calls\nsleep {seconds}\nexec {find_uv()} "$@"\n'
    for node in sandbox.nodes:
        quoted = shlex.quote(script)
        on_node(sandbox, node, f"mkdir -p {sandbox.home}/.local/bin; printf %s {quoted} > {sandbox.home}/.local/bin/uv")
        on_node(sandbox, node, f"chmod +x {sandbox.home}/.local/bin/uv; rm -f {sandbox.home}/uv-calls")
    return f"{sandbox.home}/.local/bin"


@pytest.fixture
def slow(sandbox: Sandbox) -> Iterator[None]:
    """All nodes have a uv that takes a second for each call."""
    folder = slow_uv(sandbox, 1.0)
    yield
    for node in sandbox.nodes:
        on_node(sandbox, node, f"rm -rf {folder}/uv {sandbox.home}/uv-calls")


def calls_of_uv(sandbox: Sandbox, node: SandboxNode) -> int:
    return int(on_node(sandbox, node, f"cat {sandbox.home}/uv-calls 2>/dev/null | wc -l"))


def test_two_launches_at_once_make_it_once(project: Project, sandbox: Sandbox, index: Path, slow: None) -> None:
    write_spec(project, requirements="requirements.txt", index=[str(index)])
    project.write("requirements.txt", "beta  # of two launches\n")
    project.write("train.py", SHOW.format(first="beta"))
    both = [project.start("launch", "--name", f"{project.unique}-{number}") for number in (1, 2)]
    for process in both:
        done = project.finish(process)
        assert done.code == 0, done.err
        assert done.out.count("has beta 1.2") == 3
    assert [calls_of_uv(sandbox, node) for node in sandbox.nodes] == [2, 2, 2], "venv and sync"


def test_what_a_kill_has_left_is_made_again(project: Project, sandbox: Sandbox, index: Path, slow: None) -> None:
    write_spec(project, requirements="requirements.txt", index=[str(index)])
    project.write("requirements.txt", "beta\nalpha  # of a kill\n")
    project.write("train.py", SHOW.format(first="alpha"))
    launch = project.start("launch", "--name", "killed")
    node = sandbox.nodes[0]
    wait_until(lambda: calls_of_uv(sandbox, node) == 2, what="uv installs")
    before = workers(node)
    program = next(pid for pid, line in before.items() if " -I -S -c " in line)
    os.kill(program, signal.SIGKILL)
    done = project.finish(launch)
    assert done.code != 0
    wait_until(lambda: not any("uv" in line for line in workers(node).values()), what="uv has ended with its parent")
    remains = on_node(sandbox, node, f"cd {folder_of(sandbox)}; ls *.claim").removesuffix(".claim")
    assert remains in environments(sandbox, node)
    assert "dtctl.json" not in on_node(sandbox, node, f"ls {folder_of(sandbox)}/{remains}")

    again = project.run("launch", "--name", "again")
    assert again.code == 0, again.err
    assert again.out.count("has alpha 1.0") == 3
    assert on_node(sandbox, node, f"ls {folder_of(sandbox)}/*.claim* 2>/dev/null || true") == ""
