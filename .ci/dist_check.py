"""Install the packages as users do, each into a clean environment elsewhere, and run dtctl from there.

python .ci/dist_check.py             builds wheel and sdist of this tree first
python .ci/dist_check.py dist/*      checks these files

The wheel is run by `uvx`, and the sdist is installed by `pipx`; both take what else is needed from the package index.
Then init, validate, launch, doctor and the sandbox have to work. Needs uv, and what the sandbox needs (OpenSSH, and
root or user namespaces). Exit code 1 if something does not work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0
"""Seconds for one command; an installation downloads some megabytes."""
HELLO = "import os, socket\nprint('hello from', os.environ['RANK'], 'on', socket.gethostname(), flush=True)\n"
JOB = "cluster: {{transport: {transport}, nodes: {nodes}, slots: 1}}\njob: {{script: hello.py, kind: direct}}\n"


class CheckFailed(Exception):
    """A command has not done what it should."""


class InstalledProgram:
    """A dtctl that was installed, and the home folder of its user."""

    def __init__(self, argv: Sequence[str], home: Path, env: dict[str, str]) -> None:
        self.argv, self.home, self.env = list(argv), home, env

    def check(self, *words: str, folder: Path, shows: str = "", codes: tuple[int, ...] = (0,)) -> str:
        """Run a command; return its output.

        Raises:
            CheckFailed: it ends with another exit code, or does not show a text.
        """
        done = run_command([*self.argv, *words], folder, self.env)
        said = done.stdout + done.stderr
        if done.returncode not in codes or shows not in said or "Traceback" in said:
            raise CheckFailed(
                f"`dtctl {' '.join(words)}` ended with {done.returncode}, and should end with {codes[0]}"
                f"{f' and show {shows!r}' if shows else ''}:\n{said}"
            )
        print(f"  dtctl {' '.join(words)}", flush=True)
        return done.stdout


def run_command(argv: Sequence[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        argv,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )


def find_uv() -> str:
    """Return the path of uv.

    Raises:
        CheckFailed: it is not installed.
    """
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise CheckFailed("uv is not installed: pip install uv")
    return found


def build_packages(folder: Path) -> list[Path]:
    """Build sdist and wheel of this tree.

    Raises:
        CheckFailed: they cannot be built.
    """
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = run_command(argv, ROOT, dict(os.environ))
    if done.returncode:
        raise CheckFailed(f"the packages cannot be built:\n{done.stdout}{done.stderr}")
    return sorted(folder.iterdir())


def make_home(folder: Path) -> dict[str, str]:
    """Return the variables of a user with an empty home folder, to whom nothing of this tree is known."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "DTCTL_"))
    }
    own = Path(sys.executable).parent
    path = [each for each in env["PATH"].split(os.pathsep) if Path(each) != own]
    cache = env.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
    return env | {
        "HOME": str(folder), "PATH": os.pathsep.join(path), "UV_CACHE_DIR": cache, "OMP_NUM_THREADS": "1",
        "PIPX_HOME": str(folder / "pipx"), "PIPX_BIN_DIR": str(folder / "bin"), "PIPX_MAN_DIR": str(folder / "man"),
        "UV_TOOL_DIR": str(folder / "tools"), "DTCTL_SANDBOX": f"dist-{os.getpid()}", "NO_COLOR": "1",
    }  # fmt: skip


def install_with_pipx(package: Path, home: Path, env: dict[str, str], uv: str) -> InstalledProgram:
    """Install a package with pipx.

    Raises:
        CheckFailed: it cannot be installed.
    """
    argv = [uv, "tool", "run", "pipx", "install", "--python", sys.executable, str(package)]
    done = run_command(argv, home, env)
    if done.returncode:
        raise CheckFailed(f"pipx cannot install {package.name}:\n{done.stdout}{done.stderr}")
    return InstalledProgram([str(home / "bin" / "dtctl")], home, env)


def check_program(program: InstalledProgram, version: str, *, has_sandbox: bool) -> None:
    """Run what a newcomer runs.

    Raises:
        CheckFailed: something does not work.
    """
    home = program.home
    program.check("--version", folder=home, shows=version)
    program.check("init", "--list", folder=home, shows="gpt")
    program.check("init", "my-gpt", "--launcher", "sandbox", folder=home)
    program.check("validate", folder=home / "my-gpt")
    program.check("launch", "--dry-run", folder=home / "my-gpt", shows="train.py")
    project = home / "hello"
    project.mkdir()
    (project / "hello.py").write_text(HELLO)
    (project / "dtctl.yaml").write_text(JOB.format(transport="local", nodes="[localhost]"))
    program.check("launch", folder=project, shows="hello from 0")
    program.check("status", folder=project, shows="succeeded")
    # 9: the machine has faults, which is not the package's affair.
    findings = json.loads(program.check("doctor", "--json", folder=project, codes=(0, 9)))["findings"]
    if not findings:
        raise CheckFailed("`dtctl doctor --json` has found nothing at all")
    if not has_sandbox:
        return
    (project / "dtctl.yaml").write_text(JOB.format(transport="sandbox", nodes=2))
    program.check("sandbox", "up", "--nodes", "2", folder=project)
    try:
        program.check("sandbox", "exec", "node2", "--", "hostname", folder=project, shows="node2")
        program.check("launch", "--no-doctor", folder=project, shows="hello from 1 on node2")
        program.check("doctor", "--quick", folder=project, codes=(0, 9), shows="node")
    finally:
        program.check("sandbox", "down", "--yes", folder=project)


def read_version(packages: Sequence[Path]) -> tuple[Path, Path, str]:
    """Return the wheel, the sdist and their version.

    Raises:
        CheckFailed: they are not one of each.
    """
    wheels = [path for path in packages if path.suffix == ".whl"]
    sdists = [path for path in packages if path.name.endswith(".tar.gz")]
    if len(wheels) != 1 or len(sdists) != 1:
        raise CheckFailed(f"one wheel and one sdist are needed: {', '.join(path.name for path in packages)}")
    return wheels[0].resolve(), sdists[0].resolve(), wheels[0].name.split("-")[1]


def main() -> None:
    """Check both packages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", type=Path, help="wheel and sdist; none: build them")
    parser.add_argument("--no-sandbox", action="store_true", help="where there are no namespaces")
    options = parser.parse_args()
    # Not below /tmp: virtual hosts have a /tmp of their own, and so not what is installed there.
    base = Path.home() / ".cache"
    base.mkdir(exist_ok=True)
    top = Path(tempfile.mkdtemp(prefix="dtctl-dist-", dir=base))
    try:
        (top / "dist").mkdir()
        uv = find_uv()
        wheel, sdist, version = read_version(options.packages or build_packages(top / "dist"))
        for how, package in (("uvx", wheel), ("pipx", sdist)):
            home = top / how
            home.mkdir(mode=0o700)
            env = make_home(home)
            print(f"{package.name} with {how}:", flush=True)
            if how == "uvx":
                argv = [uv, "tool", "run", "--python", sys.executable, "--from", str(package), "dtctl"]
                program = InstalledProgram(argv, home, env)
            else:
                program = install_with_pipx(package, home, env, uv)
            check_program(program, version, has_sandbox=not options.no_sandbox)
    except (CheckFailed, subprocess.TimeoutExpired) as exc:
        raise SystemExit(f"error: {exc}") from None
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
