"""The node's half gets onto a node: started by the real command in a real shell, from whatever is kept there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtctl.supervisor import bootstrap, frames

HELLO = frames.pack_json({"op": "hello", "ports": []})


@dataclass(frozen=True)
class Answer:
    message: dict[str, object]
    stderr: str
    code: int


def call(workdir: str, *, shell: str = "sh", sent: bytes = HELLO, home: Path | None = None) -> Answer:
    env = {**os.environ, "HOME": str(home or Path.home()), "PYTHONPATH": "/nowhere"}
    done = subprocess.run(
        [shell, "-c", bootstrap.command(sys.executable)],
        input=bootstrap.opening(workdir) + sent,
        capture_output=True,
        check=False,
        env=env,
        timeout=20,
    )
    found = frames.Parser().feed(done.stdout)
    return Answer(frames.decode(found[0][2]) if found else {}, done.stderr.decode(), done.returncode)


def kept(workdir: Path) -> dict[str, Path]:
    """The kept modules of the newest version, by name."""
    (folder,) = (workdir / "lib").glob("*/dtctl/supervisor")
    return {path.stem: path for path in folder.glob("*.py")}


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_node_without_anything_answers(tmp_path: Path, shell: str) -> None:
    answer = call(str(tmp_path / "a b'c"), shell=shell)
    assert (answer.message["op"], answer.stderr, answer.code) == ("hello", "", 0)
    assert answer.message["python"] == ".".join(map(str, sys.version_info[:3]))
    assert answer.message["workdir"] == str(tmp_path / "a b'c")


def test_what_is_kept_is_all_that_is_used_and_private(tmp_path: Path) -> None:
    call(str(tmp_path))
    found = kept(tmp_path)
    assert sorted(found) == sorted(bootstrap.MODULES)
    real = Path(bootstrap.__file__).parent
    assert all(path.read_bytes() == (real / path.name).read_bytes() for path in found.values())
    inside = list((tmp_path / "lib").rglob("*"))
    assert not [path for path in inside if path.stat().st_mode & 0o077], "others may read or write it"
    assert not [path for path in inside if path.suffix == ".part"]


def test_every_module_that_a_module_imports_is_sent() -> None:
    import ast

    real = Path(bootstrap.__file__).parent
    for name in bootstrap.MODULES:
        for node in ast.walk(ast.parse((real / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dtctl"):
                parts = [node.module.rpartition(".")[2]] if node.module != "dtctl.supervisor" else []
                for wanted in parts or [alias.name for alias in node.names]:
                    assert wanted in bootstrap.MODULES, f"{name} imports {wanted}"


def test_the_second_call_writes_nothing(tmp_path: Path) -> None:
    call(str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in kept(tmp_path).values()}
    assert call(str(tmp_path)).message["op"] == "hello"
    assert {path: path.stat().st_mtime_ns for path in kept(tmp_path).values()} == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied, as by a power failure": lambda path: os.truncate(path, 0),
    "flipped bit": flip,
    "replaced": lambda path: path.write_text("raise SystemExit('not ours')\n"),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("module", ["main", "frames"])
def test_a_damaged_module_is_noticed_and_written_again(tmp_path: Path, kind: str, module: str) -> None:
    call(str(tmp_path))
    found = kept(tmp_path)[module]
    right = found.read_bytes()
    DAMAGE[kind](found)
    answer = call(str(tmp_path))
    assert (answer.message.get("op"), answer.stderr) == ("hello", "")
    assert found.read_bytes() == right


def test_two_modules_do_not_pass_for_one_another(tmp_path: Path) -> None:
    call(str(tmp_path))
    found = kept(tmp_path)
    texts = found["facts"].read_bytes(), found["group"].read_bytes()
    found["facts"].write_bytes(texts[1])
    found["group"].write_bytes(texts[0])
    assert call(str(tmp_path)).message["op"] == "hello"
    assert found["facts"].read_bytes() == texts[0]


def test_a_damaged_compiled_file_is_thrown_away(tmp_path: Path) -> None:
    call(str(tmp_path))
    compiled = list((tmp_path / "lib").rglob("*.pyc"))
    assert compiled, "nothing was compiled, so every launch costs the compiling"
    for path in compiled:
        os.truncate(path, path.stat().st_size - 20)
    answer = call(str(tmp_path))
    assert (answer.message.get("op"), answer.stderr) == ("hello", "")


def test_other_versions_are_kept_for_a_while_and_then_removed(tmp_path: Path) -> None:
    for number in range(5):
        old = tmp_path / "lib" / f"{number:032d}"
        old.mkdir(parents=True)
        os.utime(old, (number, number))
    call(str(tmp_path))
    left = sorted(path.name for path in (tmp_path / "lib").iterdir())
    assert [name for name in left if name.startswith("0000")] == [f"{3:032d}", f"{4:032d}"]
    assert len(left) == 3


def test_the_workdir_may_be_below_the_home(tmp_path: Path) -> None:
    assert call("~/.dtctl/node", home=tmp_path).message["workdir"] == str(tmp_path / ".dtctl" / "node")
    assert call("relative/place", home=tmp_path).message["workdir"] == str(tmp_path / "relative" / "place")
    assert (tmp_path / "relative" / "place" / "lib").is_dir()


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
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", small], check=True)
    try:
        answer = call(str(small))
    finally:
        subprocess.run(["umount", small], check=True)
    assert (answer.message["op"], answer.message["code"]) == ("error", "disk-full")


def test_a_stream_that_ends_early_ends_the_node_quietly(tmp_path: Path) -> None:
    whole = bootstrap.opening(str(tmp_path))
    for length in (0, 3, 6, 1000, len(whole) - 1):
        done = subprocess.run(
            ["sh", "-c", bootstrap.command(sys.executable)], input=whole[:length], capture_output=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", b""), length
    assert not (tmp_path / "lib").exists()


def test_an_old_python_is_named_in_an_answer_and_not_by_a_syntax_error() -> None:
    """The loader itself has to run there; here, as far as a new Python can tell."""
    import ast

    for text in (bootstrap._FIRST, bootstrap._LOADER):
        ast.parse(text, feature_version=(3, 4))
    assert "f'" not in bootstrap._LOADER
    assert 'f"' not in bootstrap._LOADER


def test_the_command_has_no_newline_and_nothing_of_the_job(tmp_path: Path) -> None:
    command = bootstrap.command("/opt/my python/bin/python3")
    assert "\n" not in command
    assert command.startswith("exec '/opt/my python/bin/python3' -I -S -c ")
    assert len(command) < 1000


def test_nothing_of_the_bundle_depends_on_this_machine() -> None:
    digest, bundle = bootstrap._bundle()
    import zlib

    files = json.loads(zlib.decompress(bundle))
    assert len(digest) == 32
    assert str(Path.home()) not in json.dumps(files)
