"""Locks of `job.environment`, made by uv from folders of wheels and from an index of this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtctl.errors import PlanError, SpecError
from dtctl.launch import trust
from dtctl.launch.files.environment import LockedEnvironment, describe_environment, lock_environment, require_local_uv
from dtctl.spec.load import parse_spec
from dtctl.spec.model import Spec
from tests.facts import missing, raises
from tests.integration.test_environment import make_sources, make_wheel, serve

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


def test_a_draft_of_the_lock_is_not_where_another_launch_sends_it(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements.txt").write_text("alpha\n")
    replace, seen = Path.replace, []

    def look_and_replace(draft: Path, target: Path) -> Path:
        seen.append((target.name, {path.name for path in tmp_path.iterdir()}))
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", look_and_replace)
    lock_environment(spec_of(tmp_path, requirements="requirements.txt", index="wheels"), write=True)
    (lock,) = [names for target, names in seen if target.startswith("requirements.txt.")]
    assert lock <= {"requirements.txt", "wheels", ".dtctl"}


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


@pytest.fixture
def agreed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user allows that packages are built on this machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "requirements.txt").write_text("alpha\n")
    trust.agree_to_builds(spec_of(tmp_path, requirements="requirements.txt"))


def built_names(locked: LockedEnvironment) -> list[str]:
    return [path.name for path in locked.wheels if path.parent.parent.name == "built"]


def test_nothing_is_built_here_without_agreement(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder from elsewhere could name any package, and its build runs any code."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    make_wheel(wheels, "alpha", "2.0", ["sources==4.9"])
    make_sources(wheels, "sources", "4.9")
    (tmp_path / "requirements.txt").write_text("alpha\n")
    spec = spec_of(tmp_path, requirements="requirements.txt", index="wheels")
    locked = lock_environment(spec, write=True)
    assert "alpha==1.0" in locked.lock
    assert "launch --yes" in locked.doubt
    trust.agree_to_builds(spec)
    assert "alpha==2.0" in lock_environment(spec, write=True).lock, "the lock is made again"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / ".dtctl")
    assert "alpha==1.0" in lock_environment(spec, write=True).lock, "a lock of another user's choice is made again"


@pytest.mark.usefixtures("agreed")
@pytest.mark.parametrize("way", ["index", "relay"])
def test_the_newest_version_is_chosen_if_its_package_has_to_be_built(tmp_path: Path, wheels: Path, way: str) -> None:
    """hydra-core 1.3 needs a package without a wheel; with wheels alone, uv chose version 0.11 of 2019."""
    make_wheel(wheels, "alpha", "2.0", ["sources==4.9"])
    make_sources(wheels, "sources", "4.9")
    (tmp_path / "requirements.txt").write_text("alpha\n")
    with serve(wheels, "127.0.0.1") as url:
        spec = spec_of(tmp_path, requirements="requirements.txt", index=url, wheels=way)
        assert describe_environment(spec).endswith("a launch makes it")
        locked = lock_environment(spec, write=True)
        assert "alpha==2.0" in (tmp_path / "requirements.txt.dtctl.lock").read_text()
        assert built_names(locked) == ["sources-4.9-py3-none-any.whl"]
        assert "./sources-4.9-py3-none-any.whl --hash=sha256:" in locked.lock
        assert not locked.doubt
        assert describe_environment(spec) == locked.short_summary
        again = lock_environment(spec, write=True)
        assert (again.digest, again.is_new) == (locked.digest, False)
        # Another checkout has the lock and not the wheel.
        shutil.rmtree(tmp_path / ".dtctl")
        assert "a launch builds" in describe_environment(spec)
        assert built_names(lock_environment(spec, write=True)) == ["sources-4.9-py3-none-any.whl"]


@pytest.mark.usefixtures("agreed")
def test_a_project_whose_lock_has_sources(tmp_path: Path, wheels: Path) -> None:
    make_wheel(wheels, "alpha", "2.0", ["sources==4.9"])
    make_sources(wheels, "sources", "4.9")
    write_project(tmp_path)
    subprocess.run(
        [require_local_uv(), "lock", "--quiet", "--no-index", "--find-links", str(wheels)], cwd=tmp_path, check=True
    )
    locked = lock_environment(spec_of(tmp_path, project=".", index="wheels"), write=True)
    assert built_names(locked) == ["sources-4.9-py3-none-any.whl"]
    assert "alpha==2.0" in locked.lock


@pytest.mark.usefixtures("agreed")
def test_an_older_version_is_chosen_if_sources_have_to_be_compiled(tmp_path: Path, wheels: Path) -> None:
    make_wheel(wheels, "alpha", "2.0", ["sources==4.9"])
    make_sources(wheels, "sources", "4.9", tag="cp311-cp311-linux_x86_64")
    (tmp_path / "requirements.txt").write_text("alpha\n")
    locked = lock_environment(spec_of(tmp_path, requirements="requirements.txt", index="wheels"), write=True)
    assert "alpha==1.0" in locked.lock
    assert not built_names(locked)
    assert "sources 4.9" in locked.doubt
    (tmp_path / "requirements.txt").write_text("sources\n")
    with pytest.raises(PlanError, match="sources") as caught:
        lock_environment(spec_of(tmp_path, requirements="requirements.txt", index="wheels"), write=True)
    assert "build one" in (caught.value.hint or "")


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


def test_an_environment_of_conda_is_named_with_its_requirements(tmp_path: Path) -> None:
    (tmp_path / "environment.yaml").write_text(
        "name: my\nchannels: [pytorch]\ndependencies:\n  - python=3.10\n  - pytorch=2.*\n  - pytorch-cuda=11.7\n"
        "  - conda-forge::hydra-core=1.3\n  - numpy >= 1.24\n  - pip>=23\n  - scipy=1.11.4=py310h1\n"
        "  - pip:\n    - rootutils\n    - -r more.txt\n"
    )
    for call in (describe_environment, lambda spec: lock_environment(spec, write=False)):
        with pytest.raises(PlanError, match=r"environment\.yaml is an environment of conda") as caught:
            call(spec_of(tmp_path, requirements="environment.yaml"))
        assert caught.value.where == "dtctl.yaml:4"
        hint = caught.value.hint or ""
        lines = "torch==2.*, hydra-core==1.3.*, numpy>=1.24, scipy==1.11.4, rootutils, -r more.txt"
        assert [
            part
            for part in (f"these lines: {lines};", 'python: "3.10"', "pytorch-cuda is left out")
            if part not in hint
        ] == []


def test_a_broken_environment_of_conda_is_named(tmp_path: Path) -> None:
    for text in ("dependencies: [\n", "dependencies:\n", "channels: []\ndependencies: 3\n"):
        (tmp_path / "environment.yml").write_text(text)
        with pytest.raises(PlanError, match=r"environment\.yml is an environment of conda"):
            describe_environment(spec_of(tmp_path, requirements="environment.yml"))


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
