import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import SpecError
from dtctl.spec.load import MAX_BYTES, dump_spec, load_spec, parse_spec
from dtctl.spec.model import Spec
from dtctl.spec.problems import REMOVED
from tests.facts import raises

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


def parse(text: str) -> Spec:
    return parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"))


def error(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert caught.value.exit_code == 3
    return caught.value


def test_a_small_spec() -> None:
    spec = parse(
        "cluster: {transport: ssh, nodes: ['gpu[01-02]'], slots: 8}\njob: {script: train.py, args: [--lr, 1e-3]}"
    )
    assert spec.cluster.slots == 8
    assert spec.job.args == ("--lr", "1e-3")
    assert spec.base_dir == Path("/project")
    assert spec.train is None


def test_where_text_is_wanted_numbers_are_what_was_typed() -> None:
    spec = parse(
        "slurm: {time: 60, account: 007, qos: 1_000}\n"
        "job:\n  name: 2024-01-01\n  script: a.py\n  args: [1, false, 1e-3, 1.10, 0x10, ~x]\n"
        "  env: {A: 1, B: true, C: 1.50, D: NO, E: 010, F: 1_000, G: True, H: 1:30:00, I: ''}\n"
    )
    assert spec.job.name == "2024-01-01"
    assert spec.job.args == ("1", "false", "1e-3", "1.10", "0x10", "~x")
    assert spec.job.env == {
        "A": "1", "B": "true", "C": "1.50", "D": "NO", "E": "010", "F": "1_000", "G": "True", "H": "1:30:00", "I": "",
    }  # fmt: skip
    assert spec.slurm is not None
    assert (spec.slurm.time, spec.slurm.account, spec.slurm.qos) == ("60", "007", "1_000")


def test_what_was_typed_is_taken_from_where_an_anchor_stands() -> None:
    spec = parse("job: {script: a.py, env: &env {A: 1.10}}\ncluster: {nodes: [{name: a, env: {<<: *env, B: 2.20}}]}")
    assert spec.cluster.nodes[0].env == {"A": "1.10", "B": "2.20"}  # type: ignore[index,union-attr]


def test_a_key_with_nothing_behind_it_means_its_default() -> None:
    spec = parse("cluster:\njob:\n  args:\n  files: {exclude: }\ntrain: {snapshot: , lr: ~}\nslurm: null")
    assert spec == parse("job: {files: {}}\ntrain: {}").model_copy(update={"slurm": None})
    assert spec.train is not None
    assert spec.settings == {}


def test_paths_are_relative_to_the_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    cluster = parse(
        "cluster: {identity_file: keys/id, known_hosts: /etc/known, ssh_config: ~/config, hostfile: ../hosts}"
    ).cluster
    assert cluster.identity_file == Path("/project/keys/id")
    assert cluster.known_hosts == Path("/etc/known")
    assert cluster.ssh_config == Path("/home/me/config")
    assert cluster.hostfile == Path("/project/../hosts")
    assert parse("cluster: {ssh_config: none}").cluster.ssh_config == Path("none")


def test_a_home_folder_that_nobody_has() -> None:
    found = error("cluster:\n  identity_file: ~no-such-user/key")
    assert "~no-such-user/key" in found.message
    assert (found.where, found.key) == ("dtctl.yaml:2", "cluster.identity_file")


@pytest.mark.parametrize(
    ("text", "message", "where", "hint"),
    [
        ("", "the spec is empty", "dtctl.yaml", "`dtctl init DIR` makes a project with one"),
        ("# nothing\n---\n", "the spec is empty", "dtctl.yaml", "`dtctl init DIR` makes a project with one"),
        ("- a\n", "a spec has sections (cluster, job, ...), and this file has none", "dtctl.yaml:1", None),
        ("\nhello", "a spec has sections (cluster, job, ...), and this file has none", "dtctl.yaml:2", None),
        ("job: {}\nbase_dir: /x",
         "base_dir: unknown key; allowed here: cluster, job, kubernetes, metrics, network, slurm, train",
         "dtctl.yaml:2", None),
    ],
)  # fmt: skip
def test_what_is_not_a_spec(text: str, message: str, where: str, hint: str | None) -> None:
    found = error(text)
    assert (found.message, found.where, found.hint) == (message, where, hint)


def test_the_user_is_told_where_a_key_was_written() -> None:
    text = "cluster:\n  transport: ssh\n  nodes:\n    - a\n    - b\n"
    spec = parse_spec(text, source="dtctl.yaml", base_dir=Path(), overrides=["train.lr=1", "cluster.nodes[1]=c"])
    assert spec.written_at("cluster.nodes[0]") == "dtctl.yaml:4"
    assert spec.written_at("cluster.nodes[1].slots") == "--set cluster.nodes[1]=c"
    assert spec.written_at("cluster.slots") == "dtctl.yaml:1"
    assert spec.written_at("train.lr") == "--set train.lr=1"
    assert spec.model_copy(update={"base_dir": Path("/x")}).written_at("cluster.transport") == "dtctl.yaml:2"
    assert Spec().written_at("cluster.nodes") == "cluster.nodes"


def test_a_spec_survives_being_written_down() -> None:
    text = (
        "cluster: {transport: ssh, identity_file: key, nodes: [a, {name: b, slots: 2, env: {A: 010}}]}\n"
        "job: {command: \"echo 'a b' 1e3\", setup: ['module load x'], files: {push: false}}\n"
        "train: {lr: 1e-05, strategy: {dp: 2}, model: {a: [1, ~, 'NO', '1e3'], b: {}}, snapshot: {every_s: 2}}\n"
        "slurm: {extra: {constraint: h100, exclusive: true, nice: 5}}\n"
    )
    spec = parse(text)
    assert parse(dump_spec(spec)) == spec
    assert dump_spec(parse("job: {script: a.py}")) == "job:\n  script: a.py\n"


@given(TEXT, st.lists(TEXT, max_size=3))
def test_any_text_survives_being_written_down(value: str, args: list[str]) -> None:
    spec = Spec.model_validate({"job": {"script": "a.py", "env": {"A": value}, "args": args}})
    assert parse(dump_spec(spec)).job == spec.job


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "dtctl.yaml"
    path.write_bytes(b"\xef\xbb\xbfjob: {script: a.py}\r\n")
    spec = load_spec(path, ["job.name=x"])
    assert (spec.job.script, spec.job.name, spec.base_dir) == ("a.py", "x", tmp_path)
    assert load_spec(tmp_path) == load_spec(path)
    assert load_spec(path).written_at("job.script") == f"{path}:1"


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"job:\n  script: a.py\n")))
    spec = load_spec(Path("-"), ["job.name=x"])
    assert (spec.job.script, spec.job.name, spec.base_dir) == ("a.py", "x", tmp_path)
    assert spec.written_at("job.script") == "<standard input>:2"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"job:\n  name: caf\xe9\n")))
    with raises(SpecError, "UTF-8"):
        load_spec(Path("-"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def failed(path: Path) -> tuple[str, str | None, str | None]:
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        return caught.value.message, caught.value.where, caught.value.hint

    init = "`dtctl init DIR` makes a project with one"
    missing = tmp_path / "dtctl.yaml"
    assert failed(missing) == (f"there is no spec {missing}", str(missing), init)
    assert failed(tmp_path) == (f"there is no spec {missing}", str(missing), init)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"job:\n  name: caf\xe9\n")
    assert failed(latin) == ("the spec is not UTF-8 text", f"{latin}:2", "save it as UTF-8")
    assert failed(latin / "x") == ("the spec cannot be read: Not a directory", str(latin / "x"), None)
    missing.mkdir()
    assert failed(tmp_path) == ("the spec cannot be read: Is a directory", str(missing), None)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    assert failed(large) == ("the spec is larger than 4,194,304 bytes", str(large), "is this the right file?")
    assert failed(Path("/dev/zero"))[0] == "the spec is larger than 4,194,304 bytes"


def test_loading_is_light(tmp_path: Path) -> None:
    """No plugins of pydantic, no sources read for documentation, no validators of sections that the spec lacks."""
    (tmp_path / "dtctl.yaml").write_text("job: {script: a.py}\n")
    code = (
        "import importlib.metadata, os, pathlib, sys\n"
        "importlib.metadata.entry_points = lambda **_: print('looked for plugins')\n"
        "from dtctl.spec.load import load_spec; from dtctl.spec.nodes import resolve_nodes\n"
        f"resolve_nodes(load_spec(pathlib.Path({str(tmp_path)!r})))\n"
        "print([name for name in ('torch', 'paramiko', 'jinja2', 'rich', 'difflib') if name in sys.modules])\n"
        "print(os.environ.get('PYDANTIC_DISABLE_PLUGINS'))\n"
        "from dtctl.spec.model import Kubernetes, Metrics, Slurm\n"
        "print([section.__pydantic_complete__ for section in (Slurm, Kubernetes, Metrics)])\n"
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYDANTIC", "COV"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
    assert done.stderr == ""
    assert done.stdout == "[]\nNone\n[False, False, False]\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("time", "forever"), ("time", "4 hours"), ("time", "1:00:00:00:00"), ("mem", "lots"), ("gres", "8"),
        ("array", "a-b"),
    ],
)  # fmt: skip
def test_what_sbatch_would_refuse_is_refused_with_its_key(key: str, value: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(f"slurm: {{{key}: '{value}'}}\njob: {{script: a.py}}\n")
    assert f"slurm.{key}" in str(caught.value)


OLDER = """\
job: {script: train.py}
slurm: {extra: {output: mine.log}}
metrics:
  port: 9200
  pushgateway: http://127.0.0.1:9091
  otlp: http://127.0.0.1:4318
  headers: {env: HEADERS}
  interval_s: 5
  alerts:
    webhook: {env: HOOK}
    slack: {env: SLACK}
    mail: {host: localhost, to: [a@b.c], sender: d@e.f}
"""


def test_the_copy_of_an_older_run_is_read_without_the_keys_that_are_gone() -> None:
    """It can be followed and stopped; as a spec of today it is refused, with every key."""
    spec = parse_spec(OLDER, source="spec.yaml", base_dir=Path(), is_of_run=True)
    assert (spec.metrics.port, spec.slurm.extra) == (9200, {})
    assert spec.metrics.alerts is not None
    assert spec.metrics.alerts.webhook is not None
    with pytest.raises(SpecError) as caught:
        parse_spec(OLDER, source="spec.yaml", base_dir=Path())
    assert str(caught.value).count("this key was removed") == len(REMOVED)


def test_the_copy_of_a_run_with_other_problems_is_refused() -> None:
    with pytest.raises(SpecError, match=r"job\.skript: unknown key"):
        parse_spec("job: {skript: train.py}\nmetrics: {otlp: a}\n", source="s", base_dir=Path(), is_of_run=True)
