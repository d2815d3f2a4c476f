"""Every command line of the README and the documentation is run as it stands there, block by block.

A block is a scene: a folder, machines, runs that it speaks of, and what its names (`gpu01`, `RUN`) stand for. Trainings
are made short, and nothing else is changed. A block that is new in a document fails until it has a scene here.

What stands below a command in a block is what it has printed: each line of it has to come again, but for numbers,
units, names of runs and paths. `...` stands for lines that are left out; where it stands alone below a command,

    DTCTL_WRITE_DOCS=1 python -m pytest tests/integration/test_docs.py

writes what was printed in its place.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox
from tests.hosts import wait_until, workers

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ["README.md", "examples/README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("dtctl", "cat", "make", "cd", "uv", "python", "pip", "sudo", "export")
NOT_RUN = {
    "make test": "it runs this test",
    "make check": "it stands in front of this test in `make test`",
    "make unit": "it stands in front of this test in `make test`",
    "make integration": "it runs this test",
    "make gpu": "it needs a GPU; test_gpu_checks.py runs the part of each check that a CPU shows",
    "make bench": "it takes minutes and needs an idle machine; tests/unit/benchmarks runs its parts",
    "pip install '.[train]'": "it needs the network",
    "pip install .": "test_install.py installs the packages",
    "uv tool install .": "`make dist-check` installs the packages",
    "pipx install .": "likewise",
    "uv tool install dtctl": "likewise",
    "pipx install dtctl": "likewise",
    "uvx dtctl --version": "likewise",
    "kubectl apply --filename job.yaml": "there is no Kubernetes here; schemas are checked elsewhere",
    "srun --overlap --nodes=1 --ntasks=1 bash job.sbatch": "it is inside an allocation; test_slurm_allocation.py",
    "dtctl render --apply": "likewise; tests/cli/test_render.py shows what kubectl is given",
    "dtctl render --logs": "likewise",
    "dtctl render --delete": "likewise",
    "uv tool install 'dtctl[train]'": "`make dist-check` installs the packages",
}
"""Command lines that this test cannot run, and why."""
CODES = {
    "dtctl doctor --skip collective dtctl.yaml": 9,
    "dtctl lint wrong.py": 9,
    "dtctl doctor --log logs/": 9,
    "dtctl doctor --log a.log b.log --json": 9,
    "dtctl doctor --log .dtctl/runs/RUN": 9,
    "dtctl doctor --gpu": 9,
}
"""Command lines that end with another exit code than 0, as they should: these logs tell of a failure, and here is no
GPU."""
GLOO_ABORT = "terminate called without an active exception"
"""A plain program of a guide may end so, after its work: a thread of gloo's meets the end of the interpreter
(https://github.com/pytorch/pytorch/issues/190489). Once in thousands of runs; the command is then typed again."""
TALKER = """\
import json, os, sys
rank = os.environ["RANK"]
print("rank", rank, sys.argv[1:], flush=True)
open(f"out-{rank}.txt", "w").close()
if rank == "0":
    with open(os.environ["DTCTL_METRICS"], "w") as file:
        for step in range(1, 5):
            print(json.dumps({"step": step, "loss": 1 / step, "time": 1e9, "step_s": 0.1}), file=file)
"""
"""A job without torch."""


@dataclass(frozen=True)
class Block:
    """Command lines of a document, without prompts and remarks, and what the document shows below each."""

    commands: list[str]
    shown: dict[str, list[str]]


def blocks(name: str) -> Iterator[Block]:
    """The blocks of a document that are typed."""
    for language, body in BLOCK.findall((ROOT / name).read_text(encoding="utf-8")):
        lines = [line for line in body.splitlines() if line.strip()]
        prompted = any(line.startswith("$ ") for line in lines)
        typed = lines[0].removeprefix("$ ").partition(" ")[0] in PROGRAMS
        if language not in ("console", "bash", "sh") and not (language in ("", "text") and typed):
            continue
        block = Block([], {})
        for line in lines:
            if prompted and not line.startswith("$ "):
                block.shown.setdefault(block.commands[-1], []).append(line)
            else:
                block.commands.append(re.sub(r"\s{2,}.*|\s+#\s.*", "", line.removeprefix("$ ")))
        yield block


def shape(line: str) -> str:
    """A line of output without what differs from run to run."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"(?:~|/)[\w.+~-]*(?:/[\w.+~-]+)+", "PATH", line)
    line = re.sub(r"\b([\w.-]+)-\d{4}-\d{4,6}(?:-\w{4})?\b", "RUN", line)
    line = re.sub(r"\b[0-9a-f]{16,}\b", "DIGEST", line)
    line = re.sub(r"\d[\d.,:]*(?:e[+-]?\d+)?", "0", line)
    line = re.sub(r"\b0 ?(?:B|[kKMG]i?B|us|ms|s|min|h)\b", "0 U", line)
    return re.sub(r"[\s─-]+", " ", line).strip()


@dataclass
class Shell:
    """A terminal that remembers its folder and its variables from one line to the next."""

    folder: Path
    env: dict[str, str]
    names: Mapping[str, str] = field(default_factory=dict)
    """What stands for a name in a command line."""
    shown: Mapping[str, list[str]] = field(default_factory=dict)
    """What the document shows below a command line."""
    document: Path | None = None
    """The one to write outputs into; None: they are compared."""

    def type(self, line: str) -> str:
        """Run a line; what it has printed."""
        asked, code, shown = line, CODES.get(line, 0), self.shown.get(line, [])
        for name, meant in self.names.items():
            line = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w.-])", meant, line)
        after = self.folder.parent / "after"
        script = f"{line}\ncode=$?\n{{ pwd; env -0; }} > {shlex.quote(str(after))}\nexit $code\n"
        run = partial(
            subprocess.run, ["bash", "-c", script], cwd=self.folder, env=self.env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=600, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        done = run()
        if done.returncode != code and GLOO_ABORT in done.stdout:
            done = run()
        assert done.returncode == code, f"$ {line}\n{done.stdout[-4000:]}"
        if shown == ["..."] and self.document is not None:
            self._write(asked, done.stdout)
        printed = {shape(line) for line in done.stdout.splitlines()}
        missing = [line for line in shown if line.strip() != "..." and shape(line) not in printed]
        assert not missing, f"$ {line}\nnot printed:\n" + "\n".join(missing) + f"\nprinted:\n{done.stdout[-4000:]}"
        folder, _, variables = after.read_text().partition("\n")
        self.folder = Path(folder)
        self.env = dict(variable.split("=", 1) for variable in variables.split("\0") if variable)
        self._shorten()
        return done.stdout

    def _write(self, command: str, printed: str) -> None:
        """Put what was printed below a command of the document, without colours and with a reader's paths."""
        assert self.document is not None
        text = re.sub(r"\x1b\[[0-9;]*m", "", printed).rstrip()
        for folder, meant in ((self.folder, "/home/me/gpt"), (Path.home(), "/home/me"), (ROOT, "/home/me/dtctl")):
            text = text.replace(str(folder), meant)
        before = self.document.read_text(encoding="utf-8")
        pattern = re.compile(rf"(^\$ {re.escape(command)}(?:  .*)?\n)\.\.\.\n", re.MULTILINE)
        self.document.write_text(pattern.sub(lambda m: m[1] + text + "\n", before, count=1), encoding="utf-8")

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
    sandbox = control.start_sandbox("docs", nodes=4)
    yield sandbox
    left = {node.name: workers(node) for node in sandbox.nodes}
    control.remove_sandbox(sandbox.name)
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
    control.remove_sandbox("own")
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
    before = sorted((ROOT / "examples/gpt").iterdir())
    temporary = shell.folder / "tmp"
    temporary.mkdir()
    said = shell.type(f"(cd {ROOT} && TMPDIR={temporary} python examples/demo.py)")
    assert "the run recovered by itself" in said
    assert list(temporary.iterdir()) == []
    assert sorted((ROOT / "examples/gpt").iterdir()) == before


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
            (shell.folder / "dtctl.yaml").unlink(missing_ok=True)
            more = " ".join(f"--set cluster.{option.replace(': ', '=')}" for option in options)
            line = line.replace(" -- ", f" {more} --set job.kind=direct -- ")
        told[line.split()[1]] = shell.type(line)
    if "logs" in told:
        assert told["logs"].strip().startswith("[gpu02:9] rank 9 [")


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
    (shell.folder / "dtctl.yaml").write_text(f"{told}\ntrain:{rest}")
    following = list(blocks("docs/guides/machines.md"))[1]
    shell.shown = following.shown
    shown = [shell.type(line) for line in following.commands]
    assert "gpu04" in shown[1]


def own_loop(shell: Shell, lines: list[str], _: pytest.FixtureRequest) -> None:
    """The script of the page, without and with the launcher of dtctl."""
    text = (ROOT / "docs/guides/own-loop.md").read_text()
    (shell.folder / "train.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    for line in lines:
        shell.type(line)
    assert (shell.folder / "final.pt").exists()


def past_runs(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A run with metrics and snapshots, and another before it where the block names it."""
    (shell.folder / "dtctl.yaml").write_text(
        "cluster: {transport: local, slots: 1}\n"
        "job: {script: train.py, kind: direct}\ntrain: {steps: 4, snapshot: {every_steps: 2}}\n"
    )
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/training.md").read_text(), re.DOTALL)[0]
    (shell.folder / "train.py").write_text(code)
    earlier, newest = "gpt-1121-0930", "gpt-1121-1412"
    runs = [earlier, newest] if earlier in " ".join(lines) else [newest]
    there = [Path.home() / ".dtctl" / "node" / "runs" / run for run in runs]
    subprocess.run(["rm", "-rf", *map(str, there)], check=True)  # a test that was killed has left them
    try:
        for run in runs:
            shell.type(f"dtctl launch --name {run}")
        [saved] = {path.parent for path in Path.home().glob(f".dtctl/node/runs/{newest}/snapshots/step-*")}
        shell.names = {"RUN": newest, "DIR": str(saved)}
        plain(shell, lines, request)
    finally:
        subprocess.run(["rm", "-rf", *map(str, there)], check=True)


def faults_on_hosts(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """On four hosts that are up already."""
    shell.type("dtctl sandbox up --nodes 4")
    plain(shell, lines, request)


def hosts_with_a_fault(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A spec that names them."""
    spec = f"cluster: {{transport: sandbox, nodes: 3, slots: 1, python: {sys.executable}}}\njob: {{script: train.py}}\n"
    (shell.folder / "dtctl.yaml").write_text(spec)
    (shell.folder / "train.py").write_text("")
    plain(shell, lines, request)


MISTAKES = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(8, 1).to("cuda:0"))
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
    dist.barrier()
"""


def a_script_with_mistakes(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """Every worker on one GPU, and a barrier that only one reaches."""
    (shell.folder / "wrong.py").write_text(MISTAKES)
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
    page = (ROOT / "docs/guides/kubernetes.md").read_text()
    told = re.findall(r"```yaml\n((?:#[^\n]*\n)?cluster:.*?)```", page, re.DOTALL)[0]
    (shell.folder / "dtctl.yaml").write_text(told)
    (shell.folder / "train.py").write_text("")
    plain(shell, lines, request)


def to_lint(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A file with nothing to find, and a spec that sends it."""
    (shell.folder / "train.py").write_text("VALUE = 1\n")
    (shell.folder / "dtctl.yaml").write_text("cluster: {transport: local}\njob: {script: train.py}\n")
    plain(shell, lines, request)


def one_script(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """The script that a guide begins with."""
    text = (ROOT / "docs/guides/to-many-nodes.md").read_text()
    (shell.folder / "train.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if lines == ["python train.py"]:
        shell.env |= alone
    plain(shell, lines, request)


def your_program(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """The spec of the page on hosts, with a program that needs no packages and an empty folder of data."""
    told = re.findall(r"```yaml\n(cluster:.*?)```", (ROOT / "docs/guides/your-program.md").read_text(), re.DOTALL)[0]
    # The environment of the page has torch, which would take minutes and the network.
    told = told.replace("wheels: relay", f"index: {shell.folder}").replace("script:", "kind: direct\n  script:")
    (shell.folder / "dtctl.yaml").write_text(told)
    (shell.folder / "requirements.txt").write_text("")
    (shell.folder / "multinode.py").write_text(TALKER)
    (shell.folder / ".gitignore").write_text("data/\n")
    (shell.folder / "data").mkdir()
    (shell.folder / "data" / "train.bin").write_bytes(b"data")
    plain(shell, lines, request)


def to_examine(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """This machine as a cluster, and the logs of a job that failed."""
    # A benchmark for networks, made small.
    shell.names = {"NAME": "NCCL_DEBUG", "1M:1G": "1M:2M", "dtctl bench": "dtctl bench --sizes 4K:16K --repeats 2"}
    (shell.folder / "dtctl.yaml").write_text("cluster: {transport: local, slots: 2}\njob: {script: train.py}\n")
    (shell.folder / "train.py").write_text("import os\n\nos.abort()\n")
    # The name is new, since tests share this machine's folder for runs; the page calls the run RUN.
    run = f"failed-{uuid.uuid4().hex[:8]}"
    shell.type(f"! dtctl launch --name {run} && mv .dtctl/runs/{run} .dtctl/runs/RUN")
    (shell.folder / "train.py").write_text("")
    (shell.folder / "logs").mkdir()
    for name in ("logs/rank-0.log", "a.log", "b.log"):
        (shell.folder / name).write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n")
    plain(shell, lines, request)


def to_advise(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """A project, a model's configuration, and a model; what is measured is small."""
    shell.names = {"--layers 8 --hidden 512 --gpus 4": "--layers 2 --hidden 64 --gpus 1 --seq 64"}
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


def to_divide_experts(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """The configuration of a mixture."""
    (shell.folder / "config.json").write_text(
        '{"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 99, "num_local_experts": 8, '
        '"num_experts_per_tok": 2}'
    )
    plain(shell, lines, request)


def watched(shell: Shell, lines: list[str], request: pytest.FixtureRequest) -> None:
    """The section `metrics` that stands there, of a run that continues until its page was read."""
    told = re.findall(r"```yaml\n(metrics:.*?)```", (ROOT / "docs/guides/metrics.md").read_text(), re.DOTALL)[0]
    end = shell.folder / "end"
    (shell.folder / "dtctl.yaml").write_text(
        "cluster: {transport: local, slots: 1}\njob: {script: train.py, kind: direct}\n"
        + told.replace("9410", "auto").replace(".example:", ".invalid:")
    )
    (shell.folder / "train.py").write_text(
        f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(end)!r}): time.sleep(0.1)\n"
    )
    shell.env |= {"WEBHOOK_URL": "http://chat.invalid/hook"}
    launching = threading.Thread(target=Shell(shell.folder, dict(shell.env)).type, args=(lines[0],), daemon=True)
    launching.start()
    targets = shell.folder / ".dtctl" / "prometheus"
    try:
        wait_until(lambda: list(targets.glob("*.json")), what="the page is there")
        ((place,),) = [entry["targets"] for entry in json.loads(next(targets.glob("*.json")).read_text())]
        shell.names = {"http://127.0.0.1:9410/metrics": f"--noproxy '*' http://{place}/metrics"}
        assert "dtctl_run_status" in shell.type(lines[1])
    finally:
        end.touch()
        launching.join()


SCENES: dict[tuple[str, str], Scene] = {
    ("README.md", "make demo"): demo,
    ("README.md", "uv tool install 'dtctl[train]'"): five_minutes,
    ("README.md", "dtctl doctor"): over_ssh,
    ("examples/README.md", "cd examples/gpt"): plain,
    ("docs/index.md", "uv tool install 'dtctl[train]'"): plain,
    ("docs/guides/advise.md", "dtctl advise"): to_advise,
    ("docs/guides/bench.md", "dtctl bench"): to_examine,
    ("docs/guides/debugging.md", "python train.py"): one_script,
    ("docs/guides/debugging.md", "dtctl doctor --log logs/"): to_examine,
    ("docs/guides/debugging.md", "dtctl launch --dry-run"): to_examine,
    ("docs/guides/debugging.md", "dtctl doctor"): to_examine,
    ("docs/guides/doctor.md", "dtctl doctor"): to_examine,
    ("docs/guides/doctor.md", "dtctl sandbox up --nodes 3"): hosts_with_a_fault,
    ("docs/guides/lint.md", "cat wrong.py"): a_script_with_mistakes,
    ("docs/guides/advise.md", "dtctl advise --params 7B --gpus 16 --gpu A100 --batch 64"): plain,
    ("docs/guides/doctor.md", "dtctl doctor --log logs/"): to_examine,
    ("docs/guides/distributed.md", "dtctl advise --params 7.5B --gpus 64 --gpu A100 --batch 512"): plain,
    ("docs/guides/frameworks.md", "dtctl init my-job --template accelerate --launcher local"): plain,
    ("docs/guides/gpu.md", "dtctl doctor --gpu"): to_examine,
    ("docs/guides/gpu.md", "dtctl launch --nodes gpu01 --slots 1 -- train.py"): over_ssh,
    ("docs/guides/gpu.md", "make gpu"): plain,
    ("docs/guides/lint.md", "dtctl lint"): to_lint,
    ("docs/guides/experts.md", "dtctl advise --config config.json --gpus 64 --seq 4096 --batch 256"): to_divide_experts,
    ("docs/guides/machines.md", "dtctl init my-gpt --launcher ssh"): own_machines,
    ("docs/guides/machines.md", "dtctl launch --nodes gpu01,gpu02 --slots 8 -- train.py --lr 1e-3"): over_ssh,
    ("docs/guides/metrics.md", "dtctl launch"): watched,
    (
        "docs/guides/process-groups.md",
        "dtctl nccl explain MASTER_ADDR NCCL_TIMEOUT TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ): plain,
    ("docs/guides/own-loop.md", "torchrun --nproc-per-node 2 train.py"): own_loop,
    ("docs/guides/report.md", "dtctl report"): past_runs,
    ("docs/guides/sandbox.md", "dtctl sandbox up --nodes 4"): plain,
    ("docs/guides/sandbox.md", "dtctl sandbox fault cut node2"): faults_on_hosts,
    ("docs/guides/sandbox.md", "sudo dtctl sandbox up --nodes 4 --slurm"): with_slurm,
    ("docs/guides/install.md", "uv tool install dtctl"): plain,
    ("docs/guides/install.md", "uv tool install ."): plain,
    ("docs/guides/install.md", "dtctl --version"): plain,
    ("docs/guides/install.md", "pip install '.[train]'"): plain,
    ("docs/guides/kubernetes.md", "dtctl render --out job.yaml"): for_kubernetes,
    ("docs/guides/slurm.md", "dtctl doctor"): on_slurm,
    ("docs/guides/slurm.md", "dtctl sbatch"): batch,
    ("docs/guides/slurm.md", "dtctl sbatch --plain"): batch,
    ("docs/guides/slurm.md", "dtctl validate"): batch,
    ("docs/guides/slurm.md", "dtctl sbatch --out job.sbatch"): batch,
    ("docs/guides/snapshots.md", "dtctl snapshot ls"): past_runs,
    ("docs/guides/snapshots.md", "dtctl launch --resume RUN"): past_runs,
    ("docs/guides/to-many-nodes.md", "python train.py"): one_script,
    ("docs/guides/to-many-nodes.md", "dtctl lint train.py"): one_script,
    (
        "docs/guides/to-many-nodes.md",
        "dtctl launch --nodes localhost --slots 2 --set cluster.transport=local -- train.py",
    ): one_script,
    ("docs/guides/to-many-nodes.md", "dtctl sandbox up --nodes 2"): one_script,
    ("docs/guides/to-many-nodes.md", "dtctl doctor"): to_examine,
    ("docs/guides/your-program.md", "dtctl sandbox up --nodes 4"): your_program,
    ("docs/guides/training.md", "python train.py --train.lr=1e-2 --train.steps=200"): past_runs,
    ("docs/guides/training.md", "dtctl launch --set train.profile.start=20 --set train.profile.steps=3"): past_runs,
    ("docs/guides/training.md", "dtctl snapshot export RUN -o model.safetensors"): past_runs,
}
"""(document, first line of the block) -> how it is run."""
WITHIN = {("docs/guides/machines.md", "dtctl validate")}
"""Blocks that the scene of another one runs."""
SLOW = {
    "docs/index.md",
    "examples/README.md",
    *(f"docs/guides/{name}.md" for name in ("advise", "bench", "machines", "report", "snapshots", "training")),
}
ALL = [(name, block) for name in DOCS for block in blocks(name) if (name, block.commands[0]) not in WITHIN]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "block"),
    [
        pytest.param(name, block, id=f"{name}: {block.commands[0]}", marks=[pytest.mark.slow] if name in SLOW else [])
        for name, block in ALL
    ],
)
def test_a_block_of_commands(name: str, block: Block, shell: Shell, request: pytest.FixtureRequest) -> None:
    lines, shell.shown = block.commands, block.shown
    if os.environ.get("DTCTL_WRITE_DOCS"):
        shell.document = ROOT / name
    scene = SCENES.get((name, lines[0]))
    assert scene is not None, f"{name}: the block that begins with `{lines[0]}` has no scene"
    if (name, lines[0]) == ("examples/README.md", "cd examples/gpt"):
        subprocess.run(["cp", "-r", str(ROOT / "examples"), str(shell.folder)], check=True)
        subprocess.run(["rm", "-rf", str(shell.folder / "examples/gpt/.dtctl")], check=True)
        shell._shorten()
    scene(shell, lines, request)


def test_no_scene_is_left_over() -> None:
    found = {(name, block.commands[0]) for name in DOCS for block in blocks(name)}
    assert {*SCENES, *WITHIN} == found


CODE = [
    (name, code) for name in DOCS for code in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
]


@pytest.mark.parametrize(("name", "code"), CODE, ids=[name for name, _ in CODE])
def test_code_of_a_document_has_no_mistake_that_the_linter_knows(name: str, code: str, tmp_path: Path) -> None:
    from dtctl.lint.engine import lint_paths
    from dtctl.lint.model import ClusterFacts

    (tmp_path / "train.py").write_text(code)
    compile(code, name, "exec")
    assert [
        problem for problem in lint_paths([tmp_path / "train.py"], cluster=ClusterFacts()) if problem.severity != "info"
    ] == []


@pytest.mark.torch
def test_the_ten_lines_of_the_readme_learn_and_leave_what_it_says(tmp_path: Path) -> None:
    from dtctl.launch.files.tree import scan_push_tree

    text = (ROOT / "README.md").read_text()
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, check=True, capture_output=True)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] / 100
    left = {path.name for path in tmp_path.iterdir()} - {"train.py", "__pycache__"}
    assert left == {"snapshots", "metrics.jsonl"}
    assert "`python train.py` writes `snapshots/` and `metrics.jsonl`" in text
    assert len(scan_push_tree(tmp_path).files) > 2
    (tmp_path / ".gitignore").write_text("snapshots/\nmetrics.jsonl\n")
    assert {os.fsdecode(file.path) for file in scan_push_tree(tmp_path).files} == {".gitignore", "train.py"}


INLINE = sorted({found for name in DOCS for found in re.findall(r"`(dtctl [^`\n]+)`", (ROOT / name).read_text())})


@pytest.mark.parametrize("line", INLINE)
def test_a_command_in_a_sentence_exists_with_its_options(line: str) -> None:
    from typer.main import get_command
    from typer.testing import CliRunner

    from dtctl.cli.app import make_app

    app = make_app()
    command, words = get_command(app), shlex.split(line.replace(" | ", " "))[1:]
    path: list[str] = []
    while words and words[0] in getattr(command, "commands", {}):
        path.append(words[0])
        command = command.get_command(None, words.pop(0))  # type: ignore[attr-defined]
    assert path or words[0].startswith("-"), f"there is no command {line}"
    shown = CliRunner().invoke(app, [*path, "--help"], terminal_width=200).output
    options = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
    assert [
        word for word in options if word.startswith("-") and word not in (*shown.replace(",", " ").split(), "-h")
    ] == []
