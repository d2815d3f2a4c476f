"""Every command line of the README and the documentation is run as it stands there, block by block.

A block is a scene: a folder, machines, runs that it speaks of, and what its names (`gpu01`, `RUN`) stand for. Trainings
are made short, and nothing else is changed. A block that is new in a document fails until it has a scene here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox
from tests.hosts import workers

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ["README.md", "examples/README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("dtctl", "make", "cd", "source", "python", "pip", "sudo", "export")
NOT_RUN = {
    "make test": "it runs this test",
    "make check": "it stands in front of this test in `make test`",
    "make unit": "it stands in front of this test in `make test`",
    "make integration": "it runs this test",
    "make gpu": "it needs a GPU; test_gpu_checks.py runs the part of each check that a CPU shows",
    "make bench": "it takes minutes and needs an idle machine; tests/unit/benchmarks runs its parts",
    "pip install '.[train]'": "it needs the network",
    "kubectl apply --filename job.yaml": "there is no Kubernetes here; schemas are checked elsewhere",
    "kubectl logs --follow --selector jobset.sigs.k8s.io/jobset-name=gpt-1121-093012-k7": "likewise",
    "source .venv/bin/activate": "tests choose their Python themselves",
}
"""Command lines that this test cannot run, and why."""
CODES = {"dtctl doctor --log logs/": 9, "dtctl doctor --log a.log b.log --json": 9, "dtctl doctor --gpu": 9}
"""Command lines that end with another exit code than 0, as they should: these logs tell of a failure, and here is no
GPU."""
TALKER = """\
import json, os, sys
rank = os.environ["RANK"]
print("rank", rank, sys.argv[1:], flush=True)
if rank == "0":
    with open(os.environ["DTCTL_METRICS"], "w") as file:
        for step in range(1, 5):
            print(json.dumps({"step": step, "loss": 1 / step, "time": 1e9, "step_s": 0.1}), file=file)
"""
"""A job without torch."""


def blocks(name: str) -> Iterator[list[str]]:
    """The command lines of each block of a document, without prompts and remarks."""
    for language, body in BLOCK.findall((ROOT / name).read_text(encoding="utf-8")):
        lines = [line.removeprefix("$ ") for line in body.splitlines() if line.strip()]
        typed = lines[0].partition(" ")[0] in PROGRAMS
        if language in ("console", "bash", "sh") or (language in ("", "text") and typed):
            yield [re.sub(r"\s{2,}.*|\s+#\s.*", "", line) for line in lines]


@dataclass
class Shell:
    """A terminal that remembers its folder and its variables from one line to the next."""

    folder: Path
    env: dict[str, str]
    names: Mapping[str, str] = field(default_factory=dict)
    """What stands for a name in a command line."""

    def type(self, line: str) -> str:
        """Run a line; what it has printed."""
        code = CODES.get(line, 0)
        for name, meant in self.names.items():
            line = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w.-])", meant, line)
        after = self.folder.parent / "after"
        script = f"{line}\ncode=$?\n{{ pwd; env -0; }} > {shlex.quote(str(after))}\nexit $code\n"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=600,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, f"$ {line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        folder, _, variables = after.read_text().partition("\n")
        self.folder = Path(folder)
        self.env = dict(variable.split("=", 1) for variable in variables.split("\0") if variable)
        self._shorten()
        return done.stdout

    def _shorten(self) -> None:
        """Make the training of a new project one of two steps."""
        for spec in self.folder.glob("**/dtctl*.yaml"):
            text = spec.read_text()
            short = re.sub(r"\bsteps: \d{2,}", "steps: 2", text).replace("layers: 4", "layers: 1")
            short = short.replace("kind: torchrun", "kind: direct")
            if short != text:
                spec.write_text(short)


@pytest.fixture(scope="module")
def hosts(sandbox_env: dict[str, str]) -> Iterator[Sandbox]:
    """Four hosts that OpenSSH's configuration calls gpu01 to gpu04."""
    sandbox = control.up("docs", nodes=4)
    yield sandbox
    left = {node.name: workers(node) for node in sandbox.nodes}
    control.down(sandbox.name)
    assert not any(left.values()), "a command has left processes behind"


