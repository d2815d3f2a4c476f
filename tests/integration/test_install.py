"""The packages as users install them: built, complete, and at work without this tree, with and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(argv, check=True, capture_output=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


def tracked() -> set[str]:
    """Files of this tree, as git knows them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def test_the_wheel_has_the_package_and_its_templates(packages: dict[str, Path]) -> None:
    with zipfile.ZipFile(packages["wheel"]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    moved = {name.replace("templates/", "dtctl/_templates/", 1) for name in tracked() if name.startswith("templates/")}
    assert found == moved | {name for name in tracked() if name.startswith("dtctl/")}


def test_the_sdist_has_what_its_tests_need(packages: dict[str, Path]) -> None:
    with tarfile.open(packages["sdist"]) as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames()}
    left_out = {name for name in tracked() - found if not name.startswith((".github/", ".devcontainer/", "docker/"))}
    assert left_out <= {".gitignore", ".dockerignore", ".pre-commit-hooks.yaml"}


def environment(folder: Path, *more: str) -> Path:
    """Folder of the programs of a new virtual environment with these packages."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    argv = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, *more]
    subprocess.run(argv, check=True)
    return folder / "bin"


def dtctl(programs: Path, *arguments: str, cwd: Path, code: int = 0) -> str:
    """What the installed command prints; nothing of this tree is in its way."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"PATH": f"{programs}:{env['PATH']}", "OMP_NUM_THREADS": "1", "HOME": str(cwd)}
    done = subprocess.run(
        [programs / "dtctl", *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def without_torch(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("plain") / "venv", str(packages["sdist"]))


@pytest.mark.slow
def test_it_works_without_torch(without_torch: Path, tmp_path: Path) -> None:
    """On the machine that launches, nothing of torch is needed."""
    programs = without_torch
    program = "import dtctl; print(dtctl.__file__)"
    shown = subprocess.check_output([programs / "python", "-c", program], cwd=tmp_path, text=True)
    assert Path(shown.strip()).is_relative_to(programs.parent)
    dtctl(programs, "--version", cwd=tmp_path)
    assert "gpt" in dtctl(programs, "init", "--list", cwd=tmp_path)
    dtctl(programs, "init", "project", "--template", "script", "--launcher", "local", cwd=tmp_path)
    project = tmp_path / "project"
    dtctl(programs, "validate", cwd=project)
    dtctl(programs, "launch", "--dry-run", cwd=project)
    (tmp_path / "hello.py").write_text("import os; print('hello from', os.environ['RANK'])\n")
    options = ("--set", "job.kind=direct", "--set", f"cluster.workdir={tmp_path}/node")
    shown = dtctl(
        programs, "launch", "--nodes", "localhost", "--slots", "2", *options, "--set", "cluster.transport=local", "--",
        "hello.py", cwd=tmp_path,
    )  # fmt: skip
    assert "hello from 1" in shown
    dtctl(programs, "report", cwd=tmp_path)
    dtctl(programs, "lint", "hello.py", cwd=tmp_path)
    dtctl(programs, "advise", "--params", "7B", "--gpus", "16", "--gpu", "A100", "--batch", "64", cwd=tmp_path)
    (tmp_path / "log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    dtctl(programs, "doctor", "--log", "log", cwd=tmp_path, code=9)


@pytest.mark.torch
@pytest.mark.slow
def test_it_trains_with_the_torch_that_is_there(packages: dict[str, Path], tmp_path: Path) -> None:
    """From the wheel alone; torch is that of these tests, found behind what is installed."""
    programs = environment(tmp_path / "venv", "--no-deps", str(packages["wheel"]))
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (site / "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    dtctl(programs, "init", "project", "--launcher", "local", cwd=tmp_path)
    smaller = ["train.steps=2", "train.model.layers=1", f"cluster.workdir={tmp_path}/node", "cluster.slots=2"]
    shown = dtctl(
        programs, "launch", "--set", "job.kind=direct", *(word for pair in smaller for word in ("--set", pair)),
        cwd=tmp_path / "project",
    )  # fmt: skip
    assert "step 2/2" in shown
    assert "succeeded" in shown
