"""The public surface: commands, options, exit codes. A change here is a change of a contract."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import dtctl
from tests.facts import missing

_NEVER = "torch numpy paramiko rich logging asyncio multiprocessing unittest http xml dtctl.runtime dtctl.lint"
"""Modules that no command below needs."""
_SPEC = "yaml dtctl.spec dtctl.plan"
_BACK_ENDS = "dtctl.transport.openssh dtctl.slurm dtctl.kubernetes dtctl.metrics"
_RUN = f"dtctl.launch.control dtctl.supervisor {_BACK_ENDS}"
_LAUNCHER = f"dtctl.launch.job_builder dtctl.launch.control.link dtctl.transport {_BACK_ENDS}"


def _list_loaded(names: str, *arguments: str, cwd: Path) -> list[str]:
    """Return the modules among these that a command has loaded."""
    program = (
        "import sys\nfrom dtctl.cli.main import main\n"
        "try:\n    main(sys.argv[2:])\nexcept SystemExit as exc:\n    assert not exc.code\n"
        "print('LOADED', *sorted({*sys.argv[1].split()} & {*sys.modules}))"
    )
    argv = [sys.executable, "-c", program, f"{_NEVER} {names}", *arguments]
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (("--help",), f"pydantic jinja2 json dtctl.launch {_SPEC}"),
        (("validate",), f"jinja2 encodings.idna dtctl.launch.records dtctl.render dtctl.train dtctl.advise {_RUN}"),
        (("launch", "--dry-run"), f"encodings.idna dtctl.launch.job_builder dtctl.train {_RUN}"),
    ],
)
def test_a_command_does_not_load_what_it_does_not_need(
    tmp_path: Path, arguments: tuple[str, ...], unneeded: str
) -> None:
    (tmp_path / "dtctl.yaml").write_text(
        "cluster: {transport: ssh, nodes: ['gpu[01-02].invalid'], slots: 8}\njob: {script: t.py}\n"
    )
    (tmp_path / "t.py").write_text("")
    assert _list_loaded(unneeded, *arguments, cwd=tmp_path) == []


def test_a_look_at_a_run_loads_no_launcher(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(f"cluster: {{workdir: {tmp_path / 'node'}}}\njob: {{command: ['true']}}\n")
    assert dtctl("launch", cwd=tmp_path).returncode == 0
    assert _list_loaded(f"jinja2 {_SPEC} {_LAUNCHER}", "runs", cwd=tmp_path) == []
    assert _list_loaded(f"jinja2 dtctl.plan {_LAUNCHER}", "status", cwd=tmp_path) == []


def test_the_commands() -> None:
    from typer.main import get_command

    from dtctl.cli.app import make_app

    root: Any = get_command(make_app())
    commands = [root.get_command(None, name) for name in root.list_commands(None)]
    groups = {command.name for command in commands if hasattr(command, "commands")}
    assert {command.name for command in commands if not command.hidden} - groups == {
        "init", "validate", "launch", "runs", "status", "logs", "watch", "stop", "doctor", "bench", "lint",
        "sbatch", "advise", "report", "render", "exec", "fetch", "clean",
    }  # fmt: skip
    assert groups == {"sandbox", "snapshot", "nccl"}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("launch", "--nodes --slots --set --dry-run --out --detach --doctor --name --json"),
        ("init", "--template --launcher --list --force --spec-only"),
        ("validate", "--set --schema --json"),
        ("logs", "-f --node --rank"),
        ("fetch", "--node --out --json"),
        ("clean", "--older --larger --yes --others --json"),
        ("runs", "--nodes --json"),
        ("sandbox up", "--nodes --slurm --name --json"),
        ("snapshot", "ls verify show digest prune export"),
        ("snapshot verify", "--json"),
        ("snapshot prune", "--keep --every-h --dry-run --json"),
        ("snapshot export", "--out --part --json"),
        ("doctor", "--log --quick --yes --json"),
        ("render", "--target --out --name --set --apply --delete --logs"),
        ("sbatch", "--out --submit --plain --set --yes --json"),
        ("advise", "--config --model --params --gpus --gpu-memory --batch --write --measure --plot --json"),
        ("lint", "--format --json --fix --select --severity --spec --explain"),
        ("report", "--out"),
        ("bench", "--op --sizes --backend --repeats --training --plot --set --json"),
    ],
)
def test_the_options(tmp_path: Path, arguments: str, options: str) -> None:
    text = dtctl(*arguments.split(), "-h", cwd=tmp_path).stdout
    assert [option for option in options.split() if option not in text] == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--version",), 0, "dtctl 0."),
        (("nonsense",), 2, "No such command 'nonsense'"),
        (("launch", "--nonsense"), 2, "No such option: --nonsense"),
        (("launch",), 3, "there is no spec dtctl.yaml"),
        (("launch", "--nodes", "a"), 2, "there is nothing to run"),
        (("launch", "--slots", "2"), 2, "--slots requires --nodes"),
        (("launch", "--nodes", "a[1-", "--", "t.py"), 3, "brackets do not match"),
        (("launch", "--name", "../x", "--nodes", "localhost", "--", "t.py"), 2, "cannot be the name of a run"),
        (("status",), 7, "no run was launched from this folder"),
        (("logs", "nothing"), 7, "there is no run nothing"),
        (("sandbox", "exec", "--name", "no-such-sandbox", "n1", "--", "true"), 7, "is not up"),
        (("render", "--target", "mars"), 2, "there is no target mars"),
        (("init",), 2, "the new project needs a folder"),
        (("init", "x", "--template", "bert"), 2, "there is no template bert"),
    ],
)
def test_errors_have_their_exit_codes(tmp_path: Path, arguments: tuple[str, ...], code: int, text: str) -> None:
    done = dtctl(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_says_fact_place_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text("cluster:\n  nodse: [a]\n")
    lines = dtctl("validate", cwd=tmp_path).stderr.splitlines()
    assert lines == ["error: cluster.nodse: unknown key; did you mean `nodes`?", "where: dtctl.yaml:2"]


TEMPLATES = ("gpt", "classifier", "moe", "script", "accelerate", "deepspeed", "lightning", "megatron")


@pytest.mark.parametrize(
    ("template", "launcher"),
    [*((template, "local") for template in TEMPLATES), ("script", "ssh"), ("gpt", "sandbox")],
)
def test_every_new_project_is_valid(tmp_path: Path, template: str, launcher: str) -> None:
    made = dtctl("init", "p", "--template", template, "--launcher", launcher, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    found = dtctl("validate", "--json", cwd=tmp_path / "p")
    assert json.loads(found.stdout)["ok"] is True, found.stderr


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_for_the_sandbox_names_no_folder_of_this_machine(tmp_path: Path, template: str) -> None:
    """The hosts of a sandbox see the machine's own /var/tmp: checkpoints stay in the working folder of the run."""
    made = dtctl("init", "p", "--template", template, "--launcher", "sandbox", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert not re.search(r"[ =\[]/\w", (tmp_path / "p" / "dtctl.yaml").read_text())
    found = dtctl("validate", "--json", cwd=tmp_path / "p")
    assert json.loads(found.stdout)["ok"] is True, found.stderr


def test_a_wrong_spec_is_told_in_json_too(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text("cluster: {nodez: 3, slots: 99999999999999999999}\njob: {script: a.py}\n")
    done = dtctl("validate", "--json", cwd=tmp_path)
    assert done.returncode == 3
    said = json.loads(done.stdout)
    assert (said["ok"], said["error"]["exit_code"]) == (False, 3)
    assert "nodez" in said["error"]["message"]
    assert "cluster.slots" in said["error"]["message"]


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "notes.txt").write_text("mine")
    assert dtctl("init", "p", cwd=tmp_path).returncode == 2
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["notes.txt"]
    (tmp_path / "p" / "train.py").write_text("mine")
    assert "--force would replace train.py; --spec-only" in dtctl("init", "p", cwd=tmp_path).stderr


def test_the_schema_is_json(tmp_path: Path) -> None:
    schema = json.loads(dtctl("validate", "--schema", cwd=tmp_path).stdout)
    assert schema["title"] == "dtctl.yaml"


def test_a_job_on_this_machine_needs_no_ssh(tmp_path: Path) -> None:
    home = tmp_path / "node"
    (tmp_path / "dtctl.yaml").write_text(
        f"cluster: {{slots: 2, workdir: {home}}}\njob: {{script: t.py, kind: direct, env: {{A: 'x y'}}}}\n"
    )
    (tmp_path / "t.py").write_text("import os, sys; print(os.environ['RANK'], os.environ['A'], sys.argv[1:])")
    done = dtctl("launch", "--", "--flag", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[localhost:{r}] {r} x y ['--flag']" for r in (0, 1)]
    assert done.stderr.endswith("0 processes left on 1 node\n")


@pytest.mark.parametrize("command", [("validate",), ("launch", "--dry-run"), ("launch",)], ids=" ".join)
def test_a_key_without_effect_is_named(tmp_path: Path, command: tuple[str, ...]) -> None:
    cluster = f"slots: 1, workdir: {tmp_path / 'node'}, spares: [b]"
    (tmp_path / "dtctl.yaml").write_text(f"cluster: {{{cluster}}}\njob: {{command: ['true']}}\n")
    done = dtctl(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cluster.spares has no effect with transport local" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("spec", "options", "most"),
    [
        ("cluster: {slots: 2, workdir: NODE}\njob: {script: t.py}\n", ("--dry-run",), 47),
        (
            "cluster: {transport: ssh, nodes: ['n[1-2]'], slots: 2}\njob: {script: t.py, kind: direct}\n"
            "train: {strategy: ddp, micro_batch: 2}\n",
            ("--dry-run",),
            60,
        ),
        ("cluster: {slots: 2, workdir: NODE}\njob: {command: ['true']}\n", (), 82),
    ],
)
def test_a_command_loads_what_it_needs(tmp_path: Path, spec: str, options: tuple[str, ...], most: int) -> None:
    (tmp_path / "dtctl.yaml").write_text(spec.replace("NODE", str(tmp_path / "node")))
    (tmp_path / "t.py").write_text("")
    program = (
        "import atexit, sys\nfrom dtctl.cli.main import main\n"
        "atexit.register(lambda: print('LOADED', *(name for name in sys.modules if name.startswith('dtctl'))))\n"
        "main(sys.argv[1:])"
    )
    argv = [sys.executable, "-c", program, "launch", *options]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()[1:]
    assert "dtctl.cli.launch" in loaded
    assert len(loaded) <= most, (len(loaded), sorted(loaded))


@pytest.mark.parametrize("name", ["it's", "a b", "x:", "%s", "null", "yes", "-lead", "a#b", "{x}", "é"])
def test_a_project_may_have_any_name(tmp_path: Path, name: str) -> None:
    made = dtctl("init", "--template", "script", "--", name, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    following = made.stdout.removeprefix("next: ").replace("dtctl launch", "cat dtctl.yaml")
    shown = subprocess.run(["sh", "-c", following], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert yaml.safe_load(shown.stdout)["job"]["name"] == name


def test_a_full_disk_behind_the_output_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "dtctl.yaml").write_text("cluster: {transport: local}\njob: {script: train.py, kind: direct}\n")
    for ending in (">/dev/full", ">&- 2>&-"):
        shown = subprocess.run(
            ["sh", "-c", f"{shlex.quote(sys.executable)} -m dtctl launch {ending}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (shown.returncode, "Traceback" in shown.stderr) == (0, False), shown.stderr


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("nope.py", "there is no nope.py"),
        ("../outside.py", "../outside.py lies outside of the folder that is pushed"),
        ("folder", "folder is a folder"),
    ],
)
def test_a_spec_whose_script_cannot_run_is_not_right(tmp_path: Path, script: str, text: str) -> None:
    (tmp_path / "outside.py").write_text("")
    (tmp_path / "p" / "folder").mkdir(parents=True)
    (tmp_path / "p" / "dtctl.yaml").write_text(f"cluster: {{transport: local}}\njob: {{script: {script}}}\n")
    found = dtctl("validate", cwd=tmp_path / "p")
    assert (found.returncode, text in found.stderr) == (4, True), found.stderr


@pytest.mark.parametrize("command", [("validate",), ("launch", "--dry-run")], ids=" ".join)
@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (["{from: ../none, to: data}"], "none exist"),
        (["{from: ../set, to: data}", "{from: ../set/a.bin, to: data/a.bin}"], "data working folder already"),
        (["{from: ../set, to: data}", "{from: ../set, to: data}"], "data working folder already"),
        (["{from: ../set, to: src}"], "src/more.py working folder already"),
        (["{from: ../set/a.bin, to: t.py/a.bin}"], "t.py working folder already"),
        (["{from: 'node:/mnt/x', to: t.py}"], "t.py working folder already"),
        (["{from: own, to: data}"], "link leads data folder"),
        (["{from: ../links, to: data}"], "link leads data folder"),
    ],
)
def test_data_that_cannot_be_brought_is_found_without_a_launch(
    tmp_path: Path, command: tuple[str, ...], data: list[str], facts: str
) -> None:
    project = tmp_path / "p"
    for path in ("p/own", "p/src", "set", "links"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "set" / "a.bin").write_text("a")
    (project / "own" / "a.bin").symlink_to(tmp_path / "set" / "a.bin")
    (tmp_path / "links" / "folder").symlink_to(tmp_path / "set")
    (project / "t.py").write_text("")
    (project / "src" / "more.py").write_text("")
    (project / ".gitignore").write_text("own/\n")
    rows = "".join(f"    - {row}\n" for row in data)
    (project / "dtctl.yaml").write_text(
        f"cluster: {{transport: ssh, nodes: [a, b], slots: 1}}\njob:\n  script: t.py\n  data:\n{rows}"
    )
    found = dtctl(*command, cwd=project)
    assert (found.returncode, missing(found.stderr, facts)) == (4, []), found.stderr


def test_validate_neither_fetches_nor_reads_data(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.bin").write_text("a")
    (tmp_path / "dtctl.yaml").write_text(
        "cluster: {transport: ssh, nodes: [a, b], slots: 1}\n"
        "job: {script: t.py, data: [{from: 'no-such-store://x', to: x}, {from: set, to: y}]}\n"
    )
    found = dtctl("validate", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert not (tmp_path / ".dtctl" / "data").exists()
    assert not list(tmp_path.glob(".dtctl/cache/*-data.json"))


@pytest.mark.parametrize("command", [("validate",), ("launch", "--dry-run")], ids=" ".join)
def test_code_that_only_the_nodes_have_is_not_looked_for_here(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "dtctl.yaml").write_text(
        "cluster: {transport: ssh, nodes: [a, b], slots: 1}\n"
        "job: {script: there.py, files: {push: false, root: /srv/code}, data: [{from: 'node:/mnt/x', to: x}]}\n"
    )
    found = dtctl(*command, cwd=tmp_path)
    assert found.returncode == 0, found.stderr


def test_what_was_not_examined_stands_beside_what_was(tmp_path: Path) -> None:
    assert dtctl("init", "p", "--launcher", "local", cwd=tmp_path).returncode == 0
    said = dtctl("validate", cwd=tmp_path / "p").stdout
    assert said.startswith("dtctl.yaml can be planned: ")
    assert "not examined: the nodes (`dtctl doctor`), what the program does (`dtctl lint`), whether model and" in said
    assert (
        "the nodes (`dtctl doctor`)"
        in json.loads(dtctl("validate", "--json", cwd=tmp_path / "p").stdout)["not_examined"]
    )
    assert "no node was contacted" in dtctl("launch", "--dry-run", cwd=tmp_path / "p").stdout
    model = ["--params", "7B", "--gpus", "8", "--gpu", "H100", "--batch", "64"]
    assert "computed from the model's dimensions, not measured" in dtctl("advise", *model, cwd=tmp_path).stdout
    assert "not measured" in json.loads(dtctl("advise", *model, "--json", cwd=tmp_path).stdout)["basis"]


@pytest.mark.parametrize("command", [("sbatch",), ("render", "--target", "kubernetes")])
def test_a_job_that_nobody_follows_has_no_metrics_and_that_is_said(tmp_path: Path, command: tuple[str, ...]) -> None:
    spec = "cluster: {nodes: [a], slots: 1}\njob: {script: t.py}\nkubernetes: {image: i}\n"
    for more in ("", "metrics: {port: 9400}\n"):
        (tmp_path / "dtctl.yaml").write_text(spec.replace("nodes: [a]", "nodes: 1, transport: slurm") + more)
        (tmp_path / "t.py").write_text("")
        done = dtctl(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("metrics" in done.stderr) is bool(more)


@pytest.mark.parametrize("cluster", ["slots: 2", "transport: sandbox, nodes: 2, slots: 2"])
def test_the_batch_file_of_a_spec_that_is_tried_here_has_nothing_of_this_machine(tmp_path: Path, cluster: str) -> None:
    """Its cores and its Python are not those of the nodes that Slurm gives."""
    (tmp_path / "t.py").write_text("")
    made = []
    for text in (cluster, f"{{transport: slurm, nodes: {2 if 'nodes' in cluster else 1}, slots: 2}}".strip("{}")):
        (tmp_path / "dtctl.yaml").write_text(f"cluster: {{{text}}}\njob: {{name: t, script: t.py}}\n")
        done = dtctl("sbatch", "--plain", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert sys.executable not in done.stdout
        made.append([line for line in done.stdout.splitlines() if "THREADS" in line or line.startswith("exec ")])
    assert made[0] == made[1]
    assert any("THREADS" in line for line in made[0])


def test_a_dry_run_shows_what_slurm_would_get(tmp_path: Path) -> None:
    """The batch file; and the nodes' script, where the launcher inside the job has it."""
    (tmp_path / "t.py").write_text("")
    (tmp_path / "dtctl.yaml").write_text("cluster: {transport: slurm, nodes: 2}\njob: {name: t, script: t.py}\n")
    shown = dtctl("launch", "--dry-run", cwd=tmp_path).stdout
    assert [line for line in shown.splitlines() if line.startswith("---")] == [
        "--- job.sbatch", "--- node1: node.sh", "--- node2: node.sh",
    ]  # fmt: skip
    plain = json.loads(dtctl("launch", "--dry-run", "--json", "--set", "slurm.launcher=none", cwd=tmp_path).stdout)
    assert plain["scripts"] == {}
    assert plain["batch"].count("#SBATCH") > 5
    assert dtctl("launch", "--out", "made", cwd=tmp_path).returncode == 0
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"job.sbatch", "node1.sh", "node2.sh", "plan.json"}


@pytest.mark.parametrize(
    "words",
    [
        ("validate", "PATH"),
        ("lint", "PATH"),
        ("doctor", "--log", "PATH"),
        ("snapshot", "ls", "PATH"),
        ("launch", "PATH"),
    ],
)
@pytest.mark.parametrize("path", ["x" * 5000, "x/" * 2500, "/" + "x" * 300 + "/dtctl.yaml"])
def test_an_argument_that_is_too_long_for_a_path_is_no_bug(tmp_path: Path, words: tuple[str, ...], path: str) -> None:
    done = dtctl(*(path if word == "PATH" else word for word in words), cwd=tmp_path)
    assert "bug in dtctl" not in done.stderr
    assert done.returncode in (2, 3, 7, 10), done.stderr
    assert len(done.stderr) < 1000 or words[0] == "snapshot"
