"""`dtctl launch` on this machine alone: what is run, what it is told, and what it says."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.command_line import dtctl
from tests.hosts import wait_until


def project(folder: Path, job: str, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "dtctl.yaml").write_text(f"cluster: {{workdir: {folder.parent / 'node'}, slots: 1}}\njob: {{{job}}}\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_python3_in_a_command_is_the_python_of_the_job(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "command: [python3, -c, 'import sys; print(sys.prefix)']")
    done = dtctl("launch", cwd=folder)
    assert done.stdout == f"[localhost:0] {sys.prefix}\n", done.stderr


def test_a_shell_line_is_refused_or_run_by_a_shell(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "command: 'echo one && echo two | cat'")
    refused = dtctl("launch", cwd=folder)
    assert (refused.returncode, "&&" in refused.stderr) == (3, True)
    project(folder, "shell: true, command: 'echo one && echo $DTCTL_NODE | cat; false | true; echo no'")
    done = dtctl("launch", cwd=folder)
    assert (done.returncode, done.stdout) == (8, "[localhost:0] one\n[localhost:0] localhost\n"), done.stderr


def test_a_shell_script_is_run_by_a_shell(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "script: run.sh", **{"run.sh": 'echo "$BASH_VERSION" | cut -c1; echo "$@"\n'})
    done = dtctl("launch", "--", "a b", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "[localhost:0] a b"


def test_a_file_that_a_rule_keeps_from_the_node_is_named_with_the_rule(tmp_path: Path) -> None:
    text = "open('data.bin')\n"
    folder = project(tmp_path / "p", "script: t.py, kind: direct", **{"t.py": text, ".gitignore": "*.bin\n"})
    (folder / "data.bin").write_text("x")
    done = dtctl("launch", cwd=folder)
    assert done.returncode == 8
    assert ".gitignore:1 (*.bin)" in done.stderr
    assert "job.files.include: [data.bin]" in done.stderr
    found = dtctl("launch", "--set", "job.files.include=[data.bin]", cwd=folder)
    assert found.returncode == 0, found.stderr


def test_a_dry_run_tells_what_is_sent_and_what_is_not(tmp_path: Path) -> None:
    files = {"t.py": "#" * 3000, ".gitignore": "*.bin\n", "data.bin": "x", ".env": "A=1", "big.txt": "x" * 5000}
    folder = project(tmp_path / "p", "script: t.py", **files)
    found = json.loads(dtctl("launch", "--dry-run", "--json", cwd=folder).stdout)["files"]
    assert (found["count"], found["bytes"]) == (4, 8006 + (folder / "dtctl.yaml").stat().st_size)
    assert found["largest"][0] == {"path": "big.txt", "bytes": 5000}
    assert found["left_out"] == [{"path": "data.bin", "rule": ".gitignore:1 (*.bin)"}]
    assert found["withheld"] == [".env"]
    shown = dtctl("launch", "--dry-run", cwd=folder).stdout
    assert all(text in shown for text in ("files: 4 files, ", "big.txt (4.9 KiB)", "1 B: data.bin (.gitignore)"))
    assert "left out" not in shown, "each file is named once"


@pytest.mark.parametrize("options", [(), ("--json",), ("--out", "scripts")])
def test_a_dry_run_of_a_script_that_is_not_there_fails(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = project(tmp_path / "p", "script: none.py")
    done = dtctl("launch", "--dry-run", *options, cwd=folder)
    assert (done.returncode, "none.py" in done.stderr) == (4, True)


@pytest.mark.parametrize(
    ("script", "near"),
    [("trian.py", "train.py"), ("src/modle.py", "src/model.py"), ("model.py", "src/model.py"), ("Train.py", "train.py"),
     ("scr/model.py", "src/model.py"), ("train", "train.py"), ("quite/other.sh", "")],
)  # fmt: skip
def test_a_script_that_is_not_there_is_told_with_the_one_that_may_be_meant(
    tmp_path: Path, script: str, near: str
) -> None:
    folder = project(tmp_path / "p", f"script: {script}", **{"train.py": "", "run.sh": "", "README.md": ""})
    (folder / "src").mkdir()
    (folder / "src/model.py").touch()
    done = dtctl("validate", cwd=folder)
    assert (done.returncode, f"there is no {script}" in done.stderr) == (4, True)
    assert (f"did you mean {near}?" in done.stderr) == bool(near), done.stderr


def test_much_is_pushed_with_a_warning(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "script: t.py, kind: direct", **{"t.py": ""})
    with (folder / "weights").open("wb") as file:
        file.truncate(101 << 20)
    done = dtctl("launch", cwd=folder)
    assert done.returncode == 0
    assert "weights (101.0 MiB)" in done.stderr


@pytest.mark.parametrize(
    ("words", "better"),
    [
        ("--lr 1", "dtctl launch -- --lr 1`"),
        ("dtctl.yaml x y", "dtctl launch dtctl.yaml -- x y`"),
        ("--dry-run --epochs 3", "dtctl launch --dry-run -- --epochs 3`"),
        ("t.py --epochs 3", "dtctl launch -- --epochs 3`"),
    ],
)
def test_arguments_without_two_dashes_are_told_where_they_go(tmp_path: Path, words: str, better: str) -> None:
    folder = project(tmp_path / "p", "script: t.py", **{"t.py": ""})
    done = dtctl("launch", *words.split(), cwd=folder)
    assert (done.returncode, better in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("words", ["--dry-run --node n1", "--dry-runn", "--slots 0", "--epochs 3 --dry-run"])
def test_no_hint_turns_a_dry_run_into_a_launch(tmp_path: Path, words: str) -> None:
    """Behind two dashes `--dry-run` is an argument of the script, and a misspelt option would be, too."""
    folder = project(tmp_path / "p", "script: t.py", **{"t.py": ""})
    done = dtctl("launch", *words.split(), cwd=folder)
    assert (done.returncode, "dtctl launch" in done.stderr.partition("hint:")[2]) == (2, False), done.stderr


@pytest.mark.parametrize(
    "words", [("t.py",), ("t.py", "--lr", "1"), ("other.py",), ("python", "t.py"), ("/usr/bin/torchrun", "t.py")]
)
def test_a_program_behind_two_dashes_is_refused_where_the_spec_has_one(tmp_path: Path, words: tuple[str, ...]) -> None:
    """It would be an argument of the spec's program."""
    folder = project(tmp_path / "p", "script: t.py, kind: direct", **{"t.py": "print(1)\n"})
    done = dtctl("launch", "--", *words, cwd=folder)
    assert (done.returncode, f"dtctl.yaml has a program, and {words[0]} follows" in done.stderr) == (2, True)
    assert "`dtctl launch -- ARGS`" in done.stderr
    assert f"`dtctl launch --nodes localhost -- {' '.join(words)}`" in done.stderr


