"""The Grafana board and the guide speak of figures that there are, and of all of them."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dtctl.metrics.families import build_metric_families
from tests.unit.metrics.following import full_run

ROOT = Path(__file__).resolve().parents[3]
BOARD: dict[str, Any] = json.loads((ROOT / "examples/grafana/dtctl.json").read_text())
NAME = re.compile(r"\bdtctl_[a-z_]+\b")


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name -> the labels of its samples."""
    figures = full_run(tmp_path_factory.mktemp("run")).follower.figures
    return {
        family.name: {"run", *(label for labels, _ in family.samples for label in labels)}
        for family in build_metric_families(figures)
    }


def queries() -> list[str]:
    targets = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    variables = [item["query"]["query"] for item in BOARD["templating"]["list"] if item["type"] == "query"]
    return [*targets, *variables, *(note["expr"] for note in BOARD["annotations"]["list"])]


def test_the_board_asks_for_what_there_is(labels: dict[str, set[str]]) -> None:
    for query in queries():
        names = NAME.findall(query)
        assert names, query
        assert set(names) <= labels.keys(), query
        for name, selector in re.findall(r"(dtctl_[a-z_]+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)[=!]", selector)) <= labels[name], query
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            known = set().union(*(labels[name] for name in NAME.findall(target["expr"])))
            known |= {"Hostname", "gpu"} if "DCGM_" in target["expr"] else set()  # those of dcgm-exporter
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]


def test_the_board_shows_every_figure_of_training(labels: dict[str, set[str]]) -> None:
    shown = set(NAME.findall(" ".join(queries())))
    assert {name for name in labels if re.search("loss|rate|norm|second$|step$|phase|goodput|node_", name)} <= shown


def test_no_panel_covers_another() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def test_the_guide_names_every_figure(labels: dict[str, set[str]]) -> None:
    text = (ROOT / "docs/guides/metrics.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `dtctl_")]
    named = {re.findall(r"`(\w+)`", line)[0]: set(re.findall(r"`(\w+)`", line.split("|")[1])[1:]) for line in table}
    assert named == {name: found - {"run"} for name, found in labels.items()}
    assert set(NAME.findall(text)) <= labels.keys() | {"dtctl_"}
