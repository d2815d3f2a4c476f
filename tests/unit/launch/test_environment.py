"""Locks of `job.environment`, made by uv from folders of wheels and from an index of this machine."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtctl.errors import PlanError, SpecError
from dtctl.launch.files.environment import LockedEnvironment, describe_environment, lock_environment, require_local_uv
from dtctl.spec.load import parse_spec
from dtctl.spec.model import Spec
from tests.facts import missing, raises
from tests.integration.test_environment import make_wheel, serve

PROJECT = """\
[project]
name = "job"
version = "1"
requires-python = ">=3.8"
dependencies = ["alpha"]
[project.optional-dependencies]
gpu = ["gamma"]
[dependency-groups]
dev = ["delta"]
train = ["epsilon"]
"""


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's own settings of uv are apart, and its cache is empty: what it has is not asked for again."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    make_wheel(tmp_path / "wheels", "alpha", "1.0", ["beta>=1"])
    for name in ("beta", "gamma", "delta", "epsilon"):
        make_wheel(tmp_path / "wheels", name, "1.2")
    return tmp_path / "wheels"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine on which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def spec_of(folder: Path, **environment: Any) -> Spec:
    document = {
        "cluster": {"transport": "local"},
        "job": {"script": "train.py", "kind": "direct", "environment": environment},
    }
    return parse_spec(yaml.safe_dump(document), source="dtctl.yaml", base_dir=folder)


def names_in(locked: LockedEnvironment) -> list[str]:
    return [line.partition("==")[0] for line in locked.lock.splitlines() if "==" in line]


def index_lines(locked: LockedEnvironment) -> list[str]:
    return [line for line in locked.lock.splitlines() if line.startswith("--")]


def test_a_folder_is_the_only_source_of_the_lock_as_well(tmp_path: Path, wheels: Path, closed_port: int) -> None:
    (tmp_path / "requirements.txt").write_text("alpha\n")
    spec = spec_of(tmp_path, requirements="requirements.txt", index="wheels")
    # A package that the folder lacks is not looked for anywhere else: PyPI has it.
    (tmp_path / "more.txt").write_text("pip\n")
    locked = lock_environment(spec, write=True)
    assert names_in(locked) == ["alpha", "beta"]
    assert index_lines(locked) == ["--no-index", f"--find-links {wheels}"]
    with pytest.raises(PlanError, match="pip was not found in the provided package locations") as caught:
        lock_environment(spec_of(tmp_path, requirements="more.txt", index="wheels"), write=True)
    assert caught.value.where == "more.txt:1"


@pytest.mark.parametrize("name", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX"])
def test_the_index_of_the_spec_replaces_variables(
    tmp_path: Path, wheels: Path, closed_port: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements.txt").write_text("alpha\n")
    spec = spec_of(tmp_path, requirements="requirements.txt", index="wheels")
    first = lock_environment(spec, write=True)
    monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port}/simple")
    assert not lock_environment(spec, write=True).is_new
    (tmp_path / "requirements.txt.dtctl.lock").unlink()
    assert lock_environment(spec, write=True).lock == first.lock


@pytest.mark.parametrize("name", ["UV_FIND_LINKS", "UV_EXCLUDE_NEWER", "UV_CONSTRAINT", "UV_RESOLUTION"])
def test_a_lock_is_made_again_when_a_variable_of_uv_changes(
    tmp_path: Path, wheels: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements.txt").write_text("--no-index\n--find-links wheels\nalpha\n")
    (tmp_path / "constraint.txt").write_text("beta<2\n")
    spec = spec_of(tmp_path, requirements="requirements.txt")
    lock_environment(spec, write=True)
    assert not lock_environment(spec, write=True).is_new
    values = {
        "UV_FIND_LINKS": str(wheels), "UV_EXCLUDE_NEWER": "2020-01-01T00:00:00Z",
        "UV_CONSTRAINT": "constraint.txt", "UV_RESOLUTION": "lowest",
    }  # fmt: skip
    monkeypatch.setenv(name, values[name])
    assert describe_environment(spec).endswith("a launch makes it")
    if name == "UV_CONSTRAINT":
        lock_environment(spec, write=True)
        (tmp_path / "constraint.txt").write_text("beta<3\n")
        assert describe_environment(spec).endswith("a launch makes it")


def test_a_lock_is_made_again_when_a_file_of_settings_changes(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "requirements.txt").write_text("alpha\n")
    (tmp_path / "uv.toml").write_text('no-index = true\nfind-links = ["wheels"]\n')
    spec = spec_of(tmp_path, requirements="requirements.txt")
    assert index_lines(lock_environment(spec, write=True)) == [f"--find-links {wheels}", "--no-index"]
    assert not lock_environment(spec, write=True).is_new
    (tmp_path / "uv.toml").write_text('no-index = true\nresolution = "lowest"\nfind-links = ["wheels"]\n')
    assert lock_environment(spec, write=True).is_new


def test_sources_in_the_requirements_are_those_of_nodes(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "requirements.txt").write_text("--no-index\n--find-links wheels\nalpha\n")
    locked = lock_environment(spec_of(tmp_path, requirements="requirements.txt"), write=True)
    assert index_lines(locked) == [f"--find-links {wheels}", "--no-index"]


def write_project(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "train.py").touch()


def test_extras_and_groups_of_a_project_are_chosen(tmp_path: Path, wheels: Path) -> None:
    write_project(tmp_path)
    with pytest.raises(PlanError, match=r"uv\.lock cannot be read") as missing:
        lock_environment(spec_of(tmp_path, project=".", index="wheels"), write=True)
    hint = missing.value.hint or ""
    assert hint == f"make it with `uv lock --no-index --find-links {wheels}`"
    subprocess.run([require_local_uv(), *hint.partition("`")[2].strip("`").split()[1:]], cwd=tmp_path, check=True)

    plain = lock_environment(spec_of(tmp_path, project=".", index="wheels"), write=True)
    assert names_in(plain) == ["alpha", "beta"]
    assert plain.lock.count("--hash=sha256:") == 2, "uv.lock has none for files of a folder"
    chosen = [
        (lock_environment(spec_of(tmp_path, project=".", index="wheels", **more), write=True), packages)
        for more, packages in (
            ({"extras": ["gpu"]}, ["alpha", "beta", "gamma"]),
            ({"groups": "train"}, ["alpha", "beta", "epsilon"]),
            ({"groups": ["dev"]}, ["alpha", "beta", "delta"]),
            ({"extras": ["gpu"], "groups": ["train"]}, ["alpha", "beta", "epsilon", "gamma"]),
        )
    ]
    for locked, packages in chosen:
        assert names_in(locked) == packages
        assert locked.is_new
    assert len({plain.digest, *(locked.digest for locked, _ in chosen)}) == 5
    for more, name in (({"extras": ["gpx"]}, "gpx"), ({"groups": ["trian"]}, "trian")):
        with pytest.raises(PlanError, match=f"`{name}` is not defined") as caught:
            lock_environment(spec_of(tmp_path, project=".", index="wheels", **more), write=True)
        assert caught.value.where == "dtctl.yaml:4"
        assert "correct `job.environment.extras` and `groups`" in (caught.value.hint or "")


@pytest.mark.parametrize("change", ["dependencies", "group", "python"])
def test_a_lock_that_is_older_than_its_project_is_refused(tmp_path: Path, wheels: Path, change: str) -> None:
    write_project(tmp_path)
    spec = spec_of(tmp_path, project=".", index="wheels")
    subprocess.run(
        [require_local_uv(), "lock", "--quiet", "--no-index", "--find-links", str(wheels)], cwd=tmp_path, check=True
    )
    old, new = {
        "dependencies": ('["alpha"]', '["alpha", "gamma"]'), "group": ('["delta"]', '["gamma"]'),
        "python": (">=3.8", ">=3.9"),
    }[change]  # fmt: skip
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace(old, new))
    for _ in range(2):
        with raises(PlanError, f"uv.lock pyproject.toml lock --no-index --find-links {wheels}"):
            lock_environment(spec, write=True)
    (tmp_path / "pyproject.toml").write_text(PROJECT + "# a comment changes no lock\n")
    assert lock_environment(spec, write=True).doubt == ""


def test_a_lock_that_uv_cannot_check_is_used_with_a_warning(tmp_path: Path, wheels: Path) -> None:
    write_project(tmp_path)
    with serve(wheels, "127.0.0.1") as url:
        subprocess.run([require_local_uv(), "lock", "--quiet", "--index-url", url], cwd=tmp_path, check=True)
        spec = spec_of(tmp_path, project=".", index=url)
        assert lock_environment(spec, write=True).doubt == ""
    # Without the index it is not known whether another package would give another lock.
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace('["alpha"]', '["alpha", "only-there"]'))
    locked = lock_environment(spec, write=True)
    assert names_in(locked) == ["alpha", "beta"]
    assert not missing(locked.doubt, "uv.lock pyproject.toml only-there")


def test_sources_of_a_project_are_those_of_its_lock(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f'{PROJECT}[tool.uv]\nno-index = true\nfind-links = ["wheels"]\n')
    subprocess.run([require_local_uv(), "lock", "--quiet"], cwd=tmp_path, check=True)
    locked = lock_environment(spec_of(tmp_path, project="."), write=True)
    assert index_lines(locked) == ["--no-index", f"--find-links {wheels}"]
    assert locked.lock.count("--hash=sha256:") == 2


def test_a_file_of_requirements_has_no_extras(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="`extras` and `groups` are those of a project") as caught:
        spec_of(tmp_path, requirements="requirements.txt", extras="gpu", groups=["train"])
    assert caught.value.where == "dtctl.yaml:4"
    assert "set `project`" in caught.value.message


@pytest.mark.parametrize("how", ["spec", "variable", "file", "unknown name", "proxy"])
def test_an_index_that_is_not_reached_is_named(
    tmp_path: Path, closed_port: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, more, text = f"http://127.0.0.1:{closed_port}/simple", {}, "alpha\n"
    host = f"the package index 127.0.0.1:{closed_port}: connection refused"
    if how == "spec":
        more = {"index": url}
    elif how == "variable":
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
    elif how == "file":
        text = f"--index-url {url}\nalpha\n"
    elif how == "unknown name":
        more = {"index": "http://packages.invalid/simple"}
        host = "the package index packages.invalid:80: its name is not known here"
    else:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{closed_port}")
        host = f"the package index pypi.org:443: the proxy 127.0.0.1:{closed_port}: connection refused"
    (tmp_path / "requirements.txt").write_text(text)
    with pytest.raises(PlanError) as caught:
        lock_environment(spec_of(tmp_path, requirements="requirements.txt", **more), write=True)
    assert caught.value.message.startswith(f"this machine, which makes the lock, cannot reach {host}")
    assert (caught.value.where or "").startswith("dtctl.yaml:"), "the file of requirements is not wrong"
    assert "job.environment.index" in (caught.value.hint or "")
