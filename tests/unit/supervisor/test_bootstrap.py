"""The node's half gets onto a node: started by the real command in a real shell, from whatever is kept there."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import lzma
import os
import py_compile
import subprocess
import sys
import time
import types
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtctl.errors import NodeError
from dtctl.launch.control.link import NodeLink, open_program
from dtctl.supervisor import bootstrap, frames, requests
from dtctl.supervisor.messages.attempt import PortProbed, ProbePorts
from dtctl.supervisor.messages.base import Quit
from dtctl.supervisor.messages.setup import Hello, NodeDescription
from dtctl.transport.base import Target
from dtctl.transport.local import LocalStream, LocalTransport

SETUP = "dtctl.supervisor.setup"
HELLO = frames.pack_json({"op": "hello", "ports": []})


@dataclass(frozen=True)
class Answer:
    message: dict[str, object]
    stderr: str
    code: int


def call(
    workdir: str, *, shell: str = "sh", sent: bytes = HELLO, home: Path | None = None, has_texts: bool = False
) -> Answer:
    env = {**os.environ, "HOME": str(home or Path.home()), "PYTHONPATH": "/nowhere"}
    done = subprocess.run(
        [shell, "-c", bootstrap.format_bootstrap_command(sys.executable)],
        input=bootstrap.build_opening_bytes(workdir, SETUP, has_texts=has_texts) + sent,
        capture_output=True,
        check=False,
        env=env,
        timeout=600,
    )
    found = frames.FrameParser().feed(done.stdout)
    return Answer(frames.decode_message(found[0][2]) if found else {}, done.stderr.decode(), done.returncode)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_node_without_anything_answers(tmp_path: Path, shell: str) -> None:
    answer = call(str(tmp_path / "a b'c"), shell=shell)
    assert (answer.message["op"], answer.stderr, answer.code) == ("hello", "", 0)
    assert answer.message["python"] == ".".join(map(str, sys.version_info[:3]))
    assert answer.message["workdir"] == str(tmp_path / "a b'c")


def test_nothing_of_it_is_kept_there(tmp_path: Path) -> None:
    call(str(tmp_path / "work"))
    assert [path.name for path in (tmp_path / "work").iterdir()] == []
    assert (tmp_path / "work").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", requests.ANSWERED_BY)
def test_a_node_gets_every_module_that_its_request_may_import(name: str) -> None:
    answering = requests.find_module(requests.ANSWERED_BY[name][0])[0]
    sent = bootstrap._collect_module_codes([bootstrap.MAIN, answering])
    assert {bootstrap.MAIN, answering} <= set(sent)
    for module in sent:
        # Nodes may have Python 3.8.
        for node in ast.walk(ast.parse(bootstrap._read_module_text(module), feature_version=(3, 8))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dtctl"):
                whole = node.module in bootstrap.PACKAGES
                wanted = [f"{node.module}.{alias.name}" for alias in node.names] if whole else [node.module]
                assert set(wanted) <= set(sent), f"{module} imports {wanted}"


def test_a_launch_sends_nothing_of_other_requests() -> None:
    sent = bootstrap._collect_module_codes([bootstrap.MAIN, SETUP])
    assert not {"dtctl.supervisor.outputs", "dtctl.supervisor.clean", "dtctl.supervisor.probe.main"} & set(sent)


def test_what_each_node_gets_stays_small() -> None:
    """Over 10 Mbit/s, each kilobyte here delays a launch on 32 nodes by 26 ms; 328 KB more than doubled it."""
    assert len(bootstrap.build_opening_bytes("~/x", SETUP)) < 85_000
    for name in requests.ANSWERED_BY:
        answering = requests.find_module(requests.ANSWERED_BY[name][0])[0]
        assert len(bootstrap.build_opening_bytes("~/x", answering)) < 121_000, answering
        assert len(bootstrap.load_texts(answering)) < 80_000, answering  # They have to fit into one frame, too.


@pytest.mark.parametrize("name", bootstrap._collect_module_codes([bootstrap.MAIN, SETUP]))
def test_modules_mean_the_same_without_comments_and_docstrings(name: str) -> None:
    def describe(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value, node.value.end_lineno, node.value.end_col_offset = "", 0, 0
                node.end_lineno = node.end_col_offset = 0
            # A block that ends with a docstring ends earlier without it.
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.If | ast.With | ast.Try | ast.ExceptHandler):
                node.end_lineno = node.end_col_offset = 0
        return ast.dump(tree, include_attributes=True)

    assert describe(bootstrap._strip_text(name)) == describe(bootstrap._read_module_text(name))


def test_tracebacks_have_the_lines_of_the_modules() -> None:
    lines = {
        line
        for code in bootstrap._compile_module("dtctl.folders", []).co_consts
        if isinstance(code, types.CodeType)
        for _, _, line in code.co_lines()
    }
    for number, text in enumerate(bootstrap._read_module_text("dtctl.folders").split("\n"), 1):
        if text.startswith(("    raise ", "        raise ")):
            assert number in lines, text


def test_packed_modules_are_kept_for_the_next_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packed: list[str] = []
    pack = bootstrap._pack_codes
    monkeypatch.setattr(bootstrap, "_pack_codes", lambda answering: packed.append(answering) or pack(answering))

    def load() -> bytes:
        bootstrap._load_packed_modules.cache_clear()
        return bootstrap._load_packed_modules(SETUP, "codes")

    first = load()
    (kept,) = (tmp_path / "dtctl" / "program").iterdir()
    assert (load(), len(packed)) == (first, 1)
    # Nothing is sent from a damaged file, from one of another version, or from a folder of others.
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-1], b"x" + whole[1:], whole[:-1] + b"x"):
        kept.write_bytes(damaged)
        before = len(packed)
        assert (load(), len(packed), kept.read_bytes()) == (first, before + 1, whole)
    kept.parent.chmod(0o777)
    before = len(packed)
    assert (load(), len(packed)) == (first, before + 1)
    bootstrap._load_packed_modules.cache_clear()


def test_versions_that_are_used_in_turn_are_packed_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packed: list[int] = []

    def load(version: int) -> bytes:
        def pack() -> bytes:
            packed.append(version)
            return b"program %d" % version

        return bootstrap.load_kept_file("a", hashlib.sha256(b"%d" % version).digest(), pack)

    for version in (1, 2, 1, 2):
        assert load(version) == b"program %d" % version
    assert packed == [1, 2]
    for version in range(3, 12):
        load(version)
    assert len([*(tmp_path / "dtctl" / "program").iterdir()]) == bootstrap.MAX_KEPT_VERSIONS


PLANTED = "raise SystemExit('not ours')\n"


def test_many_links_that_begin_at_once_share_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    reach = bootstrap._collect_module_codes

    def slow_reach(modules: list[str]) -> dict[str, types.CodeType]:
        made.append(list(modules))
        time.sleep(0.1)  # so that all the others arrive meanwhile
        return reach(modules)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bootstrap, "_collect_module_codes", slow_reach)
    bootstrap._load_packed_modules.cache_clear()
    module = requests.find_module("start")[0]
    with ThreadPoolExecutor(8) as links:
        opened = set(links.map(lambda _: bootstrap.build_opening_bytes("~/x", module), range(8)))
    assert (len(opened), len(made)) == (1, 1)


@pytest.mark.parametrize("place", ["lib", "lib/{digest}/dtctl/supervisor", "dtctl/supervisor", "."])
def test_no_module_in_the_workdir_is_run(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place.format(digest="0" * 32)
    (folder / "__pycache__").mkdir(parents=True)
    for name in ("main", "frames", "facts", "folders", "zlib", "json", "__init__"):
        (folder / f"{name}.py").write_text(PLANTED)
        py_compile.compile(str(folder / f"{name}.py"))
    answer = call(str(tmp_path))
    assert (answer.message.get("op"), answer.stderr) == ("hello", "")


def test_folders_called_lib_and_code_of_the_users_own_stay_as_they_are(tmp_path: Path) -> None:
    for name in ("lib/numpy/x.py", "lib/0123456789abcdef0123456789abcdef/y", "code/config.json", "code/config/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        assert call(str(tmp_path)).message["op"] == "hello"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_python_of_another_version_requests_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link as in a launch, where further requests may arrive before the text."""
    monkeypatch.setattr(bootstrap, "_compiled_for", lambda: "another")
    with (
        contextlib.closing(LocalTransport().connect(Target(name="n", address="", port=0))) as connection,
        ThreadPoolExecutor(1) as thread,
    ):
        link = open_program(connection, Hello(), node="n", python=sys.executable, workdir=str(tmp_path))
        link.send(ProbePorts(ports=[1]))
        description = thread.submit(link.expect, NodeDescription).result(60)
        assert description.workdir == str(tmp_path)
        assert link.expect(PortProbed).port in (0, 1)
        link.send(Quit())
        assert link.receive() is None


