"""docs/architecture.md and CONTRIBUTING.md name files: they have to exist, also after the next move."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")))
PATH = re.compile(rf"(?<![\w/.-])((?:{TOP}|\.ci)/[\w./-]*[\w/]|[\w-]+\.(?:toml|txt|yml))(?![\w/]|::)")
PICTURE = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
IN_PICTURE = re.compile(
    r"(?<![\w.-])((?:[\w-]+/)*[\w-]+\.(?:py|yaml)|[\w-]+(?:/[\w-]+)*/)(?=[\s\"',:)\]]|$)", re.MULTILINE
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_in_the_text_exists(name: str) -> None:
    paths = set(PATH.findall(PICTURE.sub("", text_of(name))))
    assert len(paths) > 10
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_every_file_in_a_picture_exists() -> None:
    pictures = PICTURE.findall(text_of("docs/architecture.md"))
    assert len(pictures) == 4
    for picture in pictures:
        paths = set(IN_PICTURE.findall(picture.replace("<br/>", "\n")))
        assert len(paths) >= 7
        assert sorted(path for path in paths if not list((ROOT / "dtctl").rglob(path.rstrip("/")))) == []


def test_ten_likely_changes_have_a_place() -> None:
    _, _, table = text_of("docs/architecture.md").partition("## Where do I change ...?")
    starts = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(starts) >= 10
    assert all(PATH.search(start) for start in starts)
