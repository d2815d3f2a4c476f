"""Wrong gradients and norms of expert parallelism that others have shipped would be noticed here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import forked
from tests.integration import expert_bugs
from tests.integration.test_equality import apart

pytestmark = pytest.mark.torch

LIMIT = 1e-12
NOTICED = 1e-6
"""A difference that no order of additions makes."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bugs")
    for workers in (1, 2, 4):
        ended = forked.launch([Path(expert_bugs.__file__), folder], workers, cwd=folder)
        assert ended.code == 0, ended.output[-6000:]
    return folder


def difference(folder: Path, name: str) -> float:
    found, expected = (torch.load(folder / part.replace(" ", "-") / "weights.pt") for part in (name, "single"))
    return max(apart(found[key], value) for key, value in expected.items() if key != "began_at")


@pytest.mark.slow
def test_without_them_training_is_what_one_process_does(trained: Path) -> None:
    assert difference(trained, "none") <= LIMIT


@pytest.mark.parametrize("name", expert_bugs.BUGS)
def test_an_error_that_others_have_shipped_is_noticed(trained: Path, name: str) -> None:
    assert not difference(trained, name) <= NOTICED, "also noticed if it is not a number"


def test_a_resume_has_the_same_bits(trained: Path) -> None:
    resumed, whole = (torch.load(trained / name / "weights.pt") for name in ("resumed", "none"))
    assert (int(whole.pop("began_at")), int(resumed.pop("began_at"))) == (0, 2)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_training_goes_on_with_another_mesh_of_experts(trained: Path, layout: str) -> None:
    assert difference(trained, layout) <= LIMIT
    assert int(torch.load(trained / f"{layout}-resumed" / "weights.pt")["began_at"]) == 2
    assert difference(trained, f"{layout}-resumed") <= LIMIT


def test_workers_that_split_matrices_compute_no_choice_twice(trained: Path) -> None:
    computed = torch.cat([torch.load(trained / f"choices-{rank}.pt") for rank in range(4)])
    assert int(computed.sum()) == 2 * 3 * 21 * 2, "of two batches of three samples of 21 tokens, two choices each"
