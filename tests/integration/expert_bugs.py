"""Errors of expert parallelism that others have shipped, each put back into dtctl; run by test_expert_bugs.py.

None of them raised an error or changed the loss of a step; all trained something else than one process.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from dtctl.runtime import MoE, Worker, start
from dtctl.runtime.distributed.device_mesh import build_device_mesh
from dtctl.runtime.moe import dispatch, divide, layer
from dtctl.runtime.strategies import gradients, sharded
from dtctl.train.mesh import Degrees
from tests.integration.equality_worker import Case, trainer_of

SCALED, NORM, ADAMW = dispatch.scale_parameter_gradient, gradients.compute_gradient_norm, torch.optim.AdamW.step
CASE = Case(optimizer="adamw", common={"data": {"mixture": "own"}, "epochs": None, "steps": 3, "clip_norm": 0.1})


def unscaled(parameter: torch.Tensor, _: float) -> torch.Tensor:
    """Experts get the gradients of all tokens of the group, as if they were one worker's."""
    return SCALED(parameter, 1.0)


def norm_of_unscaled(parameters: list[torch.Tensor]) -> torch.Tensor:
    """The experts' share of the norm that clips is of the sum over the group."""
    experts = [value for value in parameters if _is_divided(value)]
    rest = [value for value in parameters if not _is_divided(value)]
    return (NORM(rest) ** 2 + (2 * NORM(experts)) ** 2).sqrt()


def norm_without_experts(parameters: list[torch.Tensor]) -> torch.Tensor:
    """The norm that clips leaves out parameters that the workers have different parts of."""
    return NORM([value for value in parameters if not _is_divided(value)])


def _is_divided(parameter: torch.Tensor) -> bool:
    return parameter.device_mesh.mesh_dim_names == ("ep",)  # type: ignore[attr-defined]


def gradient_of_dropped(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: int, compute: dispatch.Compute
) -> torch.Tensor:
    """Choices that were dropped weigh nothing, and their weights have a gradient all the same."""
    weights = torch.where(chosen == experts, weights - weights.detach(), weights)
    return dispatch.dispatch_to_experts(tokens, chosen.clamp(max=experts - 1), weights, experts, compute)


def gradient_of_own(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: int, compute: dispatch.Compute
) -> torch.Tensor:
    """The weights of experts on other workers have no gradient."""
    own = chosen // (experts // 2) == torch.distributed.get_rank()
    return dispatch.dispatch_to_experts(tokens, chosen, torch.where(own, weights, weights.detach()), experts, compute)


def detached(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: int, compute: dispatch.Compute
) -> torch.Tensor:
    """The router learns nothing."""
    return dispatch.dispatch_to_experts(tokens, chosen, weights.detach(), experts, compute)


def idle_left_out(optimizer: torch.optim.AdamW) -> None:
    """A worker none of whose experts had a token makes no step with them: moments and weight decay stand still."""
    every = [value for group in optimizer.param_groups for value in group["params"]]
    idle = {value: value.grad for value in every if _is_divided(value) and not value.grad.to_local().any()}
    for value in idle:
        value.grad = None
    ADAMW(optimizer)
    for value, gradient in idle.items():
        value.grad = gradient


BUGS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "pytorch 160285": (dispatch, "scale_parameter_gradient", unscaled),
    "DeepSpeed 5259": (gradients, "compute_gradient_norm", norm_of_unscaled),
    "transformers 48687": (layer, "dispatch_to_experts", gradient_of_dropped),
    "transformers 48205": (layer, "dispatch_to_experts", gradient_of_own),
    "Megatron-LM 5916": (gradients, "compute_gradient_norm", norm_without_experts),
    "NeMo Automodel 2995, router": (layer, "dispatch_to_experts", detached),
    "NeMo Automodel 2995, idle experts": (torch.optim.AdamW, "step", idle_left_out),
}


def main(folder: Path) -> None:
    """Train without an error, and with each of them, or go on with other meshes; leave the weights."""
    with start(timeout_s=60) as worker:
        if worker.world_size == 4:
            go_on_with_other_meshes(folder, worker)
            torch.save(choices_computed(worker), folder / f"choices-{worker.rank}.pt")
            return
        for name in ["none", *BUGS] if worker.world_size > 1 else ["single"]:
            own = folder / name.replace(" ", "-")
            own.mkdir(exist_ok=True)
            # Before training some of them are refused (`require_equal_experts`); here they are to be seen in the
            # weights.
            compared = patch.object(divide, "require_equal_experts") if name in BUGS else nullcontext()
            with compared, patch.object(*BUGS[name]) if name in BUGS else nullcontext():
                train(own, own / "snapshots", worker, {"ep": 2})
        if worker.world_size > 1:
            resume(folder / "none", folder / "resumed", worker, {"ep": 2})


def go_on_with_other_meshes(folder: Path, worker: Worker) -> None:
    """Train with each mesh, and go on from its last but one snapshot with the next one."""
    meshes = {"whole": {"dp": 2, "ep": 2}, "sharded": {"ep": 4}}
    for layout, mesh in meshes.items():
        own = folder / layout
        own.mkdir(exist_ok=True)
        train(own, own / "snapshots", worker, mesh, layout=layout)
        (other,) = [value for value in meshes.values() if value != mesh]
        resume(own, folder / f"{layout}-resumed", worker, other, exact=False)


def choices_computed(worker: Worker) -> torch.Tensor:
    """How many choices this worker has computed of two workers' tokens, each of whom splits matrices with another."""
    degrees = Degrees(ep=2, tp=2)
    torch.manual_seed(1)
    made = MoE(width=4, hidden=4, experts=4).double()
    torch.manual_seed(worker.rank // degrees.tp)
    stream = torch.randn(3, 21, 4, dtype=torch.float64)
    expected, computed = made(stream), []
    original = layer.Experts.forward

    def noted(experts: layer.Experts, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        computed.append(len(rows))
        return original(experts, rows, counts)

    sharded.spread_experts(made, degrees, worker, build_device_mesh(degrees, "cpu"))
    with patch.object(layer.Experts, "forward", noted):
        torch.testing.assert_close(made(stream), expected, rtol=1e-12, atol=1e-14)
    return torch.tensor(computed)


def resume(origin: Path, folder: Path, worker: Worker, mesh: dict[str, int], *, exact: bool = True) -> None:
    """Go on from the last but one snapshot of a training."""
    folder.mkdir(exist_ok=True)
    if worker.is_first:
        shutil.rmtree(max((origin / "snapshots").glob("step-*")))
    worker.barrier()
    train(folder, origin / "snapshots", worker, mesh, exact=exact)


def train(
    folder: Path,
    snapshots: Path,
    worker: Worker,
    mesh: dict[str, int],
    *,
    layout: str = "auto",
    exact: bool = True,
) -> None:
    """Train, and leave the weights and the step that this began after in a folder."""
    divided = {"strategy": mesh, "accumulate": 2} if worker.world_size > 1 else {}
    snapshot = {"dir": str(snapshots), "every_steps": 1, "layout": layout}
    settings = {**divided, "snapshot": snapshot, "require_exact": exact}
    trainer = trainer_of(replace(CASE, settings=settings), worker, folder, snapshots)
    trainer.run()
    weights = trainer.full_weights()
    if worker.is_first:
        torch.save({**weights, "began_at": torch.tensor([trainer.training.position.began_at])}, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
