"""Settings that do not go together are refused before anything waits for anything: by the plan and by the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtctl.errors import PlanError
from dtctl.plan.build import build
from dtctl.plan.model import Plan
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes
from dtctl.train.compatibility import count_stages_per_worker, require
from dtctl.train.config import load
from dtctl.train.mesh import Degrees
from tests.facts import raises


@pytest.mark.parametrize(
    ("settings", "degrees", "micro_batches", "message"),
    [
        ({"schedule": "1f1b", "stages_per_worker": 2}, Degrees(pp=2), 4, "one stage worker"),
        ({"schedule": "zbv", "stages_per_worker": 3}, Degrees(pp=2), 4, "two stages worker"),
        ({"schedule": "zbv"}, Degrees(pp=2, fsdp=2), 4, "wrong gradients"),
        ({"schedule": "zero-bubble"}, Degrees(pp=2, fsdp=2), 4, "wrong gradients"),
        ({}, Degrees(pp=4), 3, "3 4 workers"),
        ({"schedule": "interleaved"}, Degrees(pp=2), 5, "2 rounds 5"),
    ],
)
def test_settings_that_do_not_go_together(
    settings: dict[str, Any], degrees: Degrees, micro_batches: int, message: str
) -> None:
    config = load({"pipeline": settings}, argv=[], environ={})
    with raises(PlanError, message):
        require(config, degrees, accumulate=micro_batches)


def test_sequence_parallelism_is_refused() -> None:
    config = load({"tp": {"sequence_parallel": True}}, argv=[], environ={})
    with raises(PlanError, "pipeline"):
        require(config, Degrees(pp=2, tp=2), accumulate=4)


@pytest.mark.parametrize(("schedule", "per_worker"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_stages_per_worker_follow_the_schedule(schedule: str, per_worker: int) -> None:
    config = load({"pipeline": {"schedule": schedule}}, argv=[], environ={})
    assert count_stages_per_worker(config.pipeline) == per_worker


@pytest.mark.parametrize(
    ("settings", "degrees"),
    [
        ({"compile": True}, Degrees(cp=2)),
        ({"tp": {"sequence_parallel": True}}, Degrees(cp=2, tp=2)),
        ({"exact": "elastic"}, Degrees(fsdp=2)),
        ({"exact": "elastic", "strategy": "zero1"}, Degrees(dp=2)),
        ({"exact": "elastic", "ddp": {"comm_hook": "bf16"}}, Degrees(dp=2)),
        ({}, Degrees(pp=2, cp=2)),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], degrees: Degrees) -> None:
    with pytest.raises(PlanError) as caught:
        require(load(settings, argv=[], environ={}), degrees, accumulate=None)
    assert (caught.value.where or "").startswith("train.")


def plan(train: str, *, nodes: str = "[a, b]", slots: int = 8, job: str = "script: t.py, kind: direct") -> Plan:
    text = f"cluster: {{transport: ssh, nodes: {nodes}, slots: {slots}}}\njob: {{{job}}}\ntrain: {train}\n"
    spec = parse_spec(text, source="dtctl.yaml", base_dir=Path())
    return build(spec, resolve_nodes(spec), run="r")


@pytest.mark.parametrize(
    ("train", "line"),
    [
        ("{strategy: {tp: 5, fsdp: 2}}", 3),
        ("{strategy: {tp: 5, fsdp: -1}}", 3),
        ("{strategy: {pp: 2, cp: 2, dp: -1}}", 3),
        ("{strategy: single}", 3),
        ("{strategy: ddp, global_batch: 24}", 3),
        ("{strategy: ddp, global_batch: 64, micro_batch: 3}", 3),
        ("{strategy: {pp: 4, dp: 4}, accumulate: 2}", 3),
        ("{strategy: {pp: 4, dp: 4}, accumulate: 8, pipeline: {micro_batches: 4}, global_batch: 64}", 3),
        ("{strategy: {pp: 2, fsdp: -1}, pipeline: {schedule: zbv}}", 3),
        ("{strategy: fsdp, exact: elastic}", 3),
    ],
)
def test_the_plan_refuses_what_workers_would_refuse_at_its_line(train: str, line: int) -> None:
    with pytest.raises(PlanError) as caught:
        plan(train)
    assert caught.value.where == f"dtctl.yaml:{line}"


@pytest.mark.parametrize(
    "train",
    [
        "{global_batch: 7}",  # the script may choose a strategy with one data parallel worker
        "{strategy: {pp: 4, dp: 4}, global_batch: 4}",  # and a micro batch
        "{strategy: {pp: 4, dp: 4}, pipeline: {stages_per_worker: 2}}",  # and a schedule
        "{strategy: {tp: 4, fsdp: -1}, global_batch: 64}",
        "{strategy: auto}",
    ],
)
def test_the_plan_leaves_to_the_workers_what_the_script_may_settle(train: str) -> None:
    assert plan(train).world_size == 16


def test_arguments_of_the_job_win_over_the_spec_as_in_the_workers() -> None:
    with pytest.raises(PlanError):
        plan("{strategy: ddp}", job="script: t.py, kind: direct, args: ['--train.strategy=single']")
    assert plan("{strategy: single}", job="script: t.py, kind: direct, args: ['--train.strategy=ddp']")


def test_hsdp_needs_equal_nodes() -> None:
    nodes = "[{name: a, slots: 4}, {name: b, slots: 2}]"
    with pytest.raises(PlanError) as caught:
        plan("{strategy: hsdp}", nodes=nodes)
    assert caught.value.where == "dtctl.yaml:3"


def test_tensor_parallelism_over_nodes_is_told() -> None:
    assert any("tp 16 spans" in note for note in plan("{strategy: {tp: 16}}").notes)
    assert not any("spans" in note for note in plan("{strategy: {tp: 8, dp: 2}}").notes)


def test_a_program_that_is_not_ours_is_left_alone() -> None:
    assert plan("{strategy: {tp: 5, fsdp: 2}}", job="command: [./own]").world_size == 16


def test_parameters_in_bf16_need_a_computation_in_bf16() -> None:
    half = load({"fsdp": {"param_dtype": "bf16"}}, argv=[], environ={})
    with raises(PlanError, "fp32"):
        require(half, Degrees(fsdp=2), accumulate=1)
    both = load({"fsdp": {"param_dtype": "bf16"}, "precision": "bf16"}, argv=[], environ={})
    require(both, Degrees(fsdp=2), accumulate=1)
