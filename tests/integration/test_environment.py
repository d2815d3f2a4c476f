"""`job.environment`: uv makes it on every node, once, from a lock with hashes, and workers run in it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dtctl.launch.files.environment import require_local_uv
from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests.facts import missing
from tests.hosts import Project, wait_until, workers

pytestmark = pytest.mark.usefixtures("sandbox")

SHOW = """\
import sys
import {first}
print("runs in", sys.prefix, flush=True)
print("has", {first}.VERSION, flush=True)
"""


def make_wheel(
    folder: Path, name: str, version: str, needs: Sequence[str] = (), tag: str = "py3-none-any", data: bytes = b""
) -> Path:
    """Write a wheel with one module, and a file with `data` next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {each}\n" for each in needs)
    files = {
        f"{name}.py": f"VERSION = '{name} {version}'\n".encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    if data:
        files[f"{name}.bin"] = data
    rows = []
    for inner, contents in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents).digest()).rstrip(b"=").decode()
        rows.append(f"{inner},sha256={digest},{len(contents)}\n")
    with zipfile.ZipFile(path, "w") as wheel:
        for inner, contents in {**files, f"{info}/RECORD": f"{''.join(rows)}{info}/RECORD,,\n".encode()}.items():
            wheel.writestr(zipfile.ZipInfo(inner), contents)
    return path


BACKEND = """\
import zipfile

NAME, VERSION, TAG = "{name}", "{version}", "{tag}"

def get_requires_for_build_wheel(settings=None):
    return []

def build_wheel(folder, settings=None, metadata=None):
    name = f"{{NAME}}-{{VERSION}}-{{TAG}}.whl"
    with zipfile.ZipFile(f"{{folder}}/{{name}}", "w") as wheel:
        info = f"{{NAME}}-{{VERSION}}.dist-info"
        for file, text in (
            (f"{{NAME}}.py", f"VERSION = '{{NAME}} {{VERSION}}'\\n"),
            (f"{{info}}/METADATA", f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: {{VERSION}}\\n"),
            (f"{{info}}/WHEEL", f"Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: {{TAG}}\\n"),
            (f"{{info}}/RECORD", ""),
        ):
            wheel.writestr(zipfile.ZipInfo(file), text)
    return name
"""


