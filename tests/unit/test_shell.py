import os
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtctl import shell
from tests.facts import raises

WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(WORDS)
@example(["$(id)", "`id`", "a'b", 'a"b', "a\nb", "", "-n", "*", "~", "a,b", "é", "!x", "\\"])
def test_any_words_arrive_in_a_real_shell(words: list[str]) -> None:
    command = shell.join_command(["printf", r"%s\0", *words])
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [word.encode() for word in words]


VALUE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.mark.parametrize("program", ["sh", "bash", "bash --posix"])
@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.from_regex(r"DT_[A-Za-z0-9_]{0,8}", fullmatch=True), VALUE, max_size=5))
@example({"DT_A": "$(id) `id` 'x' \"y\" \\ ! a,b\n\n", "DT_": "", "DT_b": "-n", "DT_c": "é \u2028 \x1b[0m"})
def test_any_value_of_a_variable_survives_a_real_shell(program: str, values: dict[str, str]) -> None:
    lines = "".join(f"export {name}={shell.quote_word(value)}\n" for name, value in values.items())
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    done = subprocess.run([*program.split(), "-c", lines + "exec env -0"], capture_output=True, check=True, env=env)
    found = dict(line.split(b"=", 1) for line in done.stdout.split(b"\0") if line.startswith(b"DT_"))
    assert found == {name.encode(): value.encode() for name, value in values.items()}


def test_nul_is_refused() -> None:
    with raises(ValueError, "NUL"):
        shell.quote_word("a\0b")


@pytest.mark.parametrize(
    ("name", "right"), [("A", True), ("_a1", True), ("1a", False), ("a-b", False), ("", False), ("a\n", False)]
)
def test_names_of_variables(name: str, right: bool) -> None:
    assert shell.is_env_name(name) is right


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("cd x && python train.py", "&&"),
        ("a; b", ";"),
        ("python train.py | tee log", "|"),
        ("python train.py > log", ">"),
        ("a 2>&1", ">&"),
        ("a &", "&"),
        ("a\nb", "a line break"),
        ("echo $HOME/x", "$HOME"),
        ('echo "${A}"', "${A}"),
        ("echo `id`", "`"),
        ("ls *.py", "*"),
        ("ls ~/data", "~"),
        ("A=1 python train.py", "A=1"),
        ("a # b", "#"),
        # What a shell would leave alone.
        ("python train.py --lr=1e-3 --name a=b", ""),
        ("awk -F '|' '{print $1 > \"x\"}'", ""),
        ("grep 'a && b' \\$HOME \\* a~b a#b \"a;b\" 5%", ""),
        ("nvidia-smi --query-gpu=name,memory.total --format=csv\n", ""),
        ("model.layers=[1,2] http://h/?a=1 {x} !", ""),
        ("", ""),
    ],
)
def test_what_only_a_shell_would_act_upon(line: str, found: str) -> None:
    assert shell.find_shell_syntax(line) == found


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["cd", "x", "&&", "ls"], "&&"),
        (["train", ">", "log"], ">"),
        (["cut", "-d", "|", "x"], ""),
        (["find", ".", "-exec", "rm", "{}", ";"], ""),
        (["bash", "-c", "a && b"], ""),
        ([], ""),
    ],
)
def test_operators_among_words(argv: list[str], found: str) -> None:
    assert shell.find_shell_operator(argv) == found


def test_a_program_may_lie_in_the_home_folder_of_whoever_runs_it() -> None:
    command = shell.join_command(["~/it's here/python", "~/x"])
    done = subprocess.run(
        ["sh", "-c", f"printf '%s ' {command}"], capture_output=True, text=True, env={"HOME": "/h"}, check=True
    )
    assert done.stdout == "/h/it's here/python ~/x "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("~", "/h o"),
        ("~/data", "/h o/data"),
        ("--out=~/x", "/h o/x"),
        ("$HOME/a b", "/h o/a b"),
        ("${HOME}x:$HOME", "/h ox:/h o"),
        ("~/$A `id` \\ \"q\" $(id)", "/h o/$A `id` \\ \"q\" $(id)"),
        ("it is ~/x", "it is ~/x"),
        ("~user/x", "~user/x"),
        ("a~", "a~"),
        ("$HOMES $A", "$HOMES $A"),
        ("\\~/x", "~/x"),
        ("\\$HOME/x \\${HOME}", "$HOME/x ${HOME}"),
        ("$HOME \\$HOME", "/h o $HOME"),
        ("print('$HOME')", "print('$HOME')"),
        ("'~/x' $HOME", "'~/x' /h o"),
        ("C:\\dir\\x", "C:\\dir\\x"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_home_folder_of_the_node(text: str, expected: str) -> None:
    command = f"printf %s {shell.quote_word(shell.expand_home(text))}"
    done = subprocess.run(["sh", "-uc", command], capture_output=True, text=True, env={"HOME": "/h o"}, check=True)
    assert done.stdout.removeprefix("--out=") == expected