@pytest.fixture
def shell(sandbox_env: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Shell]:
    # Below the home folder, as a user's project: hosts have a /tmp of their own, Slurm's jobs a folder that all see.
    base = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"scene-{os.urandom(3).hex()}"
    folder = base / "work"
    folder.mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**sandbox_env, "PATH": path, "PYTHONPATH": str(ROOT), "DTCTL_SANDBOX": "own", "PWD": str(folder)}
    yield Shell(folder, env)
    control.down("own")
    subprocess.run(["rm", "-rf", str(base)], check=True)


# -- scenes --------------------------------------------------------------------------------------------------------

Scene = Callable[[Shell, list[str], pytest.FixtureRequest], None]


def plain(shell: Shell, lines: list[str], _: pytest.FixtureRequest) -> None:
    """As it stands; what is not run here has its reason."""
    for line in lines:
        if line not in NOT_RUN:
            shell.type(line)
        elif line.startswith("make"):
            shell.names = {"make": f"make -n -C {ROOT}"}  # what there is to make is there
            shell.type(line)


def demo(shell: Shell, lines: list[str], _: pytest.FixtureRequest) -> None:
    """`make demo` is this program; another line of the block is `make test`."""
    assert lines[0] == "make demo"
    assert "python examples/demo.py\n" in shell.type(f"make -n -C {ROOT} demo")
    assert "the run recovered by itself" in shell.type(f"(cd {ROOT} && python examples/demo.py)")


