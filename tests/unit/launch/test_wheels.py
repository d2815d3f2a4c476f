"""Wheels that are downloaded for nodes without internet (`job.environment.wheels: relay`)."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.errors import NodeError, PlanError
from dtctl.launch.clean import CleanRule, list_removable_items, remove_here
from dtctl.launch.files.environment import (
    EnvironmentPush,
    LockedEnvironment,
    describe_environment,
    lock_environment,
    require_local_uv,
)
from dtctl.launch.files.wheels import choose_relayed_wheels, sum_wheel_sizes
from dtctl.spec.model import Spec
from dtctl.supervisor.messages.setup import Hello, NodeDescription
from dtctl.supervisor.setup import describe_node
from tests.integration.test_environment import make_wheel, serve
from tests.unit.launch.test_environment import clean_settings, spec_of

__all__ = ["clean_settings"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files of the index."""
    folder = tmp_path / "index"
    make_wheel(folder, "alpha", "1.0", ["beta>=1"])
    make_wheel(folder, "beta", "1.2")
    for system in ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64", "macosx_11_0_arm64"):
        make_wheel(folder, "compiled", "2.0", tag=f"cp312-cp312-{system}")
    make_wheel(folder, "foreign", "1.0", tag="cp312-cp312-win_amd64")
    make_wheel(folder, "local", "2.6.0+cpu")
    (folder / "source-1.0.tar.gz").write_bytes(b"no wheel")
    return folder


@pytest.fixture
def index(files: Path) -> Iterator[str]:
    with serve(files, "127.0.0.1") as url:
        yield url


def relayed(folder: Path, index: str, **more: object) -> Spec:
    return spec_of(folder, python="3.12", index=index, wheels="relay", **more)


def of_requirements(folder: Path, index: str, text: str, **more: object) -> Spec:
    (folder / "requirements.txt").write_text(text)
    return relayed(folder, index, requirements="requirements.txt", **more)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names_of(locked: LockedEnvironment) -> list[str]:
    return [path.name for path in locked.wheels]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_wheel_of_the_platform_is_downloaded(tmp_path: Path, files: Path, index: str, machine: str) -> None:
    own = make_wheel(tmp_path / "own", "private", "0.3")
    text = "alpha\ncompiled\nlocal\n./own/private-0.3-py3-none-any.whl\nforeign; sys_platform == 'win32'\n"
    locked = lock_environment(of_requirements(tmp_path, index, text, platform=machine), write=True)
    compiled = f"compiled-2.0-cp312-cp312-manylinux_2_17_{machine}.whl"
    expected = {"alpha-1.0-py3-none-any.whl", "beta-1.2-py3-none-any.whl", "local-2.6.0+cpu-py3-none-any.whl", compiled}
    assert {*names_of(locked)} == {own.name, *expected}
    for path in locked.wheels:
        source = own if path.name == own.name else files / path.name
        assert path.read_bytes() == source.read_bytes()
        assert f"./{path.name}" in locked.lock
    assert locked.lock.count("--hash=sha256:") == len(locked.wheels), "one for each file"
    kept = (tmp_path / "requirements.txt.dtctl.lock").read_text().split("\n")
    assert [n for n, line in enumerate(locked.lock.split("\n")) if line.startswith("./beta")] == [
        n for n, line in enumerate(kept) if line.startswith("beta==")
    ], "a line has its number in the file that the user sees"
    assert "http" not in locked.lock, "nodes ask no index"
    assert locked.short_summary.endswith("whose wheels this machine downloads and sends")


def test_a_second_launch_asks_no_server(tmp_path: Path, files: Path) -> None:
    with serve(files, "127.0.0.1") as index:
        spec = of_requirements(tmp_path, index, "alpha\n")
        assert describe_environment(spec).endswith("a launch makes it")
        dry = lock_environment(spec, write=False)
        assert not any(path.exists() for path in dry.wheels), "a dry run downloads nothing"
        first = lock_environment(spec, write=True)
    assert lock_environment(spec, write=True) == LockedEnvironment(
        **{name: getattr(first, name) for name in first.__slots__ if name not in ("is_new", "doubt")},
        is_new=False,
        doubt="",
    )
    assert dry.digest == first.digest
    assert describe_environment(spec) == first.short_summary
    first.wheels[0].unlink()
    with pytest.raises(
        PlanError, match=r"alpha: http://\S+/alpha-1\.0\S+\.whl cannot be downloaded: .*refused"
    ) as gone:
        lock_environment(spec, write=True)
    assert (gone.value.where or "").startswith("requirements.txt.dtctl.lock:")