def make_sources(folder: Path, name: str, version: str, tag: str = "py3-none-any") -> Path:
    """Write a source distribution, whose build makes a wheel with this tag and needs no other package."""
    folder.mkdir(parents=True, exist_ok=True)
    path, top = folder / f"{name}-{version}.tar.gz", f"{name}-{version}"
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND.format(name=name, version=version, tag=tag),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    with tarfile.open(path, "w:gz") as archive:
        for inner, text in files.items():
            entry = tarfile.TarInfo(f"{top}/{inner}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
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


def test_sources_of_a_package_are_built_here(project: Project, sandbox: Sandbox, index: Path) -> None:
    make_wheel(index, "alpha", "2.0", ["sources==4.9"])
    make_sources(index, "sources", "4.9")
    write_spec(project, requirements="requirements.txt", index=[str(index)])
    project.write("requirements.txt", "alpha\n")
    project.write("train.py", SHOW.format(first="alpha") + "import sources\nprint('needs', sources.VERSION)\n")
    first = project.run("launch", "--yes", "--name", "sources")
    assert not first.code, first.err
    assert "has alpha 2.0" in first.out
    assert "needs sources 4.9" in first.out
    assert "1 of them built here from its sources (sources)" in first.err
    again = project.run("launch", "--name", "sources-again")
    assert not again.code, again.err
    assert "uv installs" not in again.err


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
    assert "node1, node2, node3: requirements.txt:1: beta: uv:" in " ".join(refused.err.split())
    assert refused.err.count("Hash mismatch") == 1, "what nodes have in common is said once"


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


class AskingHandler(SimpleHTTPRequestHandler):
    """A server of files that asks for a password."""

    password = ""

    def do_GET(self) -> None:
        """Send a file to those who have the password."""
        expected = "Basic " + base64.b64encode(f"ann:{self.password}".encode()).decode()
        if not self.password or self.headers.get("Authorization") == expected:
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="packages"')
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextlib.contextmanager
def serve(index: Path, address: str, password: str = "") -> Iterator[str]:
    """The same files as an index of the network (PEP 503), for all or for user `ann`."""
    for path in [*index.glob("*.whl"), *index.glob("*.tar.gz")]:
        page = index / "simple" / path.name.partition("-")[0] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with page.open("a") as file:
            file.write(f'<a href="../../{path.name}#sha256={digest}">{path.name}</a>\n')
    handler = type("Handler", (AskingHandler,), {"password": password})
    server = ThreadingHTTPServer((address, 0), partial(handler, directory=str(index)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{address}:{server.server_port}/simple"
    server.shutdown()
    server.server_close()


@pytest.fixture
def served(sandbox: Sandbox, index: Path) -> Iterator[str]:
    """An index at an address that the hosts reach."""
    with serve(index, sandbox.bridge_address) as url:
        yield url


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
    subprocess.run([require_local_uv(), "lock", "--quiet"], cwd=project.folder, env=env, check=True)
    project.write("train.py", SHOW.format(first="alpha"))
    done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("has alpha 1.0") == 3
    assert "2 packages of uv.lock" in done.err, "not the project itself"
    assert project.run("launch").err.count("uv installs") == 0


def with_wheels(project: Project, text: str) -> None:
    """Write pyproject.toml, its lock made of the folder, and the folder."""
    project.write("pyproject.toml", text)
    argv = [require_local_uv(), "lock", "--quiet", "--no-index", "--find-links"]
    subprocess.run([*argv, str(Path.home() / ".cache" / f"dtctl-index-{os.getpid()}")], cwd=project.folder, check=True)


def test_the_index_of_the_spec_replaces_variables_of_nodes(project: Project, index: Path, tmp_path: Path) -> None:
    job = {"script": "train.py", "kind": "direct"}
    project.write("requirements.txt", "alpha\n")
    project.write("train.py", SHOW.format(first="alpha"))
    # The local node has the variables of the launch.
    env = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    with serve(index, "127.0.0.1") as url:
        environment = {"requirements": "requirements.txt", "index": url}
        cluster = {"transport": "local", "slots": 1, "workdir": str(tmp_path / "node")}
        project.write("dtctl.yaml", json.dumps({"cluster": cluster, "job": job | {"environment": environment}}))
        done = project.run("launch", env=env)
    assert done.code == 0, done.err
    assert "has alpha 1.0" in done.out


def test_extras_and_groups_of_a_project(project: Project, sandbox: Sandbox, index: Path) -> None:
    """A folder of wheels is the index, of which uv.lock has no digests."""
    make_wheel(index, "gamma", "2.0")
    make_wheel(index, "delta", "3.0")
    with_wheels(
        project,
        '[project]\nname = "job"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["alpha"]\n'
        '[project.optional-dependencies]\ngpu = ["gamma"]\n[dependency-groups]\ntrain = ["delta"]\n',
    )
    project.write("train.py", "import gamma, delta, alpha; print('has', gamma.VERSION, delta.VERSION)\n")
    write_spec(project, project=".", index=[str(index)], extras=["gpu"], groups=["train"])
    shown = project.run("launch", "--dry-run")
    assert "environment: 4 packages of uv.lock with gpu, train for Python" in shown.err
    done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("has gamma 2.0 delta 3.0") == 3
    write_spec(project, project=".", index=[str(index)])
    without = project.run("launch")
    assert without.code == 8, "another environment, which lacks them"
    assert "No module named 'gamma'" in without.out + without.err


def test_an_index_that_nodes_do_not_reach_is_said_once(project: Project, sandbox: Sandbox, index: Path) -> None:
    """This machine reaches its own 127.0.0.1, where the hosts have nothing."""
    with serve(index, "127.0.0.1") as url:
        write_spec(project, requirements="requirements.txt", index=url)
        project.write("requirements.txt", "alpha\n")
        project.write("train.py", SHOW.format(first="alpha"))
        done = project.run("launch")
    assert done.code == 6, done.err
    host = url.split("/")[2]
    assert f"node1, node2, node3: the node cannot reach the package index {host}: connection refused" in " ".join(
        done.err.split()
    )
    assert done.err.count("connection refused") == 1
    assert done.err.count("set `job.environment.index` to an index that nodes reach") == 1
    assert "requirements.txt:" not in done.err, "the file is not wrong"


def make_uv_wheel(folder: Path, machine: str) -> str:
    """Write a wheel of the local uv's version with the static program for a processor; return the program's text."""
    said = subprocess.run([require_local_uv(), "--version"], capture_output=True, text=True, check=True).stdout
    wheel = make_wheel(folder, "uv", said.split()[1], tag=f"py3-none-musllinux_1_1_{machine}")
    text = f"#!/bin/sh\necho uv for {machine}\n"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(f"uv-{said.split()[1]}.data/scripts/uv", text)
    return text


def test_nodes_of_another_processor_get_the_static_uv_for_it(project: Project, sandbox: Sandbox, index: Path) -> None:
    project.write("requirements.txt", "beta  # for another processor\n")
    project.write("train.py", "")
    write_spec(project, requirements="requirements.txt", index=[str(index)], platform="aarch64")
    without = project.run("launch")
    assert without.code == 4, without.err
    assert not missing(" ".join(without.err.split()), "uv aarch64 musllinux wheel `job.environment.index`")
    text = make_uv_wheel(index, "aarch64")
    done = project.run("launch")
    assert done.code == 6, done.err
    assert not missing(" ".join(done.err.split()), "processor x86_64 aarch64")
    for node in sandbox.nodes:
        brought = on_node(sandbox, node, f"grep -rlF 'uv for aarch64' {sandbox.home}/.dtctl/node/data")
        assert on_node(sandbox, node, f"cat {brought}; test -x {brought} && echo is executable").endswith(
            f"{text.strip()}\nis executable"
        )


PASSWORD = "s3cret-of-the-index"


def list_files_with(text: str, folders: Sequence[str]) -> list[str]:
    """Return the files that hold a text."""
    found = subprocess.run(["grep", "-rlF", text, *folders], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.parametrize("named_by", ["spec", "project"])
def test_an_index_that_asks_for_a_password(project: Project, sandbox: Sandbox, index: Path, named_by: str) -> None:
    variables = {"UV_INDEX_MY_CORP_USERNAME": "ann", "UV_INDEX_MY_CORP_PASSWORD": PASSWORD}
    show = "\nimport os\nprint('knows', [name for name in os.environ if name.startswith('UV_')], flush=True)\n"
    project.write("train.py", SHOW.format(first="alpha") + show)
    with serve(index, sandbox.bridge_address, PASSWORD) as url:
        if named_by == "spec":
            project.write("requirements.txt", "alpha  # with a password\n")
            write_spec(project, requirements="requirements.txt", index=[f"my.corp={url}"])
            refused = project.run("launch")
            assert refused.code == 4, refused.err
            assert "401" in refused.err
        else:
            project.write(
                "pyproject.toml",
                '[project]\nname = "job"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["alpha"]\n'
                f'[[tool.uv.index]]\nname = "my-corp"\nurl = "{url}"\ndefault = true\n',
            )
            write_spec(project, project=".")
            argv = [require_local_uv(), "lock", "--quiet"]
            subprocess.run(argv, cwd=project.folder, env={**os.environ, **variables}, check=True)
        done = project.run("launch", env=variables)
        assert done.code == 0, done.err
        assert done.out.count("has alpha 1.0") == 3
        assert done.out.count("knows []") == 3, "it is for uv alone"
        assert PASSWORD not in done.out + done.err + project.run("launch", "--dry-run", env=variables).out
    assert list_files_with(PASSWORD, [str(project.folder)]) == []
    for node in sandbox.nodes:
        assert on_node(sandbox, node, f"grep -rlF {PASSWORD} {sandbox.home}/.dtctl || true") == ""


def slow_uv(sandbox: Sandbox, seconds: float) -> str:
    """Give all nodes a uv that takes its time; its folder."""
    script = f'#!/bin/sh\necho $$ >> ~/uv-calls\nsleep {seconds}\nexec {require_local_uv()} "$@"\n'
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


def test_wheels_are_relayed_to_nodes_that_reach_no_index(project: Project, sandbox: Sandbox, index: Path) -> None:
    """This machine reaches its own 127.0.0.1, where the hosts have nothing."""
    make_wheel(project.folder / "wheels", "private", "0.4", ["beta"])
    project.write("requirements.txt", "alpha  # relayed\n./wheels/private-0.4-py3-none-any.whl\n")
    project.write("train.py", SHOW.format(first="alpha") + "import private; print('and', private.VERSION)\n")
    with serve(index, "127.0.0.1") as url:
        write_spec(project, requirements="requirements.txt", index=url)
        without = project.run("launch")
        assert without.code == 6, without.err
        assert "the node cannot reach the package index" in " ".join(without.err.split())
        assert "`job.environment.wheels: relay`" in " ".join(without.err.split())

        write_spec(project, requirements="requirements.txt", index=url, wheels="relay")
        assert "3 packages of requirements.txt" not in project.run("validate").out
        shown = project.run("launch", "--dry-run")
        assert "whose wheels this machine downloads and sends" in " ".join(shown.err.split())
        done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("has alpha 1.0") == 3
    assert done.out.count("and private 0.4") == 3
    again = project.run("launch")
    assert again.code == 0, again.err
    assert "uv " not in again.err
    assert "3 packages of requirements.txt" in project.run("validate").out


def test_a_project_is_relayed(project: Project, sandbox: Sandbox, index: Path) -> None:
    """uv.lock names an index of this machine; the nodes have variables about another one."""
    make_wheel(index, "gamma", "2.1+cpu")
    make_wheel(index, "gamma", "2.1+cpu", tag="cp310-cp310-macosx_11_0_arm64")  # whose digest is in the lock as well
    with serve(index, "127.0.0.1") as url:
        project.write(
            "pyproject.toml",
            '[project]\nname = "job"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["gamma", "alpha"]\n'
            f'[[tool.uv.index]]\nurl = "{url}"\ndefault = true\n',
        )
        subprocess.run([require_local_uv(), "lock", "--quiet"], cwd=project.folder, check=True)
        write_spec(project, project=".", wheels="relay")
        project.write("train.py", SHOW.format(first="gamma"))
        done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("has gamma 2.1+cpu") == 3


def test_a_python_that_nodes_lack_is_named(project: Project, sandbox: Sandbox, index: Path) -> None:
    write_spec(project, requirements="requirements.txt", index=[str(index)], wheels="relay", python="3.77")
    project.write("requirements.txt", "beta\n")
    project.write("train.py", SHOW.format(first="beta"))
    done = project.run("launch")
    assert done.code == 6, done.err
    text = " ".join(done.err.split())
    assert "node1, node2, node3: the node has no Python 3.77 that uv can use" in text
    assert "set `job.environment.python` to a version that nodes have" in text
