"""Optimizers that need whole matrices (Muon, Adafactor), for parameters that are divided over workers.

A trial shows whether an optimizer needs whole matrices: it makes a step on a small divided parameter, and on the same
one in one piece. If the results differ, each matrix is gathered on one worker for its step, and sent back in parts. The
matrices are distributed so that all workers compute at the same time. Between steps parameters and state are divided as
usual, so snapshots and recovery do not differ. State whose shape differs from that of its parameter, such as
Adafactor's rows and columns, is complete on all workers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtctl.errors import PlanError
from dtctl.runtime.strategies.zero1 import assign_parameter_owners

TOLERANCE: Final = 1e-7
"""Relative norm of a difference that rounding in fp64 explains."""
STEPS: Final = 2
"""Steps of a trial; the first one creates the state."""
RATE: Final = 0.1
"""Learning rate of a trial, since that of a run may begin at 0."""

State = dict[str, Any]


def take_whole_steps(optimizer: torch.optim.Optimizer) -> None:
    """Change an optimizer that needs whole matrices so that it gets them; collective over all workers.

    Args:
        optimizer: new optimizer over all parameters of this worker; its class is replaced if it needs whole matrices.

    Raises:
        PlanError: the optimizer needs several matrices at once, or has state for all parameters together.
    """
    dependent: set[nn.Parameter] = set()
    tried: dict[object, bool] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor) or not parameter.is_floating_point():
                continue
            kind = (number, parameter.device_mesh, parameter.placements, parameter.dim())
            if kind not in tried:
                tried[kind] = any(
                    _needs_whole(optimizer, group, parameter, shape) for shape in _build_trial_shapes(parameter)
                )
            if tried[kind]:
                dependent.add(cast(nn.Parameter, parameter))
    kind_of = type(optimizer)
    if hasattr(kind_of, "_dtctl_dependent"):
        kind_of._dtctl_dependent = dependent
        return
    if not dependent:
        return
    _require_single(optimizer, next(iter(dependent)))

    def step(own: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        return _step_whole_matrices(own, kind_of, type(own)._dtctl_dependent, closure)  # type: ignore[attr-defined]

    members = {"step": step, "_dtctl_dependent": dependent, "__module__": kind_of.__module__}
    optimizer.__class__ = type(kind_of.__name__, (kind_of,), members)


# -- trial ------------------------------------------------------------------------------------------------------------


def _build_twin_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: list[Any]) -> Any:
    """Return an optimizer of the same class and settings over other parameters, without state and hooks."""
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)
    for name, value in list(twin.__dict__.items()):
        if name.endswith("_hooks") and isinstance(value, dict):
            twin.__dict__[name] = OrderedDict()
    options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    if isinstance(options.get("lr"), float | int):
        options["lr"] = RATE
    twin.param_groups, twin.state = [{**options, "params": parameters}], defaultdict(dict)
    return twin


def _build_trial_shapes(like: DTensor) -> list[list[int]]:
    """Return small shapes divided like a parameter: wide, tall, of odd sizes, and with fewer rows than workers."""
    parts = [1] * like.dim()
    for axis, placement in enumerate(like.placements):
        if (dim := _find_sharded_dim(placement)) is not None:
            parts[dim] *= like.device_mesh.size(axis)
    most = max(parts)
    wide = [2 * count for count in parts[:-1]] + [3 * most * parts[-1]]
    tall = [3 * most * parts[0]] + [2 * count for count in parts[1:]]
    odd = [size + (count > 1) for size, count in zip(tall, parts, strict=True)]
    one = [1 if count > 1 else size for size, count in zip(tall, parts, strict=True)]
    return [wide, tall, odd, one] if like.dim() > 1 else [tall, odd, one]


def _draw_trial_tensors(like: DTensor, shape: Sequence[int], seed: int, *, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return values and gradients of a small parameter in one piece, the same on all workers."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(1 + STEPS)]
    return [row.to(like.device) for row in rows]


def _shard_whole_tensor(whole: torch.Tensor, like: DTensor) -> DTensor:
    local = whole
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None  # noqa: S101  # for the type checker: this worker is of the mesh
    for axis, placement in enumerate(like.placements):
        if (dim := _find_sharded_dim(placement)) is not None:
            workers = like.device_mesh.size(axis)
            length = -(-local.shape[dim] // workers)
            begin = min(local.shape[dim], length * coordinate[axis])
            local = local.narrow(dim, begin, min(length, local.shape[dim] - begin))
    dims = map(_find_sharded_dim, like.placements)
    plain = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return DTensor.from_local(
        local.contiguous().clone(), like.device_mesh, plain, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _find_sharded_dim(placement: Any) -> int | None:
    """Return the dim along which a placement divides; `is_shard` is false for torch's shards of shards."""
    return None if placement.is_replicate() or placement.is_partial() else placement.dim