def test_arguments_behind_two_dashes_may_be_files_and_names_of_programs(tmp_path: Path) -> None:
    files = {"t.py": "import sys; print(sys.argv[1:])\n", "a.yaml": ""}
    folder = project(tmp_path / "p", "script: t.py, kind: direct", **files)
    for words in (("a.yaml",), ("test", "t.py"), ("--config", "t.py")):
        done = dtctl("launch", "--", *words, cwd=folder)
        assert done.stdout == f"[localhost:0] {list(words)}\n", done.stderr
    done = dtctl("launch", "--set", "job.args=[t.py]", cwd=folder)
    assert done.stdout == "[localhost:0] ['t.py']\n", done.stderr


SPELT = [
    *[((command, "dtcl.yaml"), 3, "dtctl.yaml") for command in
      ("launch", "validate", "doctor", "clean", "bench", "sbatch", "render", "advise")],
    (("runs", "--nodes", "dtcl.yaml"), 3, "dtctl.yaml"), (("nccl", "env", "dtcl.yaml"), 3, "dtctl.yaml"),
    *[((command, "oen"), 7, "one") for command in ("status", "logs", "watch", "stop", "report", "fetch")],
    (("launch", "--resume", "oen"), 7, "one"), (("exec", "oen", "localhost", "--", "ls"), 7, "one"),
    (("snapshot", "ls", "oen"), 10, "one"),
    (("exec", "one", "lcalhost", "--", "ls"), 7, "localhost"), (("logs", "one", "--node", "lcalhost"), 7, "localhost"),
    (("fetch", "one", "--node", "lcalhost"), 7, "localhost"), (("launch", "--nodes", "lcalhost"), 3, "localhost"),
]  # fmt: skip