@pytest.mark.parametrize("name", ["source", "foreign"])
def test_a_package_without_a_wheel_is_refused_by_name(tmp_path: Path, files: Path, index: str, name: str) -> None:
    path = next(files.glob(f"{name}-*"))
    spec = of_requirements(tmp_path, index, f"# pinned\n{name}==1.0 --hash=sha256:{digest_of(path)}\n")
    with pytest.raises(PlanError, match=name) as caught:
        lock_environment(spec, write=False)
    assert caught.value.where == "requirements.txt:2"
    assert "build one" in (caught.value.hint or "")


def test_a_package_of_uv_lock_without_a_wheel_is_refused(tmp_path: Path, files: Path, index: str) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "job"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["alpha", "foreign"]\n'
    )
    env = {**os.environ, "UV_DEFAULT_INDEX": index}
    subprocess.run([require_local_uv(), "lock", "--quiet"], cwd=tmp_path, env=env, check=True)
    with pytest.raises(PlanError, match="foreign") as caught:
        lock_environment(relayed(tmp_path, index, project="."), write=False)
    line = 'name = "foreign"'
    lines = (tmp_path / "uv.lock").read_text().split("\n")
    assert caught.value.where == f"uv.lock:{lines.index(line) + 1}"
    assert "build one" in (caught.value.hint or "")


def test_a_list_without_a_wheel_is_refused() -> None:
    """uv has refused such a package before; the list may be that of another version of uv."""
    listing = '[[packages]]\nname = "source"\nversion = "1.0"\nsdist = { url = "https://x/source-1.0.tar.gz" }\n'
    with pytest.raises(PlanError, match=r"source 1\.0 has no wheel for the nodes") as caught:
        choose_relayed_wheels(["#\n", "source==1.0 \\\n", "    --hash=sha256:0\n"], listing, {"source": "lock:2"})
    assert caught.value.where == "lock:2"


