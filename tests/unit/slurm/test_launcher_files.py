"""What a job brings along: a launcher that needs the standard library alone, and is told what a launch here knows."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import dtctl
from dtctl import names, node_facts
from dtctl.errors import LaunchError
from dtctl.launch.records.events import NodesAllocated
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.run_writer import RunWriter
from dtctl.plan.bind import AttemptFacts, bind_plan
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.model import ThreadCount
from dtctl.render import render_node_script
from dtctl.slurm import launcher_files
from dtctl.slurm.job_control import build_job_in_allocation, open_ledger, own_address, read_granted_cores
from dtctl.slurm.job_file import JobFile, read_job_file
from dtctl.slurm.launcher_files import START, make_launcher, pack_modules
from dtctl.spec.load import parse_spec
from dtctl.spec.model import Spec
from dtctl.spec.nodes import resolve_nodes

PACKAGE = Path(dtctl.__file__).parent
SLURM = "cluster: {transport: slurm, nodes: 2, slots: 2}\n"
SPECS = {
    "direct": "job: {script: t.py, kind: direct, max_restarts: 2, env: {A: \"it's $HOME\", OMP_NUM_THREADS: '3'}}\n",
    "torchrun": "job: {script: t.py, args: [--node-rank=9]}\n",
    "secret": "job: {module: m, kind: direct, secrets: [KEY], env_from: [FROM_*], setup: ['module load x']}\n",
    "deepspeed": "job: {script: t.py, kind: deepspeed, deepspeed: {fp16: {enabled: true}}}\n",
    "accelerate": "job: {script: t.py, kind: accelerate}\n",
    "command": "job: {command: [echo, $X, '', \"'\"]}\n",
    "train": "job: {script: t.py, kind: direct}\ntrain: {steps: 3, micro_batch: 2, seed: 1}\n",
}


def spec_of(name: str, folder: Path) -> Spec:
    return parse_spec(SLURM + SPECS[name], source="dtctl.yaml", base_dir=folder)


def path_of(module: str) -> Path | None:
    path = PACKAGE.parent / Path(*module.split("."))
    return next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None)


def imports(path: Path) -> Iterator[str]:
    """All that a module imports when it runs, at any time."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.startswith("dtctl"))


def reachable(start: str) -> tuple[set[Path], set[str]]:
    """Files of dtctl, and packages of others, that a module may import."""
    files, others, todo = set[Path](), set[str](), [start]
    while todo:
        module = todo.pop()
        todo += [module.rpartition(".")[0]] if "." in module else []
        if module.partition(".")[0] != "dtctl":
            others.add(module.partition(".")[0])
        elif (path := path_of(module)) is not None and path not in files:
            files.add(path)
            todo += imports(path)
    return files, others - set(sys.stdlib_module_names)


def test_the_zip_has_all_that_the_launcher_may_import_and_that_is_of_dtctl() -> None:
    files, others = reachable("dtctl.slurm.job_control")
    assert others == set()
    packed = set(zipfile.ZipFile(io.BytesIO(pack_modules())).namelist())
    assert {path.relative_to(PACKAGE.parent).as_posix() for path in files} - packed == set()


def test_the_same_modules_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    first = pack_modules()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert pack_modules() == first


def test_the_zip_is_packed_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[str] = []
    real = launcher_files._compile_to_pyc

    def compile_and_count(name: str, text: str) -> bytes:
        compiled.append(name)
        return real(name, text)

    monkeypatch.setattr(launcher_files, "_compile_to_pyc", compile_and_count)
    first, count = pack_modules(), len(compiled)
    assert pack_modules() == first
    assert len(compiled) == count > 50
    monkeypatch.setattr(launcher_files, "START", launcher_files.START + "# another one")
    assert pack_modules() != first
    assert len(compiled) == 2 * count


@pytest.mark.parametrize("damage", [b"", b"no zip"], ids=["empty", "other bytes"])
def test_a_damaged_kept_zip_is_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = pack_modules()
    (kept,) = tmp_path.rglob("launcher.*.zip.*")
    kept.write_bytes(damage)
    assert pack_modules() == first


