"""Bytes of optimizers' states: what torch's optimizers have after a step, and what is computed before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from dtctl.advise.gather import AdviseOptions, build_advise_task  # noqa: E402
from dtctl.advise.shape import TransformerShape, build_model_profile  # noqa: E402
from dtctl.estimate import model_shapes  # noqa: E402
from dtctl.estimate.memory import RUNTIME, FrameworkMemory, ParallelLayout, estimate_layout_memory  # noqa: E402
from dtctl.estimate.model import ModelProfile, build_inspected_model  # noqa: E402
from dtctl.runtime import load, optim  # noqa: E402

pytestmark = pytest.mark.torch
WIDTH, LAYERS, VOCAB = 64, 2, 500


class Network(nn.Module):
    """A GPT without attention: a table, blocks with norms and a stack of experts, and an output that may be tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "up": nn.Linear(WIDTH, 4 * WIDTH),
                    "down": nn.Linear(4 * WIDTH, WIDTH),
                    "experts": nn.ParameterList([torch.randn(3, WIDTH, WIDTH)]),
                }
            )
            for _ in range(LAYERS)
        )
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.output.weight = self.table.weight


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def of_spec(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: optim.build_optimizer(load({"optimizer": name, "steps": 1}, argv=[], environ={}), model)


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state after a step, but for numbers that count steps."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.dim())


def computed(model: ModelProfile, recipe: FrameworkMemory, **layout: int) -> float:
    without = FrameworkMemory(optimizer_bytes=0)
    both = [estimate_layout_memory(model, ParallelLayout(**layout), one).states for one in (recipe, without)]
    return both[0] - both[1]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("name", "make"),
    [("adamw", of_spec("adamw")), ("sgd", of_spec("sgd")), ("muon", of_spec("muon")), ("adafactor", adafactor)],
)
def test_an_estimate_has_the_bytes_that_the_optimizer_has(
    name: str, make: Callable[[nn.Module], torch.optim.Optimizer], tied: bool
) -> None:
    model = Network(tied=tied)
    figures = build_inspected_model(model_shapes.collect_static_figures(model, list(model.blocks)), name="network")
    found = counted(model, make(model))
    # Adafactor's rows and columns are a share of the width, which is small here.
    room = 0.0 if name != "adafactor" else 4 * figures.params * 2 / WIDTH
    assert found - room <= computed(figures, RUNTIME.with_optimizer(name)) <= found


def test_a_stage_of_a_pipeline_has_the_tables_that_it_has() -> None:
    shape = TransformerShape(
        name="gpt", layers=4, hidden=64, heads=4, kv_heads=4, vocab=VOCAB, seq=16, head_dim=16, ffn=256
    )  # fmt: skip
    model, muon = build_model_profile(shape), RUNTIME.with_optimizer("muon")
    table = VOCAB * 64
    assert model.table_params == table
    matrices = model.params - table
    assert computed(model, muon) == pytest.approx(4 * matrices + 8 * table)
    # Of the first of two stages, which has the table and no output.
    assert computed(model, muon, pp=2) == pytest.approx(4 * (matrices - table) / 2 + 8 * table)
    assert computed(model, muon, fsdp=4) == pytest.approx((4 * matrices + 8 * table) / 4)


def test_advise_knows_the_optimizers() -> None:
    def state(optimizer: str) -> float:
        asked = build_advise_task(AdviseOptions(params="1B", gpus=8, optimizer=optimizer), None)
        return computed(asked.model, asked.recipe) / asked.model.params

    assert state("adamw") == 8
    assert 4 < state("muon") < 5
    assert state("adafactor") == 0