def _run_twin_steps(twin: Any, parameters: Sequence[nn.Parameter], gradients: Sequence[Sequence[torch.Tensor]]) -> None:
    for step in range(STEPS):
        for parameter, rows in zip(parameters, gradients, strict=True):
            parameter.grad = rows[step]
        twin.step()


def _needs_whole(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: DTensor, shape: Sequence[int]
) -> bool:
    """Return whether a step on a divided parameter has another result than on the parameter in one piece."""
    dtype = torch.float64
    for dtype in (torch.float64, like.dtype):
        values, *gradients = _draw_trial_tensors(like, shape, 1, dtype=dtype)
        whole = nn.Parameter(values.clone())
        with suppress(Exception):
            _run_twin_steps(_build_twin_optimizer(optimizer, group, [whole]), [whole], [gradients])
            break
    else:  # the optimizer cannot be tried alone
        return False
    divided = nn.Parameter(_shard_whole_tensor(values, like))
    try:
        _run_twin_steps(
            _build_twin_optimizer(optimizer, group, [divided]),
            [divided],
            [[_shard_whole_tensor(row, like) for row in gradients]],
        )
        found = cast(DTensor, divided.detach()).full_tensor()
    except Exception:  # noqa: BLE001  # torch's words for an operation that DTensors do not have
        return True
    limit = TOLERANCE if dtype == torch.float64 else 1e-4
    moved = torch.linalg.vector_norm(whole.detach() - values)
    return not bool(torch.linalg.vector_norm(found - whole.detach()) <= limit * moved.clamp(min=1e-12))


def _require_single(optimizer: torch.optim.Optimizer, like: Any) -> None:
    """Refuse an optimizer that cannot train its parameters one after another.

    Raises:
        PlanError: the step of a parameter depends on others, or the optimizer has a counter for all of them.
    """
    group = next(group for group in optimizer.param_groups if any(one is like for one in group["params"]))
    rows = [_draw_trial_tensors(like, _build_trial_shapes(like)[0], seed, dtype=torch.float64) for seed in (1, 2)]
    together = [nn.Parameter(values.clone()) for values, *_ in rows]
    single = [nn.Parameter(values.clone()) for values, *_ in rows]
    twin = _build_twin_optimizer(optimizer, group, together)
    before = repr({key: value for key, value in twin.param_groups[0].items() if key != "params"})
    try:
        _run_twin_steps(twin, together, [gradients for _, *gradients in rows])
        for parameter, (_, *gradients) in zip(single, rows, strict=True):
            _run_twin_steps(_build_twin_optimizer(optimizer, group, [parameter]), [parameter], [gradients])
    except Exception:  # noqa: BLE001  # which then has no fp64
        return
    counts = before != repr({key: value for key, value in twin.param_groups[0].items() if key != "params"})
    if counts or not all(torch.allclose(one, other) for one, other in zip(together, single, strict=True)):
        raise PlanError(
            f"{type(optimizer).__name__} uses whole matrices, and its step for one depends on the others: with "
            "divided parameters it would give other results",
            where="train.strategy",
            hint="use ddp, which has all of them on each worker",
        )


# -- step -------------------------------------------------------------------------------------------------------------


