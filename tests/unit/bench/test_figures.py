"""Sizes, bandwidths, rows and the picture of `dtctl bench`."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from dtctl.bench.figures import (
    OPS,
    build_result_row,
    build_training_row,
    format_message_size,
    parse_message_size,
    parse_operations,
    parse_size_range,
)
from dtctl.bench.job import BenchmarkResults
from dtctl.bench.picture import render_bench_svg
from dtctl.errors import UsageError
from tests.facts import raises


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1K:1M", (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)),
        ("4:17", (4, 16, 17)),
        ("1MiB", (1 << 20,)),
        ("8:8", (8,)),
        ("1g:4GB", (1 << 30, 4 << 30)),
    ],
)
def test_sizes_grow_fourfold_and_end_with_the_last(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_size_range(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "1M:1K", "0:8", "1T", "-1", "1.5M", "2:8"])
def test_what_is_no_range_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size_range(text)


def test_a_size_reads_back_as_itself() -> None:
    for size in (4, 1020, 1 << 10, 3 << 20, 1 << 30):
        assert parse_message_size(format_message_size(size).replace(" ", "")) == size


def test_operations_may_be_spelt_as_people_spell_them() -> None:
    assert parse_operations(["all-reduce", "AllReduce", "p2p"]) == ("all_reduce", "p2p")
    assert parse_operations([]) == OPS
    with raises(UsageError, "operation"):
        parse_operations(["allreducee"])


@pytest.mark.parametrize(
    ("op", "factor"),
    # The summary of nccl-tests' PERFORMANCE.md for 4 ranks; gather and scatter from their own sources.
    [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75), ("broadcast", 1.0), ("reduce", 1.0),
     ("all_to_all", 0.75), ("gather", 0.75), ("scatter", 0.75), ("p2p", 1.0)],
)  # fmt: skip
def test_bus_bandwidth_is_what_nccl_tests_calls_so(op: str, factor: float) -> None:
    row = build_result_row(op, 10**9, 0.5, ranks=4, wrong=0)
    assert (row["algbw_gb_s"], row["busbw_gb_s"], row["time_us"]) == (2.0, 2.0 * factor, 500_000.0)


def test_efficiency_is_the_time_of_one_worker_over_that_of_many() -> None:
    assert build_training_row(4, 0.2, 0.1, loss_ok=True) == {"workers": 4, "step_s": 0.2, "efficiency": 0.5, "ok": True}


def figures() -> BenchmarkResults:
    made = BenchmarkResults()
    made.add_worker_line({"backend": "gloo", "world": 2, "torch": "2"})
    for size in (1 << 10, 1 << 20):
        made.add_worker_line({"op": "all_reduce", "size": size, "seconds": 1e-3, "wrong": 0})
    made.add_worker_line({"op": "p2p", "size": 1 << 20, "matrix": [[0.0, 1e-3], [2e-3, 0.0]], "wrong": 3})
    made.add_worker_line({"training": 1, "step_s": 0.1, "ok": True})
    made.add_worker_line({"training": 2, "step_s": 0.125, "ok": False})
    made.add_worker_line({"finished": True})
    return made


def test_the_lines_of_rank_0_become_figures() -> None:
    made = figures()
    assert made.finished
    assert [row["op"] for row in made.results] == ["all_reduce", "all_reduce", "p2p"]
    assert made.pairs == {"size": 1 << 20, "gb_s": [[None, 1.04858], [0.52429, None]]}
    assert [row["efficiency"] for row in made.training] == [1.0, 0.8]
    assert made.wrong == 4, "three elements, and one step after which the workers differ"


def test_the_picture_is_an_svg_with_every_operation_and_pair() -> None:
    made = figures()
    facts: dict[str, Any] = {"results": made.results, "pairs": made.pairs, "backend": "gloo", "world_size": 2}
    texts = [element.text for element in ET.fromstring(render_bench_svg(facts)).iter() if element.text]
    assert {"all_reduce", "p2p", "1", "0.52", "1 MiB"} <= set(texts)
    ET.fromstring(render_bench_svg({**facts, "results": [], "pairs": {}}))
    ET.fromstring(render_bench_svg({**facts, "results": made.results[:1], "pairs": {}}))