def test_a_node_gets_the_text_once() -> None:
    class Greedy(LocalStream):
        def __init__(self) -> None:
            self.written = b""

        def read(self, size: int) -> bytes:
            return 2 * frames.pack_frame(frames.TEXTS, b"")

        def write(self, data: bytes) -> None:
            self.written += data

    stream = Greedy()
    link = NodeLink(stream, node="n")
    link.answering = SETUP
    with pytest.raises(NodeError, match="twice"):
        link.receive()
    assert stream.written == frames.pack_frame(frames.TEXTS, bootstrap.load_texts(SETUP))


def test_a_node_that_cannot_request_gets_the_text_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_compiled_for", lambda: "another")
    answer = call(str(tmp_path), has_texts=True)
    assert (answer.message["op"], answer.stderr, answer.code) == ("hello", "", 0)


OTHER_UID = 12_345


@pytest.mark.parametrize("below", ["", "code", "runs"])
@pytest.mark.parametrize("kind", ["others write", "others own"])
def test_a_workdir_that_others_may_change_is_refused(tmp_path: Path, below: str, kind: str) -> None:
    folder = tmp_path / "work" / below
    folder.mkdir(parents=True)
    (tmp_path / "work").chmod(0o700)
    if kind == "others write":
        folder.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(folder, OTHER_UID, OTHER_UID)
    else:
        pytest.skip("only root can give a folder away")
    answer = call(str(tmp_path / "work"))
    assert (answer.message["op"], answer.message["code"]) == ("error", "foreign")
    command = str(answer.message["message"]).split("`")[1].removeprefix("sudo ")
    assert subprocess.run(command, shell=True, check=False).returncode == 0
    assert call(str(tmp_path / "work")).message["op"] == "hello", f"not mended by {command}"