def _step_whole_matrices(
    optimizer: torch.optim.Optimizer,
    kind: type[torch.optim.Optimizer],
    dependent: set[nn.Parameter],
    closure: Callable[[], float] | None,
) -> float | None:
    """Make the step of parameters that may stay divided, and then of the others matrix by matrix; collective."""
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    loss = None
    try:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = [parameter for parameter in parameters if parameter not in dependent]
        if closure is not None or any(group["params"] for group in groups):
            loss = kind.step(optimizer, closure)
    finally:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters
    with torch.no_grad():
        for some in _group_matrices_by_mesh(optimizer, dependent):
            for together in _split_into_rounds(some):
                wholes = [one.gather(optimizer) for one in together]
                for one, whole in zip(together, wholes, strict=True):
                    if whole is not None:
                        one.train(optimizer, kind, whole)
                for one, whole in zip(together, wholes, strict=True):
                    one.scatter_whole(optimizer, whole)
    return loss


@dataclass(slots=True)
class _WholeParameter:
    """A parameter in one piece, on the worker that computes its step."""

    parameter: nn.Parameter
    state: State


def _group_matrices_by_mesh(
    optimizer: torch.optim.Optimizer, dependent: set[nn.Parameter]
) -> list[list[_DividedParameter]]:
    found: dict[object, list[_DividedParameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in dependent and parameter.grad is not None:
                matrix = _DividedParameter(group, parameter)
                found.setdefault((parameter.device_mesh, matrix.axis), []).append(matrix)
    for some in found.values():
        if some[0].axis is not None:
            for matrix, owner in zip(
                some, assign_parameter_owners([one.numel for one in some], some[0].workers), strict=True
            ):
                matrix.owner = owner
    return list(found.values())


def _split_into_rounds(some: list[_DividedParameter]) -> list[list[_DividedParameter]]:
    """Return the matrices in rounds of at most one for each worker."""
    if some[0].axis is None:
        return [[one] for one in some]
    by_owner: dict[int, list[_DividedParameter]] = {}
    for one in some:
        by_owner.setdefault(one.owner, []).append(one)
    longest = max(map(len, by_owner.values()))
    return [[own[turn] for own in by_owner.values() if turn < len(own)] for turn in range(longest)]


class _DividedParameter:
    """A divided parameter, with the methods that gather it and divide it once more."""

    def __init__(self, group: dict[str, Any], parameter: DTensor) -> None:
        self.group, self.parameter, self.owner = group, parameter, 0
        sharded = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        simple = len(sharded) == 1 and type(parameter.placements[sharded[0]]).__name__ == "Shard"
        first = simple and cast(Any, parameter.placements[sharded[0]]).dim == 0
        self.axis: int | None = sharded[0] if first else None
        """Axis of the mesh that divides rows. None: the parameter is divided otherwise, and every worker computes the
        step."""
        self.numel = parameter.numel()
        mesh = parameter.device_mesh
        self.workers = mesh.size(self.axis) if self.axis is not None else 1
        self.device = (
            torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else None
        )

    @property
    def _axis_group(self) -> dist.ProcessGroup:
        return self.parameter.device_mesh.get_group(self.axis)

    @property
    def _is_owner(self) -> bool:
        return self.axis is None or self._axis_group.rank() == self.owner

    def gather(self, optimizer: torch.optim.Optimizer) -> _WholeParameter | None:
        """Return the parameter with its gradient and state on its owner; None elsewhere."""
        parameter = self.parameter
        values, gradient = (
            self._gather_whole_matrix(cast(DTensor, parameter.detach())),
            self._gather_whole_matrix(cast(DTensor, parameter.grad)),
        )
        held = optimizer.state.get(parameter, {})
        state = {
            name: self._gather_whole_matrix(value) if isinstance(value, DTensor) else value
            for name, value in held.items()
        }
        if values is None or gradient is None:
            return None
        whole = nn.Parameter(values)
        whole.grad = gradient
        return _WholeParameter(whole, state)

    def train(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], whole: _WholeParameter
    ) -> None:
        """Run the optimizer's own step for this parameter alone."""
        groups, state = optimizer.param_groups, optimizer.state
        try:
            optimizer.param_groups = [{**self.group, "params": [whole.parameter]}]
            optimizer.state = defaultdict(dict, {whole.parameter: whole.state})
            with torch.enable_grad():
                kind.step(optimizer)
            whole.state = dict(optimizer.state[whole.parameter])
        finally:
            optimizer.param_groups, optimizer.state = groups, state

    def scatter_whole(self, optimizer: torch.optim.Optimizer, whole: _WholeParameter | None) -> None:
        """Divide the parameter and its state once more; collective over the workers that have parts of it."""
        parameter = self.parameter
        parameter.to_local().copy_(
            self._scatter_whole_matrix(None if whole is None else whole.parameter.detach()).to_local()
        )
        state = optimizer.state[parameter]
        for name, (form, content) in self._agree_on_state_forms(whole, state).items():
            value = None if whole is None else whole.state[name]
            if form == "divided":
                state[name] = self._scatter_whole_matrix(value, content)
            elif form == "tensor":
                shape, dtype, on_cpu = content
                state[name] = self._broadcast_from_owner(value, shape, dtype, on_cpu=on_cpu)
            else:
                state[name] = content

    def _agree_on_state_forms(self, whole: _WholeParameter | None, state: State) -> dict[str, tuple[str, Any]]:
        """Return the names and forms of the state on all workers, and the values that are not tensors."""
        if self.axis is None:
            assert whole is not None  # noqa: S101  # for the type checker: every worker computes it
            return self._describe_state_forms(whole.state)
        known = self._describe_state_forms(state)
        if known and all(form != "value" for form, _ in known.values()):
            return known
        told = [self._describe_state_forms(whole.state) if whole is not None else None]
        dist.broadcast_object_list(told, group=self._axis_group, group_src=self.owner, device=self.device)
        return told[0] or {}

    def _describe_state_forms(self, state: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        forms: dict[str, tuple[str, Any]] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                forms[name] = ("value", value)
            elif value.shape == self.parameter.shape and value.dim():
                forms[name] = ("divided", value.dtype)
            else:
                forms[name] = ("tensor", (value.shape, value.dtype, value.device.type == "cpu"))
        return forms

    # -- exchange -----------------------------------------------------------------------------------------------------

    def _pad_worker_rows(self, part: torch.Tensor) -> torch.Tensor:
        """Return a worker's rows in a vector of the length of the longest one."""
        width = self.numel // self.parameter.shape[0]
        length = -(-self.parameter.shape[0] // self.workers) * width
        flat = part.reshape(-1).to(self.device or part.device)
        return nn.functional.pad(flat, (0, length - len(flat)))

    def _gather_whole_matrix(self, value: DTensor) -> torch.Tensor | None:
        if self.axis is None:
            return value.full_tensor()
        rows = self._pad_worker_rows(value.to_local())
        parts = [torch.empty_like(rows) for _ in range(self.workers)] if self._is_owner else None
        dist.gather(rows, parts, group=self._axis_group, group_dst=self.owner)
        return None if parts is None else torch.cat(parts)[: self.numel].view(self.parameter.shape)

    def _scatter_whole_matrix(self, whole: torch.Tensor | None, dtype: torch.dtype | None = None) -> DTensor:
        parameter, local = self.parameter, self.parameter.to_local()
        if self.axis is None:
            assert whole is not None  # noqa: S101  # for the type checker: every worker has it
            alike = [Replicate()] * parameter.device_mesh.ndim
            spread = DTensor.from_local(whole, parameter.device_mesh, alike, run_check=False)
            return spread.redistribute(placements=parameter.placements)
        own = self._pad_worker_rows(torch.empty_like(local, dtype=dtype))
        parts = None
        if whole is not None:
            chunks = list(whole.chunk(self.workers))
            chunks += [whole[:0]] * (self.workers - len(chunks))
            parts = [self._pad_worker_rows(chunk) for chunk in chunks]
        dist.scatter(own, parts, group=self._axis_group, group_src=self.owner)
        part = own[: local.numel()].view(local.shape).to(local.device)
        return DTensor.from_local(
            part.clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _broadcast_from_owner(
        self, value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, *, on_cpu: bool
    ) -> torch.Tensor:
        if self.axis is None:
            assert value is not None  # noqa: S101  # for the type checker: every worker has it
            return value
        device = self.device or torch.device("cpu")
        tensor = torch.empty(shape, dtype=dtype, device=device) if value is None else value.to(device).contiguous()
        dist.broadcast(tensor, group=self._axis_group, group_src=self.owner)
        return tensor.cpu() if on_cpu else tensor
