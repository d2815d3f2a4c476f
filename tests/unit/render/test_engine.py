from pathlib import Path

import pytest

from dtctl.errors import RenderError
from dtctl.render import render_template


def text(tmp_path: Path, template: str, **values: object) -> str:
    (tmp_path / "t.j2").write_text(template)
    return render_template("t.j2", values, folders=[tmp_path])


def test_values_are_quoted_unless_a_filter_says_otherwise(tmp_path: Path) -> None:
    assert text(tmp_path, "{{ a }}", a="x y; $(id)") == "'x y; $(id)'"
    assert text(tmp_path, "{{ a | verbatim }}", a="x y") == "x y"
    assert text(tmp_path, "{{ a | argv }}", a=["a b", "-c"]) == "'a b' \\\n  -c"
    assert text(tmp_path, "# {{ a | comment }}", a="two\nlines") == "# two lines"
    assert text(tmp_path, "{{ a | ranks }} {{ b | ranks }}", a=range(4, 8), b=range(3, 4)) == "4-7 3"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing }}", "'nothing' is undefined"),
        ("{{ a.b }}", "has no attribute 'b'"),
        ("{{ none }}", "a template printed None"),
        ("{{ flag }}", "a template printed True"),
        ("{{ a | argv }}", "a template printed an empty command"),
        ("{% if %}", "Expected an expression"),
        ("{{ a.__class__.__mro__ }}", "is unsafe"),
        ("{% include '../../etc/passwd' %}", "there is no template"),
        ("{% include '/etc/passwd' %}", "there is no template"),
        ("{{ ''.__class__.__subclasses__() }}", "is unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "is unsafe"),
        ("{{ a.format.__globals__ }}", "is unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(a) }}", "is unsafe"),
        ("{% for i in range(10000000000) %}{% endfor %}", "OverflowError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ a + 1 }}", "TypeError"),
        ("{{ a.encode() }}", "a template printed b''"),
        ("{{ items.append(1) }}", "is unsafe"),
        ("{% include 't.j2' %}", "RecursionError"),
        ("{{ nul }}", "NUL"),
    ],
)
def test_what_a_template_must_not_do(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(RenderError) as caught:
        text(tmp_path, template, a="", none=None, flag=True, items=[], nul="a\0b")
    assert message in caught.value.message
    assert caught.value.exit_code == 5


def test_the_first_folder_wins(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.j2").write_text(name)
    assert render_template("t.j2", {}, folders=[tmp_path / "mine", tmp_path / "theirs"]) == "mine"
    assert render_template("t.j2", {}, folders=[tmp_path / "none", tmp_path / "theirs"]) == "theirs"
