"""Which strategy a model gets, by its memory alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtctl.advise.model import build_decoder_model
from dtctl.estimate.choice import (
    StrategyInputs,
    StrategyVerdict,
    choose_ddp_if_small,
    choose_fitting_strategy,
    list_strategy_candidates,
)
from dtctl.estimate.memory import BUDGET, GIB, FrameworkMemory, estimate_layout_memory

MODEL = build_decoder_model(layers=32, hidden=4096, heads=32, vocab=50257, seq=2048)
"""6.9B parameters: 102 GiB of states."""


def setting(gib: float, **others: Any) -> StrategyInputs:
    given: dict[str, Any] = {"workers": 16, "per_node": 8, "budget": gib * GIB * BUDGET, "precision": "bf16", **others}
    return StrategyInputs(**given)


def named(gib: float, **others: Any) -> str:
    found = choose_fitting_strategy(MODEL, setting(gib, **others))
    assert found.fits, found.reason
    assert found.candidate.memory.total <= gib * GIB * BUDGET
    return found.candidate.strategy


@pytest.mark.parametrize(("gib", "strategy"), [(150, "ddp"), (90, "zero1"), (62, "hsdp"), (48, "fsdp")])
def test_the_first_that_fits_is_taken(gib: float, strategy: str) -> None:
    assert named(gib) == strategy


@pytest.mark.parametrize(("workers", "per_node"), [(8, 8), (16, 0), (16, 1), (12, 8)])
def test_hsdp_needs_several_nodes_of_the_same_number_of_workers(workers: int, per_node: int) -> None:
    found = [one.strategy for one in list_strategy_candidates(MODEL, setting(80, workers=workers, per_node=per_node))]
    assert found == ["ddp", "zero1", "fsdp"]


def test_every_candidate_has_all_workers() -> None:
    for one in list_strategy_candidates(MODEL, setting(80)):
        assert one.layout.workers == 16
        assert one.memory == estimate_layout_memory(MODEL, one.layout)


def test_a_model_that_cannot_be_divided_is_not() -> None:
    found = choose_fitting_strategy(MODEL, setting(45, divisible=False))
    assert not found.fits
    assert found.candidate.strategy == "zero1"


def test_the_reason_has_figures_that_add_up() -> None:
    found = choose_fitting_strategy(MODEL, setting(48))
    ddp, zero1, hsdp, fsdp = (one.memory for one in list_strategy_candidates(MODEL, setting(48)))
    parts = [ddp.states, ddp.temporary, ddp.overhead]
    states, temporary, overhead = (f"{part / GIB:.{1 if part >= 10 * GIB else 2}f}" for part in parts)
    assert found.reason == (
        f"since ddp needs {ddp.total / GIB:.1f} GiB (states {states}, temporary {temporary}, overhead {overhead}) of "
        f"{48 * BUDGET:.1f} GiB per GPU, zero1 {zero1.total / GIB:.1f}, hsdp {hsdp.total / GIB:.1f}; "
        f"fsdp needs {fsdp.total / GIB:.1f}"
    )
    assert sum(parts) == pytest.approx(ddp.total)


def test_what_does_not_fit_says_by_how_much_and_what_helps() -> None:
    long = build_decoder_model(layers=32, hidden=4096, heads=32, vocab=50257, seq=8192)
    found = choose_fitting_strategy(long, setting(180, micro_batch=4))
    over = (found.candidate.memory.total - 180 * GIB * BUDGET) / GIB
    assert not found.fits
    assert f"{over:.1f} too many" in found.reason
    assert found.hint is not None
    assert "`train.micro_batch: 2` with 2 times the `accumulate`" in found.hint
    assert "`train.checkpointing: full`" in found.hint
    states = choose_fitting_strategy(MODEL, setting(10, workers=4, per_node=4))
    assert states.hint is not None
    assert states.hint.startswith("more workers")


def test_passes_that_are_added_up_need_whole_gradients_beside_shards() -> None:
    """dtctl.runtime exchanges gradients in the last pass only, so smaller passes may need more."""
    one, two = (
        list_strategy_candidates(MODEL, setting(80, micro_batch=2 // passes, accumulate=passes))[-1]
        for passes in (1, 2)
    )
    more = two.memory.temporary - one.memory.temporary
    assert more == pytest.approx(4 * MODEL.params - 4 * MODEL.root_params)


def test_smaller_passes_are_an_answer_where_running_out_of_memory_leads_to_them() -> None:
    less = replace(MODEL, layers=8, params=8 * MODEL.block_params)  # states are little, activations much
    able = setting(60, micro_batch=16, halves=True)
    found = choose_fitting_strategy(less, able)
    assert (found.fits, found.candidate.strategy) == (True, "zero1")
    assert (found.candidate.layout.micro_batch, found.candidate.layout.accumulate) == (8, 2)
    assert found.reason.startswith("in passes of 8 samples, since nothing fits with 16: ")
    assert not choose_fitting_strategy(less, replace(able, halves=False)).fits


def test_what_cannot_be_seen_gets_room() -> None:
    states = replace(MODEL, block_kept=0.0, vocab=0)
    known = choose_fitting_strategy(states, setting(90))
    unseen = choose_fitting_strategy(states, setting(90), unseen="a reason")
    assert (known.candidate.strategy, unseen.candidate.strategy) == ("zero1", "hsdp")
    assert "activations are not known (a reason)" in unseen.reason
    least = list_strategy_candidates(states, setting(1))[-1].memory.total / GIB
    tight = choose_fitting_strategy(states, setting(least * 1.2), unseen="a reason")
    assert tight.fits, "states alone fit, so it may be tried"
    assert tight.candidate.strategy == "fsdp"


def test_a_small_model_is_not_looked_at() -> None:
    tiny = replace(MODEL, params=1e8, active_params=1e8, block_params=3e6)
    found = choose_ddp_if_small(tiny, setting(80))
    assert isinstance(found, StrategyVerdict)
    assert found.candidate.strategy == "ddp"
    assert choose_ddp_if_small(MODEL, setting(80)) is None
    alone = choose_ddp_if_small(tiny, setting(80, workers=1, per_node=1))
    assert alone is not None
    assert alone.candidate.strategy == "single"


def test_a_recipe_counts_what_a_training_keeps() -> None:
    layout = list_strategy_candidates(MODEL, setting(80))[0].layout

    def states(**recipe: Any) -> float:
        return estimate_layout_memory(MODEL, layout, FrameworkMemory(**recipe)).states / MODEL.params

    assert states() == pytest.approx(16)
    assert states(optimizer_bytes=4) == pytest.approx(12)
    assert states(average_bytes=4) == pytest.approx(20)
    frozen = replace(MODEL, frozen=MODEL.params / 2)
    assert estimate_layout_memory(frozen, layout).states / MODEL.params == pytest.approx(4 + 12 / 2)