def test_a_digest_that_the_lock_lacks_is_refused(tmp_path: Path, index: str) -> None:
    spec = of_requirements(tmp_path, index, f"beta==1.2 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(PlanError, match=r"beta 1\.2: the digest of http\S+ is none of those in the lock") as caught:
        lock_environment(spec, write=True)
    assert caught.value.where == "requirements.txt:1"


def test_a_broken_download_is_named_and_not_kept(tmp_path: Path, files: Path, index: str) -> None:
    spec = of_requirements(tmp_path, index, f"beta==1.2 --hash=sha256:{digest_of(files / 'beta-1.2-py3-none-any.whl')}")
    path, whole = files / "beta-1.2-py3-none-any.whl", (files / "beta-1.2-py3-none-any.whl").read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    with pytest.raises(PlanError, match=r"beta: http\S+beta-1\.2\S+ does not match the lock") as caught:
        lock_environment(spec, write=True)
    assert caught.value.where == "requirements.txt:1"
    assert not [*tmp_path.rglob("*.part"), *(tmp_path / ".dtctl").rglob("*.whl"), *(tmp_path / ".dtctl").rglob("..*")]
    path.unlink()
    with pytest.raises(PlanError, match=r"beta: http\S+ cannot be downloaded: File not found"):
        lock_environment(spec, write=True)
    path.write_bytes(whole)
    (wheel,) = lock_environment(spec, write=True).wheels
    assert wheel.read_bytes() == whole


def test_a_folder_here_is_enough(tmp_path: Path, files: Path) -> None:
    locked = lock_environment(of_requirements(tmp_path, str(files), "alpha\n"), write=True)
    assert {*names_of(locked)} == {"alpha-1.0-py3-none-any.whl", "beta-1.2-py3-none-any.whl"}
    assert "--find-links" not in locked.lock


def test_a_node_needs_space(tmp_path: Path, index: str) -> None:
    spec = of_requirements(tmp_path, index, "alpha\n")
    locked = lock_environment(spec, write=True)
    node = describe_node(str(tmp_path), Hello(environment=locked.digest))
    assert node.free_bytes
    EnvironmentPush(spec, locked).check_space("gpu1", node)
    with (tmp_path / "large-1.0-py3-none-any.whl").open("wb") as sparse:
        sparse.truncate(node.free_bytes // 3 + 1)
    push = EnvironmentPush(spec, replace(locked, wheels=(Path(sparse.name),)))
    with pytest.raises(
        NodeError, match=r"\d+ MiB are free on the disk of .*, and the environment needs \d+ MiB"
    ) as few:
        push.check_space("gpu1", node)
    assert few.value.node == "gpu1"
    assert "cluster.workdir" in (few.value.hint or "")
    push.check_space("gpu1", NodeDescription(gpus=0, address="", port=0))


def test_a_node_needs_space_for_what_it_downloads_itself(tmp_path: Path) -> None:
    """As far as uv.lock has the sizes: of the wheels for the nodes' platform, the smallest of each package."""
    wheel = '{{ url = "https://x.test/{}.whl", hash = "sha256:00", size = {} }}'.format
    files = [
        ("alpha-1.0-py3-none-any", 1000), ("beta-2.0-cp312-cp312-manylinux_2_17_x86_64", 50_000),
        ("beta-2.0-cp312-cp312-manylinux_2_17_aarch64", 7), ("beta-2.0-cp311-cp311-manylinux_2_17_x86_64", 7),
        ("beta-2.0-cp312-cp312-macosx_11_0_arm64", 7), ("gamma-1.0-py3-none-any", 9),
    ]  # fmt: skip
    text = "".join(
        f'[[package]]\nname = "{name}"\nversion = "1"\nwheels = [\n'
        + "".join(f"    {wheel(file, size)},\n" for file, size in files if file.startswith(name))
        + "]\n"
        for name in ("alpha", "beta", "gamma")
    )
    assert sum_wheel_sizes(text, {"alpha", "beta"}, "3.12", "x86_64") == 51_000
    assert sum_wheel_sizes(text.replace("size", "length"), {"alpha", "beta"}, "3.12", "x86_64") == 0


def test_a_project_is_refused_on_a_small_disk(tmp_path: Path, files: Path, index: str) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "job"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["alpha"]\n'
    )
    env = {**os.environ, "UV_DEFAULT_INDEX": index}
    subprocess.run([require_local_uv(), "lock", "--quiet"], cwd=tmp_path, env=env, check=True)
    lock = tmp_path / "uv.lock"
    lock.write_text(
        re.sub(r"(alpha-1\.0-py3-none-any\.whl\"[^}]*?)( })", r"\1, size = 4000000000000\2", lock.read_text())
    )
    spec = spec_of(tmp_path, python="3.12", project=".")
    locked = lock_environment(spec, write=True)
    assert locked.index_bytes == 4_000_000_000_000
    node = describe_node(str(tmp_path), Hello(environment=locked.digest))
    with pytest.raises(NodeError, match=r"the environment needs 11444092 MiB"):
        EnvironmentPush(spec, locked).check_space("gpu1", node)


def test_clean_removes_wheels_that_no_launch_has_used_for_long(tmp_path: Path, index: str) -> None:
    spec = of_requirements(tmp_path, index, "alpha\n")
    old, new = lock_environment(spec, write=True).wheels
    long_ago = time.time() - 20 * 86400
    for path in (old, new):
        os.utime(path, (long_ago, long_ago))
    os.utime(old.parent)  # which says nothing about its use
    rule = CleanRule(older_s=14 * 86400, larger_bytes=0)
    assert {item.name.partition("/")[2] for item in list_removable_items(tmp_path) if rule.covers(item)} == {
        old.name,
        new.name,
    }
    lock_environment(of_requirements(tmp_path, index, "beta\n"), write=True)
    beta = next(path for path in (old, new) if path.name.startswith("beta"))
    going = [item for item in list_removable_items(tmp_path) if rule.covers(item)]
    assert [(item.kind, item.node, item.bytes > 0) for item in going] == [("wheel", "", True)]
    assert remove_here(tmp_path, going) == []
    assert [path for path in (old, new) if path.exists()] == [beta]


def test_clean_removes_nothing_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / ("0" * 64)
    elsewhere.mkdir(parents=True)
    (elsewhere / "x-1-py3-none-any.whl").touch()
    (tmp_path / ".dtctl" / "cache").mkdir(parents=True)
    (tmp_path / ".dtctl" / "cache" / "wheels").symlink_to(elsewhere.parent)
    assert [item for item in list_removable_items(tmp_path) if item.kind == "wheel"] == []


def test_a_download_that_has_changed_on_the_disk_is_removed(tmp_path: Path, index: str) -> None:
    spec = of_requirements(tmp_path, index, "beta\n")
    locked = lock_environment(spec, write=True)
    locked.wheels[0].write_bytes(b"x")
    with pytest.raises(PlanError, match="has changed on this machine's disk"):
        EnvironmentPush(spec, locked).make_tree()
    again = EnvironmentPush(spec, lock_environment(spec, write=True)).make_tree()
    assert [os.fsdecode(file.path) for file in again.files] == [
        "beta-1.2-py3-none-any.whl", "requirements.txt.dtctl.lock",
    ]  # fmt: skip
