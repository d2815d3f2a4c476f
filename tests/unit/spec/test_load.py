from pathlib import Path

import pytest

from dtctl.errors import SpecError
from dtctl.spec.load import dump_spec, load_spec, parse_spec
from dtctl.spec.model import Spec


def parse(text: str, *overrides: str) -> Spec:
    return parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"), overrides=overrides)


def error(text: str, *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse(text, *overrides)
    assert caught.value.exit_code == 3
    return caught.value


def test_a_small_spec() -> None:
    spec = parse(
        "cluster: {transport: ssh, nodes: ['gpu[01-02]'], slots: 8}\njob: {script: train.py, args: [--lr, 1e-3]}"
    )
    assert spec.cluster.slots == 8
    assert spec.job.args == ["--lr", "1e-3"]
    assert spec.base_dir == Path("/project")


def test_numbers_and_truth_values_become_text_in_environments_and_arguments() -> None:
    spec = parse("job: {script: a.py, env: {A: 1, B: true, C: 1.5}, args: [1, false]}")
    assert spec.job.env == {"A": "1", "B": "true", "C": "1.5"}
    assert spec.job.args == ["1", "false"]


def test_a_command_may_be_text() -> None:
    assert parse("""job: {command: "echo 'a b' c"}""").job.command == ["echo", "a b", "c"]


def test_an_unknown_key_names_file_line_and_near_match() -> None:
    found = error("cluster:\n  transport: ssh\n  nodse: [a]\n")
    assert found.message == "cluster.nodse: unknown key; did you mean `nodes`?"
    assert found.where == "dtctl.yaml:3"
    assert found.key == "cluster.nodse"


def test_an_unknown_key_without_a_near_match_lists_what_may_stand_there() -> None:
    assert error("slurm:\n  xyzzy: 1\n").message == (
        "slurm.xyzzy: unknown key; here may stand: account, extra, gres, partition, qos, time"
    )


def test_all_problems_are_told_at_once() -> None:
    found = error("cluster:\n  slots: two\njob:\n  script: a.py\n  max_restarts: -1\n  grace: 1\n")
    assert found.message.splitlines() == [
        "3 problems in the spec",
        "  dtctl.yaml:2: cluster.slots: expected a whole number or 'auto', got 'two'",
        "  dtctl.yaml:5: job.max_restarts: input should be greater than or equal to 0, got -1",
        "  dtctl.yaml:6: job.grace: unknown key; did you mean `grace_s`?",
    ]


def test_a_fault_inside_a_node_entry() -> None:
    found = error("cluster:\n  nodes:\n    - a\n    - {name: b, slts: 2}\n")
    assert found.message == "cluster.nodes[1].slts: unknown key; did you mean `slots`?"
    assert found.where == "dtctl.yaml:4"


def test_a_wrong_choice_lists_the_right_ones() -> None:
    found = error("cluster:\n  transport: shh\n")
    assert (
        found.message
        == "cluster.transport: 'shh' is not one of 'local', 'ssh', 'slurm' or 'sandbox'; did you mean ssh?"
    )


def test_two_programs() -> None:
    assert (
        "only one of script, module and command may be set, and these are: script, module"
        in error("job: {script: a.py, module: b}").message
    )


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("", "the spec is empty", "dtctl.yaml"),
        ("# nothing\n", "the spec is empty", "dtctl.yaml"),
        ("- a\n", "a spec has sections (cluster, job, ...), and this is something else", "dtctl.yaml:1"),
        ("job: {a: 1, a: 2}\n", "`a` stands twice, on lines 1 and 1", "dtctl.yaml:1"),
        ("job:\n\tscript: a\n", "not valid YAML", "dtctl.yaml:2:1"),
        ("a: [1\n", "not valid YAML", "dtctl.yaml:2:1"),
        ("a: 1\n---\nb: 2\n", "not valid YAML", "dtctl.yaml:2:1"),
        ("job: !!python/object/apply:os.system [true]\n", "not valid YAML", "dtctl.yaml:1:6"),
    ],
)
def test_what_is_not_a_spec(text: str, message: str, where: str) -> None:
    found = error(text)
    assert message in found.message
    assert found.where == where


def test_nested_aliases_do_not_fill_the_memory() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for level in range(1, 9):
        text += f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n"
    assert "more than 100000 values" in error(text).message


def test_set_changes_values() -> None:
    spec = parse(
        "cluster: {transport: ssh, nodes: [a, b]}\njob: {script: a.py}\n",
        "train.lr=1e-3",
        "train.model.layers=4",
        "cluster.nodes[1].slots=2",
        "train.strategy=ddp",
    )
    assert spec.train is not None
    assert spec.train.settings() == {"lr": 0.001, "model": {"layers": 4}, "strategy": "ddp"}
    assert spec.cluster.nodes[1].slots == 2  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    ("override", "message", "where"),
    [
        ("train.lrr=1", "train.lrr: unknown key; did you mean `lr`?", "--set train.lrr=1"),
        ("train.lr", "'train.lr' has no `=`", "--set"),
        ("train..lr=1", "'train..lr' is not a key", "--set"),
        ("cluster.nodes[7].slots=1", "`7` does not exist in the spec", "--set cluster.nodes[7].slots=1"),
        ("train.lr=fast", "train.lr: expected a number, got 'fast'", "--set train.lr=fast"),
        ("job.env.A=[", "'[' is not a value", "--set"),
    ],
)
def test_a_wrong_override_says_so(override: str, message: str, where: str) -> None:
    found = error("cluster: {transport: ssh, nodes: [a, b]}\njob: {script: a.py}\n", override)
    assert found.message.startswith(message)
    assert found.where == where


def test_a_spec_survives_being_written_down() -> None:
    spec = parse("cluster: {transport: ssh, nodes: [a, {name: b, slots: 2}]}\njob: {script: a.py}\ntrain: {lr: 0.1}\n")
    assert parse(dump_spec(spec)) == spec


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no spec") as missing:
        load_spec(tmp_path / "dtctl.yaml")
    assert missing.value.hint == "`dtctl init DIR` makes a project with one"
    (tmp_path / "latin.yaml").write_bytes(b"job: {name: caf\xe9}")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_spec(tmp_path / "latin.yaml")


def test_a_folder_stands_for_the_spec_in_it(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text("job: {script: a.py}\n")
    assert load_spec(tmp_path).base_dir == tmp_path
