import os
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtctl import shell

WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(WORDS)
@example(["$(id)", "`id`", "a'b", 'a"b', "a\nb", "", "-n", "*", "~", "a,b", "é", "!x", "\\"])
def test_any_words_arrive_in_a_real_shell(words: list[str]) -> None:
    command = shell.join(["printf", r"%s\0", *words])
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [word.encode() for word in words]


VALUE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.mark.parametrize("program", ["sh", "bash", "bash --posix"])
@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.from_regex(r"DT_[A-Za-z0-9_]{0,8}", fullmatch=True), VALUE, max_size=5))
@example({"DT_A": "$(id) `id` 'x' \"y\" \\ ! a,b\n\n", "DT_": "", "DT_b": "-n", "DT_c": "é \u2028 \x1b[0m"})
def test_any_value_of_a_variable_survives_a_real_shell(program: str, values: dict[str, str]) -> None:
    lines = "".join(f"export {name}={shell.quote(value)}\n" for name, value in values.items())
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    done = subprocess.run([*program.split(), "-c", lines + "exec env -0"], capture_output=True, check=True, env=env)
    found = dict(line.split(b"=", 1) for line in done.stdout.split(b"\0") if line.startswith(b"DT_"))
    assert found == {name.encode(): value.encode() for name, value in values.items()}


def test_nul_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        shell.quote("a\0b")


@pytest.mark.parametrize(
    ("name", "right"), [("A", True), ("_a1", True), ("1a", False), ("a-b", False), ("", False), ("a\n", False)]
)
def test_names_of_variables(name: str, right: bool) -> None:
    assert shell.is_env_name(name) is right
