"""Random state: what was drawn after a capture is drawn again after a restore."""

from __future__ import annotations

import random

import numpy as np
import torch

from dtctl.runtime import Worker, randomness


def draw() -> list[float]:
    return [random.random(), random.gauss(), float(np.random.rand()), float(np.random.normal()), float(torch.rand(1))]


def test_restore_repeats_the_draws(worker: Worker) -> None:
    randomness.seed_worker_generators(3, 0)
    draw()  # leaves half a pair of normal numbers behind in Python and NumPy
    captured = randomness.capture_rng_states(worker.device)
    expected = draw()
    assert draw() != expected
    randomness.restore_rng_states(captured, worker.device)
    assert draw() == expected


def test_gathered_states_are_of_ranks(worker: Worker) -> None:
    everyone = randomness.gather_rng_states(worker)
    assert everyone is not None
    mine = randomness.select_rank_state(everyone, 0)
    assert mine is not None
    for name, tensor in randomness.capture_rng_states(worker.device).items():
        assert torch.equal(mine[name], tensor) or mine[name].isnan() == tensor.isnan()
    assert randomness.select_rank_state(everyone, 1) is None


def test_streams_differ_by_seed_rank_and_step() -> None:
    drawn = set()
    for seed, rank, step in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63, 0, 0)):
        randomness.seed_worker_generators(seed, rank, step=step)
        drawn.add(tuple(draw()))
    assert len(drawn) == 5


def drawn_in(step: int, *, seed: int = 3, rank: int = 1) -> list[float]:
    randomness.StepRandomStream(seed, rank, torch.device("cpu")).begin(step)
    drawn: list[float] = torch.rand(4).tolist()
    return drawn


def test_what_a_step_draws_depends_on_nothing_that_was_drawn_before() -> None:
    first = drawn_in(5)
    torch.rand(7)
    assert drawn_in(5) == first
    others = [drawn_in(6), drawn_in(4), drawn_in(5, rank=2), drawn_in(5, seed=4), drawn_in(1, rank=5)]
    assert len({tuple(drawn) for drawn in [first, *others]}) == 6


def test_steps_draw_as_if_from_one_stream() -> None:
    draws = torch.tensor([drawn_in(step, rank=rank) for rank in range(4) for step in range(500)], dtype=torch.float64)
    assert abs(float(draws.mean()) - 0.5) < 0.01
    assert abs(float((draws[1:, 0] * draws[:-1, 0]).mean()) - 0.25) < 0.01, "neighbours have nothing in common"