def five_minutes(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A project of its own, on hosts of its own."""
    shell.names = {"/tmp/my-gpt": str(shell.folder / "my-gpt")}
    plain(shell, lines, request)


def over_ssh(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """Machines gpu01 to gpu04 that are reached over SSH, and a job that does not need torch."""
    options = _ssh(shell, request)
    spec = f"cluster: {{transport: ssh, nodes: ['gpu[01-02]'], slots: 5, {', '.join(options)}}}\n"
    (shell.folder / "dtctl.yaml").write_text(spec + "job: {script: train.py, kind: direct}\ntrain: {lr: 1.0e-3}\n")
    (shell.folder / "train.py").write_text(TALKER)
    told = {}
    for line in lines:
        if "--nodes" in line:  # without a spec: what it would say
            more = " ".join(f"--set cluster.{option.replace(': ', '=')}" for option in options)
            line = line.replace(" -- ", f" {more} --set job.kind=direct -- ")
        told[line.split()[1]] = shell.type(line)
    if "logs" in told:
        assert told["logs"].strip().splitlines() == ["[gpu02:9] rank 9 []"]


def _ssh(shell: Shell, request: pytest.FixtureRequest) -> list[str]:
    """Settings of `cluster` that lead to the hosts."""
    hosts: Sandbox = request.getfixturevalue("hosts")
    text = (
        f"Host *\n  User {hosts.user}\n  IdentityFile {hosts.identity_file}\n  UserKnownHostsFile {hosts.known_hosts}\n"
    )
    text += "".join(f"Host gpu0{n}\n  HostName {node.address}\n" for n, node in enumerate(hosts.nodes, 1))
    config = shell.folder.parent / "ssh_config"
    config.write_text(text)
    return [f"ssh_config: {config}", f"python: {sys.executable}"]


def own_machines(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A new project whose spec then says where, as the document tells."""
    plain(shell, lines, request)
    told = re.findall(r"```yaml\n(cluster:.*?)```", (ROOT / "docs/guides/machines.md").read_text(), re.DOTALL)[0]
    told = re.sub(r"  python: .*\n", "".join(f"  {option}\n" for option in _ssh(shell, request)), told)
    rest = (shell.folder / "dtctl.yaml").read_text().partition("\ntrain:")[2]
    (shell.folder / "dtctl.yaml").write_text(f"{told}\ntrain:{rest}".replace("script:", "kind: direct\n  script:"))
    following = list(blocks("docs/guides/machines.md"))[1]
    shown = [shell.type(line) for line in following]
    assert "gpu04" in shown[1]


def past_runs(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """Two runs with metrics and snapshots."""
    (shell.folder / "dtctl.yaml").write_text(
        "cluster: {transport: local, slots: 1}\n"
        "job: {script: train.py, kind: direct}\ntrain: {steps: 4, snapshot: {every_steps: 2}}\n"
    )
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/training.md").read_text(), re.DOTALL)[0]
    (shell.folder / "train.py").write_text(code)
    runs = ["gpt-1121-0930", "gpt-1121-1412"]
    for run in runs:
        shell.type(f"dtctl launch --name {run}")
    [saved] = {path.parent for path in Path.home().glob(f".dtctl/node/runs/{runs[1]}/snapshots/step-*")}
    shell.names = {"RUN": runs[1], "DIR": str(saved)}
    try:
        plain(shell, lines, request)
    finally:
        for run in runs:
            subprocess.run(["rm", "-rf", str(Path.home() / ".dtctl" / "node" / "runs" / run)], check=True)


def faults_on_hosts(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """On four hosts that are up already."""
    shell.type("dtctl sandbox up --nodes 4")
    plain(shell, lines, request)


def with_slurm(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """As root already."""
    shell.names = {"sudo": ""}
    plain(shell, lines, request)


def batch(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A project on a cluster with Slurm."""
    shell.type("dtctl sandbox up --nodes 2 --slurm")
    shell.type("export SLURM_CONF=$(dtctl sandbox status --json | jq -r .slurm_conf)")
    (shell.folder / "dtctl.yaml").write_text(
        f"cluster: {{transport: slurm, nodes: 2, slots: 1, python: {sys.executable}}}\n"
        "job: {script: train.py, kind: direct}\n"
    )
    (shell.folder / "train.py").write_text("print('done')")
    plain(shell, lines, request)


def on_slurm(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A project on a cluster with Slurm, whose jobs end by themselves."""
    batch(shell, [], request)
    plain(shell, lines, request)


def for_kubernetes(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """The spec that stands there."""
    told = re.findall(r"```yaml\n(cluster:.*?)```", (ROOT / "docs/guides/kubernetes.md").read_text(), re.DOTALL)[0]
    (shell.folder / "dtctl.yaml").write_text(told)
    (shell.folder / "train.py").write_text("")
    plain(shell, lines, request)


def to_lint(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A file with nothing to find."""
    (shell.folder / "train.py").write_text("VALUE = 1\n")
    plain(shell, lines, request)


def to_examine(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """This machine as a cluster, and the logs of a job that failed."""
    shell.names = {"NAME": "NCCL_DEBUG", "1M:1G": "1M:2M"}  # a benchmark for networks, made small
    (shell.folder / "dtctl.yaml").write_text("cluster: {transport: local, slots: 2}\njob: {script: train.py}\n")
    (shell.folder / "train.py").write_text("")
    (shell.folder / "logs").mkdir()
    for name in ("logs/rank-0.log", "a.log", "b.log"):
        (shell.folder / name).write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n")
    plain(shell, lines, request)


def to_advise(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A project, a model's configuration, and a model; what is measured is small."""
    shell.names = {"--layers 8 --hidden 512 --gpus 4": "--layers 2 --hidden 64 --gpus 1"}
    shell.type("dtctl init . --launcher local")
    (shell.folder / "config.json").write_text(
        '{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, '
        '"vocab_size": 99}'
    )
    (shell.folder / "mypackage").mkdir()
    (shell.folder / "mypackage" / "model.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))\n"
    )
    plain(shell, lines, request)


SCENES: dict[tuple[str, str], Scene] = {
    ("README.md", "make demo"): demo,
    ("README.md", "source .venv/bin/activate"): five_minutes,
    ("README.md", "dtctl launch"): over_ssh,
    ("README.md", "dtctl sandbox up --nodes 4"): plain,
    ("README.md", "make check"): plain,
    ("examples/README.md", "cd examples/gpt"): plain,
    ("docs/index.md", "pip install '.[train]'"): plain,
    ("docs/guides/advise.md", "dtctl advise"): to_advise,
    ("docs/guides/bench.md", "dtctl bench"): to_examine,
    ("docs/guides/doctor.md", "dtctl doctor"): to_examine,
    ("docs/guides/doctor.md", "dtctl doctor --log logs/"): to_examine,
    ("docs/guides/gpu.md", "dtctl doctor --gpu"): to_examine,
    ("docs/guides/gpu.md", "dtctl launch --nodes gpu01 --slots 1 -- train.py"): over_ssh,
    ("docs/guides/gpu.md", "make gpu"): plain,
    ("docs/guides/lint.md", "dtctl lint train.py"): to_lint,
    ("docs/guides/machines.md", "dtctl init my-gpt --launcher ssh"): own_machines,
    ("docs/guides/machines.md", "dtctl launch --nodes gpu01,gpu02 --slots 8 -- train.py --lr 1e-3"): over_ssh,
    ("docs/guides/report.md", "dtctl report"): past_runs,
    ("docs/guides/sandbox.md", "dtctl sandbox up --nodes 4"): plain,
    ("docs/guides/sandbox.md", "dtctl sandbox fault cut node2"): faults_on_hosts,
    ("docs/guides/sandbox.md", "sudo dtctl sandbox up --nodes 4 --slurm"): with_slurm,
    ("docs/guides/kubernetes.md", "dtctl render --out job.yaml"): for_kubernetes,
    ("docs/guides/slurm.md", "dtctl doctor"): on_slurm,
    ("docs/guides/slurm.md", "dtctl sbatch"): batch,
    ("docs/guides/snapshots.md", "dtctl snapshot ls"): past_runs,
    ("docs/guides/snapshots.md", "dtctl launch --resume RUN"): past_runs,
    ("docs/guides/training.md", "python train.py --train.lr=1e-2 --train.steps=200"): past_runs,
}
"""(document, first line of the block) -> how it is run."""
WITHIN = {("docs/guides/machines.md", "dtctl validate")}
"""Blocks that the scene of another one runs."""
ALL = [(name, lines) for name in DOCS for lines in blocks(name) if (name, lines[0]) not in WITHIN]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "lines"), ALL, ids=[f"{name}: {lines[0]}" for name, lines in ALL])
def test_a_block_of_commands(name: str, lines: list[str], shell: Shell, request: pytest.FixtureRequest) -> None:
    scene = SCENES.get((name, lines[0]))
    assert scene is not None, f"{name}: the block that begins with `{lines[0]}` has no scene"
    if (name, lines[0]) == ("examples/README.md", "cd examples/gpt"):
        subprocess.run(["cp", "-r", str(ROOT / "examples"), str(shell.folder)], check=True)
        subprocess.run(["rm", "-rf", str(shell.folder / "examples/gpt/.dtctl")], check=True)
        shell._shorten()
    scene(shell, lines, request)


def test_no_scene_is_left_over() -> None:
    found = {(name, lines[0]) for name in DOCS for lines in blocks(name)}
    assert {*SCENES, *WITHIN} == found


INLINE = sorted({found for name in DOCS for found in re.findall(r"`(dtctl [^`\n]+)`", (ROOT / name).read_text())})


@pytest.mark.parametrize("line", INLINE)
def test_a_command_in_a_sentence_exists_with_its_options(line: str) -> None:
    from typer.main import get_command
    from typer.testing import CliRunner

    from dtctl.cli.app import app_of

    app = app_of(())
    command, words = get_command(app), shlex.split(line.replace(" | ", " "))[1:]
    path: list[str] = []
    while words and words[0] in getattr(command, "commands", {}):
        path.append(words[0])
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    assert path or words[0].startswith("-"), f"there is no command {line}"
    shown = CliRunner().invoke(app, [*path, "--help"], terminal_width=200).output
    options = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
    assert [
        word for word in options if word.startswith("-") and word not in (*shown.replace(",", " ").split(), "-h")
    ] == []
