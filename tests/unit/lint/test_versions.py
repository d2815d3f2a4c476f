"""Files of another Python than the one that runs dtctl."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from snippets import problems


def message(code: str) -> str:
    (problem,) = problems(code, bare=True)
    assert problem.rule == "DT000"
    return problem.message


@pytest.mark.parametrize(
    "code",
    [
        "type Pair = tuple[int, int]\n",
        "def first[T](items: list[T]) -> T:\n    return items[0]\n",
        "class Box[T]:\n    pass\n",
        "print(f'{names['a']}')\n",
        'x = f"{\', \'.join(a["b"] for a in c)}"\n',
        'print(\n    f"loss {\n        loss["total"]:.3f} of {len(x)}"\n    "and more"\n)\n',
        'x = f"{f"{a["b"]}"}"\n',
    ],
)
def test_what_newer_python_has_is_read(code: str) -> None:
    rest = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    said = problems(code + rest, bare=True)
    if 'f"{f"' in code and sys.version_info < (3, 12):  # strings in strings in strings are named, not read
        assert "needs Python 3.12" in said[0].message
        return
    assert [(one.rule, one.line) for one in said if one.severity == "error"] == [("DT011", code.count("\n") + 3)]


def test_edits_are_not_offered_where_columns_may_differ() -> None:
    code = "print(f'{names['a']}'); from torch.cuda.amp import autocast\nwith autocast():\n    pass\n"
    assert sys.version_info >= (3, 12) or not any(one.edits for one in problems(code, bare=True))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python reads them")
@pytest.mark.parametrize("code", ["print(f\"{'\\n'.join(names)}\")\n"])
def test_what_cannot_be_read_is_said_with_its_version(code: str) -> None:
    assert "needs Python 3.12" in message(code)
    assert f"dtctl runs on 3.{sys.version_info[1]}" in message(code)


@pytest.mark.parametrize(
    "code", ['print "a"\n', "try:\n    f()\nexcept ValueError, exc:\n    pass\n", "raise E, 'x'\n"]
)
def test_python_2_is_named(code: str) -> None:
    if sys.version_info < (3, 14) and "except" in code:
        assert "Python 3.14" in message(code) or "Python 2" in message(code)
    else:
        assert "Python 2" in message(code)


@pytest.mark.parametrize("code", ["def broken(:\n    pass\n", "x = (1,\n", "f(a b)\n"])
def test_a_mistake_is_one_in_every_version(code: str) -> None:
    assert "is not Python" in message(code)