@pytest.fixture(scope="module")
def with_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = project(tmp_path_factory.mktemp("spelt") / "p", "script: t.py, kind: direct", **{"t.py": "print(1)\n"})
    assert dtctl("launch", "--name", "one", cwd=folder).returncode == 0
    return folder


@pytest.mark.parametrize(("words", "code", "near"), SPELT)
def test_a_misspelt_spec_run_or_node_is_told_with_the_one_that_may_be_meant(
    with_a_run: Path, words: tuple[str, ...], code: int, near: str
) -> None:
    done = dtctl(*words, cwd=with_a_run)
    assert (done.returncode, f"did you mean {near}?" in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("words", "form"),
    [(("launch", "--resume"), "`dtctl launch --resume RUN`: Continue from"), (("launch", "--name"), "--name RUN`"),
     (("logs", "--node"), "`dtctl logs --node NODE`: Only this node"), (("clean", "--older"), "--older AGE`")],
)  # fmt: skip
def test_an_option_without_its_value_is_told_with_its_form(with_a_run: Path, words: tuple[str, ...], form: str) -> None:
    done = dtctl(*words, cwd=with_a_run)
    assert (done.returncode, form in done.stderr, "two dashes" in done.stderr) == (2, True, False), done.stderr


@pytest.mark.parametrize("words", [("--resume", "--detach"), ("--resume=",)])
def test_what_cannot_be_a_run_is_not_looked_for(with_a_run: Path, words: tuple[str, ...]) -> None:
    done = dtctl("launch", *words, cwd=with_a_run)
    assert (done.returncode, "is not the name of a run" in done.stderr) == (7, True), done.stderr


def test_a_script_in_place_of_the_spec_is_told_from_one(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "script: t.py", **{"t.py": "print(1)\n"})
    done = dtctl("launch", "t.py", cwd=folder)
    assert (done.returncode, "--nodes localhost -- t.py" in done.stderr) == (3, True)


def test_the_list_of_runs_has_commands_and_causes(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "script: t.py, kind: direct", **{"t.py": "raise KeyError('lr')\n"})
    assert dtctl("launch", "--name", "one", cwd=folder).returncode == 8
    (run,) = json.loads(dtctl("runs", "--json", cwd=folder).stdout)["runs"]
    assert run["command"] == "dtctl launch --name one"
    row = dtctl("runs", cwd=folder).stdout.splitlines()[1]
    assert all(text in row for text in ("one", "failed", "8", "rank 0 on localhost: KeyError: 'lr'"))
    state = json.loads(dtctl("status", "--json", cwd=folder).stdout)
    assert sum(state["ledger"]["phases_s"].values()) == pytest.approx(state["ledger"]["wall_s"], abs=0.01)
    assert (state["progress"], state["command"][1:]) == (None, ["launch", "--name", "one"])


def test_stop_without_a_name_ends_what_runs(tmp_path: Path) -> None:
    """The newest may have ended; and where several run, the others are named."""
    folder = project(tmp_path / "p", "command: [sleep, '600'], grace_s: 1")
    try:
        for run in ("one", "two", "three"):
            assert dtctl("launch", "--detach", "--name", run, cwd=folder).returncode == 0
        assert dtctl("stop", "three", cwd=folder).returncode == 0
        for ended, still in (("two", "still running: one"), ("one", ""), ("three", "has ended")):
            done = dtctl("stop", cwd=folder)
            assert (done.returncode, done.stdout) == (0, "0 processes left on 1 node\n"), done.stderr
            assert still in done.stderr
            assert ended in done.stderr or not still
            assert json.loads(dtctl("status", ended, "--json", cwd=folder).stdout)["status"] == "stopped"
    finally:
        for run in ("one", "two", "three"):
            dtctl("stop", run, cwd=folder)


def test_a_secret_that_is_not_set_is_told_by_the_dry_run(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "command: ['true'], secrets: [DTCTL_TEST_KEY]")
    assert "DTCTL_TEST_KEY is to be sent" in dtctl("launch", "--dry-run", cwd=folder).stderr
    there = dtctl("launch", "--dry-run", cwd=folder, env={"DTCTL_TEST_KEY": "x"}).stderr
    assert "DTCTL_TEST_KEY of this machine is sent" in there