def test_a_workdir_in_a_folder_where_anybody_may_rename_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert call(str(tmp_path / "open" / "work")).message["code"] == "foreign"
    (tmp_path / "open").chmod(0o1777)
    assert call(str(tmp_path / "open" / "work")).message["op"] == "hello"


def test_the_workdir_may_be_below_the_home(tmp_path: Path) -> None:
    assert call("~/.dtctl/node", home=tmp_path).message["workdir"] == str(tmp_path / ".dtctl" / "node")
    assert call("relative/place", home=tmp_path).message["workdir"] == str(tmp_path / "relative" / "place")
    assert (tmp_path / "relative" / "place").is_dir()


def test_a_workdir_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = call(str(tmp_path / "file" / "below"))
    assert (answer.message["op"], answer.message["code"]) == ("error", "workdir")
    assert str(tmp_path / "file") in str(answer.message["message"])


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs a file system of its own")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1,mode=0700", "tmpfs", small], check=True)
    try:
        answer = call(str(small / "work"))
    finally:
        subprocess.run(["umount", small], check=True)
    assert (answer.message["op"], answer.message["code"]) == ("error", "disk-full")


def test_a_stream_that_ends_early_ends_the_node_quietly(tmp_path: Path) -> None:
    whole = bootstrap.build_opening_bytes(str(tmp_path), SETUP)
    for length in (0, 3, 6, 1000, len(whole) - 1):
        done = subprocess.run(
            ["sh", "-c", bootstrap.format_bootstrap_command(sys.executable)],
            input=whole[:length],
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", b""), length
    assert not list(tmp_path.iterdir())


def test_an_old_python_is_named_in_an_answer_and_not_by_a_syntax_error() -> None:
    """The loader itself has to run there; here, as far as a new Python can tell."""
    for text in (bootstrap._FIRST, bootstrap._LOADER):
        ast.parse(text, feature_version=(3, 4))
    assert "f'" not in bootstrap._LOADER
    assert 'f"' not in bootstrap._LOADER


def test_the_command_has_no_newline_and_nothing_of_the_job(tmp_path: Path) -> None:
    command = bootstrap.format_bootstrap_command("/opt/my python/bin/python3")
    assert "\n" not in command
    assert command.startswith("exec '/opt/my python/bin/python3' -I -S -c ")
    assert len(command) < 1000


def test_nothing_of_the_bundle_depends_on_this_machine() -> None:
    texts = zlib.decompress(bootstrap.load_texts(SETUP))
    codes = lzma.decompress(bootstrap._load_modules(SETUP, "codes"))
    assert str(Path.home()).encode() not in texts
    assert os.fsencode(Path(bootstrap.__file__).parent) not in codes
