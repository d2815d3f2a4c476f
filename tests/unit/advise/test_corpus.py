"""The half of the published trainings that the formulas were fitted to stays met; benchmarks/advise.py scores both."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def learned() -> list[object]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from published import cases
    finally:
        sys.path.remove(str(BENCHMARKS))
    return cases("learn")  # type: ignore[no-any-return]


def test_memory_is_within_15_percent_in_nine_of_ten_and_within_25_in_nearly_all(learned: list[object]) -> None:
    off = [abs(one.memory_gib() / one.entry["memory_gib"] - 1) for one in learned if "memory_gib" in one.entry]  # type: ignore[attr-defined]
    assert len(off) > 50
    assert sum(one <= 0.15 for one in off) / len(off) >= 0.9
    assert sum(one <= 0.25 for one in off) / len(off) >= 0.97


def test_speed_is_within_30_percent_in_nearly_nine_of_ten(learned: list[object]) -> None:
    key = "tokens_per_s_per_gpu"
    off = [abs(one.tokens() / one.entry[key] - 1) for one in learned if key in one.entry]  # type: ignore[attr-defined]
    assert len(off) > 150
    assert sum(one <= 0.30 for one in off) / len(off) >= 0.88


def test_the_halves_are_what_the_hash_says() -> None:
    entries = json.loads((BENCHMARKS / "data" / "advise_published.json").read_text(encoding="utf-8"))
    for entry in entries:
        digit = int(hashlib.sha1((entry["source"] + entry["name"]).encode()).hexdigest()[0], 16)
        assert entry["half"] == ("learn" if digit % 2 == 0 or entry.get("seen") else "held"), entry["name"]
    assert len({entry["source"] + entry["name"] for entry in entries}) == len(entries)


def test_the_table_of_mixtures_in_the_guide_is_what_is_computed() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from published import GUIDE, with_mixtures
    finally:
        sys.path.remove(str(BENCHMARKS))
    text = GUIDE.read_text(encoding="utf-8")
    assert with_mixtures(text) == text, "python benchmarks/published.py writes it anew"
