"""Names and degrees become meshes, or an error that says which mesh would do."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import PlanError
from dtctl.train.config import StrategyName
from dtctl.train.mesh import AXES, NAMES, Coordinate, Degrees, resolve_degrees


@pytest.mark.parametrize(
    ("strategy", "workers", "per_node", "degrees"),
    [
        ("auto", 1, 1, Degrees()),
        ("single", 1, 1, Degrees()),
        ("ddp", 6, 3, Degrees(dp=6)),
        ("zero1", 6, 3, Degrees(dp=6)),
        ("fsdp", 6, 3, Degrees(fsdp=6)),
        ("hsdp", 6, 3, Degrees(dp=2, fsdp=3)),
        ("hsdp", 1, 1, Degrees()),
        ("tp", 6, 3, Degrees(tp=3, dp=2)),
        ("pipeline", 6, 3, Degrees(pp=6)),
        ({}, 1, 1, Degrees()),
        ({"tp": 2, "dp": 3}, 6, 1, Degrees(tp=2, dp=3)),
        ({"tp": 2, "pp": -1, "fsdp": 2}, 12, 4, Degrees(tp=2, pp=3, fsdp=2)),
        ({"dp": -1}, 5, 5, Degrees(dp=5)),
        ({"ep": 2, "fsdp": -1}, 8, 4, Degrees(ep=2, fsdp=4)),
    ],
)
def test_strategies_mean_degrees(strategy: object, workers: int, per_node: int, degrees: Degrees) -> None:
    assert resolve_degrees(strategy, workers=workers, per_node=per_node) == degrees  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "workers", "message", "hint"),
    [
        ("single", 2, "would train 2 separate models", "`ddp`"),
        ("dpp", 2, "there is no strategy dpp", "ddp"),
        ("hsdp", 4, "all 4 workers are on one node", "{dp: 2, fsdp: -1}"),
        ("hsdp", 6, "6 workers are no multiple of the 4 here", "{dp: 2, fsdp: -1}"),
        ({"sp": 2}, 2, "there is no axis sp", "pp, dp, fsdp, cp, ep, tp"),
        ({"dp": 0}, 2, "the degree of dp is 0", None),
        ({"dp": -1, "tp": -1}, 4, "dp and tp are both -1", None),
        ({"tp": 3, "dp": -1}, 4, "4 workers cannot be divided by tp 3 = 3", "nearest: {dp: 1, tp: 4}"),
        ({"tp": 2}, 8, "the mesh tp 2 has 2 workers, and the job has 8", "nearest: {dp: 4, tp: 2}"),
        ({"fsdp": 4, "pp": 2}, 16, "fsdp 4 * pp 2 has 8 workers, and the job has 16", "{pp: 2, dp: 2, fsdp: 4}"),
        ({"pp": 3}, 4, "the mesh pp 3 has 3 workers", "nearest: {pp: 4, dp: 1}"),
    ],
)
def test_what_is_no_mesh_is_refused_with_the_nearest_one(
    strategy: object, workers: int, message: str, hint: str | None
) -> None:
    with pytest.raises(PlanError) as caught:
        resolve_degrees(strategy, workers=workers, per_node=4)  # type: ignore[arg-type]
    assert message in caught.value.message
    assert (hint or "") in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("degrees", "text"),
    [(Degrees(), "dp"), (Degrees(fsdp=4), "fsdp"), (Degrees(tp=2, dp=3, pp=4), "pp 4 x dp 3 x tp 2")],
)
def test_degrees_are_said_briefly(degrees: Degrees, text: str) -> None:
    assert str(degrees) == text


def test_names_are_those_of_the_configuration() -> None:
    assert set(NAMES) == set(StrategyName.__args__)  # type: ignore[attr-defined]


@given(st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES}))
def test_every_worker_has_a_place_of_its_own(sizes: dict[str, int]) -> None:
    degrees = Degrees(**sizes)
    places = [Coordinate(degrees=degrees, rank=rank) for rank in range(degrees.workers)]
    assert {(place.stage, place.data, place.cp, place.tp) for place in places} == set(
        product(*map(range, (degrees.pp, degrees.data, degrees.cp, degrees.tp)))
    )
    counting = [place.data for place in places if place.counts]
    assert sorted(counting) == list(range(degrees.data))
    assert {(place.data, place.ep) for place in places} == {(n, n % degrees.ep) for n in range(degrees.data)}
    streams = {(place.stage, place.data, place.cp): place.stream for place in places}
    assert all(streams[place.stage, place.data, place.cp] == place.stream for place in places)


@pytest.mark.parametrize(
    ("degrees", "parts", "shards"),
    [(Degrees(ep=4, tp=2), 8, 1), (Degrees(fsdp=2, cp=2, ep=2), 2, 4), (Degrees(tp=4), 1, 1)],
)
def test_experts_are_divided_by_ep_and_tp_and_sharded_by_the_rest(degrees: Degrees, parts: int, shards: int) -> None:
    assert (degrees.expert_parts, degrees.expert_shards) == (parts, shards)