def test_it_runs_without_any_package(tmp_path: Path) -> None:
    path = tmp_path / "launcher.zip"
    path.write_bytes(pack_modules())
    environ = {names.RUN_DIR: str(tmp_path), "PATH": os.environ["PATH"]}
    missing = subprocess.run(
        [sys.executable, "-I", "-S", str(path)], env={**environ, names.RUN_ID: "r", "SLURM_JOB_ID": "7"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert missing.returncode == LaunchError.exit_code
    assert "the launcher's job file cannot be read" in missing.stdout


def test_the_launcher_in_a_zip_packs_the_program_for_nodes(tmp_path: Path) -> None:
    """It lacks modules that this machine has, such as the probe's."""
    path = tmp_path / "launcher.zip"
    path.write_bytes(pack_modules())
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from dtctl.supervisor import bootstrap; "
        "print(len(bootstrap.build_opening_bytes('~/x', 'dtctl.supervisor.setup')))"
    )
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    argv = [sys.executable, "-I", "-S", "-c", code, str(path)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50_000


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    """By a part of the zip that any Python can read."""
    (tmp_path / "main.py").write_text(f"import sys\nsys.version_info = (3, 8, 20)\n{START}")
    done = subprocess.run([sys.executable, tmp_path / "main.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"dtctl: error: {sys.executable} on ")
    assert "older than 3.10; cluster.python names another one" in done.stderr
    assert ast.parse(START, feature_version=(3, 7))


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_inside_the_job_is_the_plan_outside(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    monkeypatch.setenv("FROM_HERE", "a b")
    file = told(spec_of(name, tmp_path))
    spec = spec_of(name, tmp_path)
    nodes = tuple(replace(node, address=f"10.0.0.{at}") for at, node in enumerate(resolve_nodes(spec), 1))
    facts = PlanFacts(
        environ=os.environ, address="10.0.0.1", port=20100, gpus={node.name: 0 for node in nodes},
        cores={node.name: 6 for node in nodes},
    )  # fmt: skip
    outside = build(spec, nodes, run="run-1", attempt=2, facts=facts)
    template = replace(
        file.template,
        nodes=tuple(replace(each, address=node.address) for each, node in zip(file.template.nodes, nodes, strict=True)),
    )
    inside = bind_plan(
        template, AttemptFacts(number=2, rendezvous=outside.rendezvous, gpus=facts.gpus, cores=facts.cores)
    )
    assert inside.nodes[1].env == outside.nodes[1].env
    assert inside.nodes[1].argv == outside.nodes[1].argv
    assert inside.nodes[1].setup[1:] == outside.nodes[1].setup
    for one, other in zip(inside.nodes, outside.nodes, strict=True):
        expected = render_node_script(outside, other, base_dir=tmp_path)
        assert environment_of(file.make_script(inside, one)) == environment_of(expected)


def test_the_time_of_a_job_by_hand_counts_from_its_first_start(tmp_path: Path) -> None:
    record, now = RunWriter(tmp_path / "control"), time.time()
    record.folder.mkdir()
    file = replace(told(spec_of("train", tmp_path)), is_followed=False)
    assert open_ledger(record, file).total_s() < 30
    record.append_event(NodesAllocated(time=now - 100, nodes=("a", "b")))
    Ledger(lambda: now, begun=now - 70, phase="run").write(record.folder / names.LEDGER_FILE, attempts=1)
    os.utime(record.folder / names.LEDGER_FILE, (now - 30, now - 30))
    ledger = open_ledger(record, file)
    assert ledger.phase == "restart"
    assert ledger.spent["restart"] == pytest.approx(30, abs=15)
    assert ledger.spent["run"] == pytest.approx(70, abs=0.1)


def told(spec: Spec) -> JobFile:
    """What the launcher inside the job of a spec is told."""
    path = spec.base_dir / "launcher.zip"
    path.write_bytes(make_launcher(spec, "run-1", code="", snapshots="", is_followed=True))
    return read_job_file(path)


def environment_of(script: str) -> dict[str, str]:
    """What a script gives the program that it ends with: variables, and its words by their places."""
    head, _, last = script.replace("module load x", "true").rpartition("\nexec ")
    via = '${DTCTL_VIA:+sh "$DTCTL_VIA"} '
    end = f"\nprintf 'word %s\\0' {last.removeprefix(via)}\nexec env -0"
    environ = {"HOME": "/h", "PATH": os.environ["PATH"], "X": "x"}
    done = subprocess.run(["bash", "-c", head + end], env=environ, check=True, capture_output=True)
    entries = [entry for entry in done.stdout.decode().split("\0") if entry[:2] != "_="]
    words = [entry for entry in entries if entry.startswith("word ")]
    ours = ("DTCTL_MASTER_ADDR", "DTCTL_MASTER_PORT")
    variables = (entry.partition("=") for entry in entries if entry not in words)
    return {name: value for name, _, value in variables if name not in ours} | {
        f"word {at}": word for at, word in enumerate(words)
    }


def test_a_launch_inside_is_the_launch_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares, a restart on other nodes, and the threads that the first attempt has had."""
    monkeypatch.setenv("KEY", "secret")
    file = told(spec_of("secret", tmp_path))
    environ = {names.RUN_ID: "run-1", "SLURM_JOB_ID": "7", "KEY": "value"}
    addresses = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
    job = build_job_in_allocation(file, addresses, tmp_path, environ, attempt=0)
    assert [node.name for node in job.first_plan.nodes] == ["n1", "n2"]
    assert [*job.spares] == ["n3"]
    assert job.spares["n3"].node_rank == 1
    assert job.secrets == {"KEY": "value"}
    assert job.first_plan.rendezvous.address == "10.0.0.1"
    threads = ThreadCount(number=5, reason="counted before")
    again = job.make_plan(1, ["n3", "n1"], "10.0.0.3", 20200, gpus={}, threads=threads)
    assert [(node.name, node.address, node.first_rank) for node in again.nodes] == [
        ("n3", "10.0.0.3", 0), ("n1", "10.0.0.1", 2),
    ]  # fmt: skip
    assert again.threads == threads
    assert 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-5}"\n' in job.make_script(again, again.nodes[0])
    assert "value" not in job.make_script(again, again.nodes[0])


def test_nodes_that_differ_have_scripts_of_their_own(tmp_path: Path) -> None:
    nodes = "cluster: {transport: slurm, nodes: [{name: a, slots: 2}, {name: b, slots: 1, env: {ONLY: here}}]}\n"
    spec = parse_spec(nodes + SPECS["direct"], source="dtctl.yaml", base_dir=tmp_path)
    job = build_job_in_allocation(
        told(spec), {"n1": "10.0.0.1", "n2": "10.0.0.2"}, tmp_path,
        {names.RUN_ID: "run-1", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"}, attempt=0,
    )  # fmt: skip
    first, second = (job.make_script(job.first_plan, node) for node in job.first_plan.nodes)
    assert ("ONLY=here" in first, "ONLY=here" in second) == (False, True)
    assert environment_of(second)["SLURM_CPUS_PER_TASK"] == "3", "programs take it for the number of their readers"
    assert [node.slots for node in job.first_plan.nodes] == [2, 1]


def test_processors_are_those_that_slurm_has_given() -> None:
    environ = {"SLURM_JOB_CPUS_PER_NODE": "72(x2),36"}
    assert read_granted_cores(["a", "b", "c", "d"], environ) == {"a": 72, "b": 72, "c": 36}
    assert read_granted_cores(["a"], {}) == {}


def test_several_nodes_never_meet_at_an_address_that_each_has_for_itself() -> None:
    """A name that only Slurm knows, or that /etc/hosts takes for this machine."""
    assert own_address("nowhere.invalid", "localhost") == node_facts.find_address_towards("192.0.2.1")


def test_a_damaged_launcher_is_named(tmp_path: Path) -> None:
    path = tmp_path / "launcher.zip"
    for content in (b"", b"no zip", pack_modules()):
        path.write_bytes(content)
        with pytest.raises(LaunchError, match="cannot be read"):
            read_job_file(path)
