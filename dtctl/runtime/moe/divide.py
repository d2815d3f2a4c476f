"""Experts divided over workers (mesh axis ep), in both forms that recognize.py finds.

Router, combination and shared experts are unchanged, and on every worker. Each worker has an equal part of the experts.
Their code is called with this part as parameters, with its size as `num_experts`, and with the rows for them from all
workers of the group. In the second form the weights are applied on the worker that has the tokens.

Gradients: a part of the experts has the gradients of all tokens of the group, but the later mean over workers expects
those of one worker's samples. Therefore gradients of experts are divided by the number of workers in the group with
different samples. Workers
with the same tokens (mesh axis tp) belong to the group too, and each sends a part of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtctl.errors import PlanError
from dtctl.runtime.moe import accounting, dispatch, recognize
from dtctl.runtime.moe.recognize import GROUPED
from dtctl.runtime.strategies.comparison import RecordedCalls, describe_module_kind


def divide_experts(model: nn.Module, mesh: DeviceMesh, alike: dist.ProcessGroup | None = None) -> list[nn.Module]:
    """Reduce all experts of a model to this worker's part, in place; parameters become DTensors over the axis ep.

    Args:
        model: the whole model, equal on all workers, and on their devices.
        mesh: mesh with the axis ep over all workers that divide experts.
        alike: group of the workers with the same tokens as this one; None if this worker is the only one.

    Returns:
        The modules that hold experts.

    Raises:
        PlanError: the model has no experts that can be divided in this way.
    """
    experts, workers = recognize.find_expert_modules(model), mesh["ep"].size()
    if not experts:
        raise PlanError(
            "ep divides experts, and none were found in the model",
            where="train.strategy.ep",
            hint="a module of experts has `num_experts`, parameters with that first dim, and forward(rows, counts) or "
            "forward(tokens, chosen, weights); see docs/guides/experts.md",
        )
    for name, module in experts.items():
        count, form = int(module.num_experts), recognize.find_expert_form(module)  # type: ignore[arg-type]
        if count % workers:
            same = 1 if alike is None else alike.size()
            fits = [degree for degree in range(1, count + 1) if count % (degree * same) == 0]
            degrees = f"{workers} workers" if alike is None else f"{workers} workers (ep x tp)"
            raise PlanError(
                f"{name} has {count} experts, which {degrees} cannot divide",
                where="train.strategy.ep",
                hint=f"use a degree of {', '.join(map(str, fits))}" if fits else "use a lower degree of tp",
            )
        _replace_parameters(module, mesh["ep"])
        _ExpertParallelForward(module, form, mesh["ep"], alike)
    return list(experts.values())


def require_equal_experts(
    model: nn.Module, mesh: DeviceMesh, alike: dist.ProcessGroup | None, seen: RecordedCalls
) -> None:
    """Compare the divided experts of all workers with the experts in one piece; collective.

    Args:
        model: as in `divide_experts`; it stays as it is.
        mesh: as in `divide_experts`.
        alike: as in `divide_experts`.
        seen: calls of the modules that hold experts.

    Raises:
        PlanError: the results differ, or a module was not called.
    """
    done: set[object] = set()
    for name, module in recognize.find_expert_modules(model).items():
        if int(module.num_experts) % mesh["ep"].size():  # type: ignore[arg-type]
            continue  # `divide_experts` refuses it
        if name not in seen.calls:
            raise PlanError(
                f"the experts {name} were not used in the first forward pass, so nothing shows that they can be "
                "divided",
                where="train.strategy.ep",
                hint="call all layers of experts in each pass",
            )
        kind = describe_module_kind(module)
        if kind in done:
            continue
        done.add(kind)
        difference = seen.compare(name, module).compute_difference(
            lambda twin: divide_experts(twin, mesh, alike), mesh["ep"].get_group()
        )
        if not difference.is_rounding or difference.added_up:
            raise PlanError(
                f"{name} has other results if its experts are divided over {mesh['ep'].size()} workers: "
                f"{difference.describe()}",
                where="train.strategy.ep",
                hint="see docs/guides/experts.md for the requirements for experts, or leave out ep",
            )


def renew_expert_groups(experts: Iterable[nn.Module]) -> None:
    """Use the present process groups of the mesh in modules from `divide_experts`; local."""
    for module in experts:
        divided: _ExpertParallelForward = cast(Any, type(module))._dtctl_divided
        divided.group = divided.mesh.get_group()


def _replace_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                own = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
                spread = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
                part._parameters[name] = nn.Parameter(spread, requires_grad=parameter.requires_grad)


class _ExpertParallelForward:
    """Forward pass of a module of experts if this worker has a part of them."""

    def __init__(self, module: nn.Module, form: int, mesh: DeviceMesh, alike: dist.ProcessGroup | None) -> None:
        self.form, self.mesh, self.group, self.alike = form, mesh, mesh.get_group(), alike
        self.count = int(module.num_experts)  # type: ignore[arg-type]
        kind = type(module)
        self.signature = inspect.signature(partial(kind.forward, module))

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(own: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self(own, partial(kind.forward, own), *self.signature.bind(*args, **kwargs).args)

        # A class instead of a function on the instance, which a copy of the model would share with the original.
        members = {"forward": forward, "_dtctl_divided": self, "__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (kind,), members)

    def __call__(self, module: nn.Module, original: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        """Compute the outputs for rows, or for tokens with their choices."""
        compute = partial(self._compute_own_experts, module, original)
        there: dispatch.Compute = partial(dispatch.dispatch_rows_to_experts, group=self.group, compute=compute)
        if self.alike is not None:
            there = partial(dispatch.share_out_rows, group=self.alike, compute=there)
        if self.form == GROUPED:
            rows, counts = args[0], args[1].to(torch.int64)
            self._count_expert_tokens(module, counts, counts.new_zeros(()))
            return there(rows, counts)
        tokens, chosen, weights = args
        sums = torch.bincount(chosen.reshape(-1), minlength=self.count + 1)
        self._count_expert_tokens(module, sums[: self.count], sums[self.count])
        return dispatch.dispatch_to_experts(tokens, chosen, weights, self.count, there)

    def _count_expert_tokens(self, module: nn.Module, chosen: torch.Tensor, dropped: torch.Tensor) -> None:
        under_way = accounting.get_current_pass()
        if under_way.load is not None and under_way.samples != 0 and accounting.is_first_time():
            under_way.load.add(module, chosen, dropped)

    def _compute_own_experts(
        self, module: nn.Module, original: Callable[..., torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        count = len(rows)
        if not count:
            # An unused row makes the result have the number format of the other workers (autocast), lets this worker
            # take part in their backward pass, and gives parameters a gradient of zero, as in one process.
            rows, counts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), counts.clone()
            counts[0] = 1
        with self._own_part(module):
            if self.form == GROUPED:
                return original(rows, counts)[:count]
            numbers = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
            return original(rows, numbers[:, None], rows.new_ones(len(rows), 1))[:count]

    @contextmanager
    def _own_part(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which a module has plain tensors as parameters, and counts only this worker's experts."""
        places = [
            (part, name) for part in module.modules() for name, held in part._parameters.items() if held is not None
        ]
        held: list[Any] = [part._parameters[name] for part, name in places]
        factor = (1 if self.alike is None else self.alike.size()) / self.group.size()
        plain = [dispatch.scale_parameter_gradient(parameter.to_local(), factor) for parameter in held]
        try:
            for (part, name), tensor in zip(places, plain, strict=True):
                part._parameters[name] = tensor  # type: ignore[assignment]
            module.num_experts = self.count // self.group.size()  # type: ignore[assignment]
            yield
        finally:
            module.num_experts = self.count  # type: ignore[assignment]
            for (part, name), parameter in zip(places, held, strict=True):
                part._parameters[name] = parameter


def make_expert_placement(mesh: DeviceMesh) -> Callable[[torch.Tensor], Shard]:
    """Return the function that chooses along which dim fully_shard divides experts: the second, after ep's first.

    Raises:
        PlanError: the function is called with a parameter that cannot be divided.
    """
    workers = mesh["fsdp"].size()

    def chosen(parameter: torch.Tensor) -> Shard:
        for dim in range(1, parameter.dim()):
            if parameter.shape[dim] % workers == 0:
                return Shard(dim)
        raise PlanError(
            f"a parameter of experts has the shape {list(parameter.shape)}, and only its first dim can be "
            f"divided over {workers} workers",
            where="train.strategy",
            hint="use dp instead of fsdp, or widths that are a multiple",
        )

    return chosen