def test_a_wrong_argument_of_the_training_is_not_laid_to_the_spec(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "script: t.py", **{"t.py": ""})
    with (folder / "dtctl.yaml").open("a") as spec:
        spec.write("train: {strategy: ddp}\n")
    done = dtctl("launch", "--", "--train.lr=abc", cwd=folder)
    assert (done.returncode, "where: the job's arguments" in done.stderr) == (3, True), done.stderr


SOME_NODES = "cluster: {transport: ssh, nodes: ['gpu[1-3]'], ssh: paramiko}\njob: {script: t.py, args: [--lr, 1]}\n"


def test_nodes_of_the_command_line_are_some_of_the_spec(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "script: t.py", **{"t.py": ""})
    (folder / "dtctl.yaml").write_text(SOME_NODES)
    options = ("--dry-run", "--json", "--nodes", "gpu[2-3]", "--slots", "4")
    done = dtctl("launch", *options, "--", "--lr", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [(node["name"], node["slots"]) for node in plan["nodes"]] == [("gpu2", 4), ("gpu3", 4)]
    assert all(text.endswith("  --lr \\\n  1 \\\n  --lr \\\n  2\n") for text in plan["scripts"].values())
    named = dtctl("launch", "p/dtctl.yaml", "--dry-run", "--nodes", "gpu2", cwd=tmp_path)
    assert (named.returncode, "gpu3" in named.stdout) == (0, False)
    unknown = dtctl("launch", "--dry-run", "--nodes", "gpu2,gqu3", cwd=folder)
    assert (unknown.returncode, "did you mean gpu3?" in unknown.stderr) == (3, True)


@pytest.mark.parametrize("words", [("t.py", "--lr", "2"), ("other.py",), ("nvidia.sh",), ("python3", "x"), ("data",)])
def test_a_program_after_nodes_is_refused_where_the_spec_has_one(tmp_path: Path, words: tuple[str, ...]) -> None:
    folder = project(tmp_path / "p", "script: t.py", **{"t.py": "", "data": ""})
    (folder / "dtctl.yaml").write_text(SOME_NODES)
    done = dtctl("launch", "--dry-run", "--nodes", "gpu2,gpu3", "--", *words, cwd=folder)
    assert done.returncode == 2, done.stderr
    forms = ("`dtctl launch --nodes gpu2,gpu3 -- ARGS`", f"`dtctl launch --nodes gpu2,gpu3 -- {' '.join(words)}`")
    assert all(form in done.stderr for form in forms)


def test_a_launch_in_the_background_begins_with_the_line_about_the_run(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "command: ['true']")
    texts = [dtctl("launch", "--name", name, *words, cwd=folder).stderr for name, words in (("a", ()), ("b", ("-d",)))]
    for name, (header, first, *_) in zip("ab", map(str.splitlines, texts), strict=True):
        assert header == f"run {name}: 1 node, 1 worker (command over local)"
        assert first.startswith("  localhost: ")


WAITS = """\
import json, os, pathlib, time
pathlib.Path(os.environ["DTCTL_METRICS"]).write_text(json.dumps({"step": 1200, "loss": 1.0, "time": 1.0}) + "\\n")
while not os.path.exists("../../../../p/go"): time.sleep(0.05)
os.makedirs("out", exist_ok=True)
open("out/last.pt", "w").write("x")
if not os.path.exists("../../../../p/end"): time.sleep(600)
"""


@pytest.mark.parametrize("key", ["outputs", "shared"])
def test_a_run_that_is_stopped_and_resumed_says_what_it_continues_from(tmp_path: Path, key: str) -> None:
    folder = project(tmp_path / "p", f"script: t.py, kind: direct, grace_s: 1, {key}: [out/]", **{"t.py": WAITS})
    metrics, saved = folder / ".dtctl" / "runs", tmp_path / "node" / "runs"
    try:
        assert dtctl("launch", "-d", "--name", "one", cwd=folder).returncode == 0
        wait_until((metrics / "one" / "metrics.jsonl").exists, what="a step is recorded")
        stopped = dtctl("stop", "one", cwd=folder)
        assert stopped.stdout == "0 processes left on 1 node\n", stopped.stderr
        assert "the last step in its metrics is 1,200" in stopped.stderr
        assert "`dtctl launch --resume one` starts with what its program has left in out" in stopped.stderr
        (folder / "go").touch()
        fresh = dtctl("launch", "-d", "--name", "two", "--resume", "one", cwd=folder)
        assert "run one has no file in out/ to continue from: the program starts anew" in fresh.stderr, fresh.stderr
        wait_until(lambda: any(saved.glob("*/work/out/last.pt")), what="a checkpoint is written")
        assert dtctl("stop", "two", cwd=folder).returncode == 0
        (folder / "end").touch()
        again = dtctl("launch", "--name", "three", "--resume", "two", cwd=folder)
        assert (again.returncode, "starts anew" in again.stderr) == (0, False), again.stderr
        assert "step" not in dtctl("stop", "three", cwd=folder).stderr
    finally:
        for run in ("one", "two"):
            dtctl("stop", run, cwd=folder)


def test_the_short_form_of_detach(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "script: t.py, kind: direct", **{"t.py": ""})
    done = dtctl("launch", "-d", "--name", "one", cwd=folder)
    assert (done.returncode, done.stdout, "`dtctl logs -f`" in done.stderr) == (0, "one\n", True), done.stderr
    assert dtctl("watch", "one", cwd=folder).returncode == 0


def test_without_a_name_the_newest_run_that_is_running_is_meant(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "command: [sh, -c, 'echo $DTCTL_RUN_ID; test -e go || sleep 600'], grace_s: 1")
    try:
        for run in ("one", "two"):
            assert dtctl("launch", "-d", "--name", run, cwd=folder).returncode == 0
        (folder / "go").touch()
        assert dtctl("launch", "--name", "three", cwd=folder).returncode == 0
        assert json.loads(dtctl("status", "--json", cwd=folder).stdout)["run"] == "two"
        assert dtctl("logs", cwd=folder).stdout == "[localhost:0] two\n"
        assert dtctl("stop", "two", cwd=folder).returncode == 0
        assert dtctl("logs", cwd=folder).stdout == "[localhost:0] one\n"
        assert dtctl("stop", "one", cwd=folder).returncode == 0
        watched = dtctl("watch", cwd=folder)
        assert (watched.returncode, watched.stdout) == (0, "[localhost:0] three\n"), watched.stderr
    finally:
        for run in ("one", "two"):
            dtctl("stop", run, cwd=folder)


def unsent_project(folder: Path, job: str = "") -> Path:
    """A project in which each kind of rule leaves something out."""
    project(folder, f"script: t.py, kind: direct{job}", **{"t.py": ""})
    files = {
        ".gitignore": "/data/\n*.bin\n.venv/\nenv/\ncache/\nout/\n.hidden\n__pycache__/\n",
        ".dtctlignore": "notes/\n", "data/x/train.txt": "x" * 3000, "data/x/val.txt": "x" * 1000, "w/a.bin": "x" * 500,
        "w/b.bin": "x" * 500, "w/kept": "", "one.bin": "12345", ".venv/pyvenv.cfg": "", ".venv/large": "x" * 9999,
        "env/pyvenv.cfg": "", "env/large": "x" * 9999, "cache/CACHEDIR.TAG": "", "cache/large": "x" * 9999,
        "out/model.pt": "x" * 9999, ".hidden": "x", "__pycache__/t.pyc": "x", "notes/a": "x" * 20,
        "data/.git/x": "x" * 9,
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def not_sent(text: str) -> list[str]:
    return [line.removeprefix("not sent: ") for line in text.splitlines() if line.startswith("not sent: ")]


def test_what_is_not_sent_is_told_folder_by_folder(tmp_path: Path) -> None:
    folder = unsent_project(tmp_path / "p", ", outputs: [out/*.pt]")
    told = [
        "2 files, 3.9 KiB in data (.gitignore); job.files.include: [data/], or job.data",
        "2 files, 1000 B in w (.gitignore); job.files.include, or job.data",
        "1 file, 5 B: one.bin (.gitignore); job.files.include: [one.bin], or job.data",
    ]
    launched = dtctl("launch", cwd=folder)
    assert launched.returncode == 0, launched.stderr
    assert not_sent(launched.stderr) == told
    dry = not_sent(dtctl("launch", "--dry-run", cwd=folder).stdout)
    assert dry == [*told[:2], "1 file, 20 B in notes (.dtctlignore); job.files.include: [notes/], or job.data",
                   "5 B in 1 other folder, such as ."]  # fmt: skip
    sent = dtctl("launch", "--dry-run", "--set", "job.files.include=[data/,'*.bin']", cwd=folder)
    assert not_sent(sent.stdout) == ["1 file, 20 B: notes/a (.dtctlignore); job.files.include: [notes/a], or job.data"]
    rows = [json.loads(line) for line in dtctl("launch", "--json", cwd=folder).stdout.splitlines()]
    notes = [row["text"] for row in rows if row["event"] == "note" and row.get("warning")]
    assert not_sent("\n".join(notes)) == told, "whoever looks at the record, or launches with -d, is told as well"
    silent = dtctl("launch", "--set", "job.files.exclude=[data/,w/,one.bin]", cwd=folder)
    assert not_sent(silent.stderr) == []


def test_counting_what_is_not_sent_ends_soon(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "script: t.py, kind: direct", **{"t.py": "", ".gitignore": "data/\n"})
    (folder / "data").mkdir()
    for number in range(2100):
        (folder / f"data/{number}").touch()
    (line,) = not_sent(dtctl("launch", "--dry-run", cwd=folder).stdout)
    assert line.startswith("over ")
    assert int(line.split()[1].replace(",", "")) <= 2000


def test_the_home_folder_in_arguments_and_variables_is_that_of_the_node(tmp_path: Path) -> None:
    text = "import os, sys; print(sys.argv[1:], os.environ['CACHE'], os.environ['KEPT'])\n"
    job = "script: t.py, kind: direct, args: [~/a, --out=~/b], env: {CACHE: $HOME/c, KEPT: '\\~/d'}"
    folder = project(tmp_path / "p", job, **{"t.py": text})
    words = ("--", "$HOME/e f", "\\$HOME", "'$HOME'")
    shown = dtctl("launch", "--dry-run", *words, cwd=folder).stdout
    lines = ('"${HOME}/a"', '"--out=${HOME}/b"', '"${HOME}/c"', '"${HOME}/e f"', "'$HOME'", "KEPT='~/d'")
    assert all(line in shown for line in lines)
    done = dtctl("launch", *words, cwd=folder, env={"HOME": str(tmp_path)})
    argv = [f"{tmp_path}/a", f"--out={tmp_path}/b", f"{tmp_path}/e f", "$HOME", "'$HOME'"]
    assert done.stdout == f"[localhost:0] {argv} {tmp_path}/c ~/d\n", done.stderr


def test_a_program_that_prints_no_more_is_ended_where_that_was_asked_for(tmp_path: Path) -> None:
    job = "script: train.py, kind: direct, max_restarts: 1, hang_output_s: 2, grace_s: 0"
    text = "import os, time\nprint('on', flush=True)\nif os.environ['DTCTL_ATTEMPT'] == '0':\n    time.sleep(1000)\n"
    done = dtctl("launch", cwd=project(tmp_path / "p", job, **{"train.py": text}))
    assert (done.returncode, done.stdout) == (0, "[localhost:0] on\n" * 2), done.stderr
    assert "the run made no progress" in done.stderr
    assert "node localhost" not in done.stderr, "it is not known which one is stuck"
    again = dtctl("launch", "--set", "job.max_restarts=0", cwd=tmp_path / "p")
    assert (again.returncode, "first failure: the run made no progress" in again.stderr) == (8, True), again.stderr
    assert "no worker has printed anything for 2 s (job.hang_output_s)" in again.stderr
    watched = dtctl("launch", "--json", "--set", "job.max_restarts=0", cwd=tmp_path / "p").stdout
    end = json.loads(watched.splitlines()[-1])["first_failure"]
    assert (end["node"], end["rank"]) == (None, None)


def test_of_two_launches_of_one_name_one_runs_and_one_is_refused(tmp_path: Path) -> None:
    folder = project(
        tmp_path / "p", "script: t.py, kind: direct, grace_s: 1", **{"t.py": "import time; time.sleep(600)"}
    )
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(lambda _: dtctl("launch", "-d", "--name", "twice", cwd=folder), range(2))]
    try:
        said = "\n".join(each.stderr for each in both)
        assert "bug in dtctl" not in said, said
        assert sorted(each.returncode == 0 for each in both) == [False, True], said
        assert "a run named twice already exists" in said
        assert [*(folder / ".dtctl").glob(".*.launcher.log")] == []
    finally:
        assert dtctl("stop", "twice", cwd=folder).returncode == 0
