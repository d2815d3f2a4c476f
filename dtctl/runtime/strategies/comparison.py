"""Comparison of divided modules with the undivided ones before training, by their outputs and gradients.

The loss of a first batch shows little about a model: with a residual branch that begins at zero, it does not depend on
the branch. So each module is compared separately: a copy with random weights processes the inputs that the module had
in one forward pass, in one piece and divided. In fp64 rounding is far below any other difference. A module that rounds
to fewer bits inside, or does not support fp64, is compared with the tolerance of its own format.

The model itself is not touched: a copy shares no parameter, no buffer and no hook with it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dtctl.errors import DtctlError
from dtctl.runtime.randomness import preserve_rng_states

SEED: Final = 20200

TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest relative norm of a difference that rounding to a format explains."""
LOOSEST: Final = max(TOLERANCE.values())
OWN: Final = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, hooks and children, which are treated separately."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Arguments of a module in one forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModuleResult:
    """Results of a module for one call."""

    outputs: list[torch.Tensor]
    of_inputs: list[torch.Tensor | None]
    """Gradients of the arguments that are floating-point tensors."""
    of_parameters: dict[str, torch.Tensor | None]
    """Gradients of the parameters."""


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """Largest difference between two results."""

    share: float
    """Norm of the difference relative to the norm."""
    of: str
    """Name of the output or the gradient that differs."""
    is_rounding: bool = False
    """True if rounding explains it."""
    added_up: frozenset[str] = frozenset()
    """Parameters whose gradient is right after it is added up over the workers."""
    error: Exception | None = None
    """Exception that the code of the divided module raised."""

    def describe(self) -> str:
        """Return a description of the difference."""
        return f"the {self.of} differs by {self.share:.1e} of its size" if isfinite(self.share) else self.of


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """Calls of modules during one forward pass of the whole model."""

    calls: Mapping[str, ModuleCall]
    """Module name -> its call."""
    autocast: AbstractContextManager[Any] | None
    """Context that sets the number format of the run; None for fp32."""

    def compare(self, name: str, module: nn.Module) -> ModuleComparison:
        """Compute a recorded module in one piece, for comparisons."""
        return ModuleComparison(module, self.calls[name], self.autocast)


@contextmanager
def record_module_calls(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, ModuleCall]]:
    """Return a context that records the arguments of the first call of some modules."""
    calls: dict[str, ModuleCall] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in calls:
                kept = tree_map_only(torch.Tensor, lambda value: value.detach().clone(), (args, kwargs))
                calls[name] = ModuleCall(*kept)

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True, prepend=True)
        for name in names
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def describe_module_kind(module: nn.Module) -> tuple[object, ...]:
    """Return the kind of a module, which is equal for modules with the same function of parameters and arguments.

    It consists of code, shapes, plain attributes, shared other objects, functions of all modules inside, and the sums
    of their buffers. Only one module of each kind has to be compared. The blocks of a model are usually of one kind,
    unless they store their number or have an object of their own.
    """
    rows: list[object] = []
    for name, part in module.named_modules():
        kind = type(part)
        # The class itself is not used: each block that is recomputed has its own class.
        code = getattr(kind.forward, "__code__", None)
        attributes = tuple(
            (key, _build_comparable_value(value)) for key, value in sorted(vars(part).items()) if key not in OWN
        )
        rows.append((name, kind.__module__, kind.__qualname__, code, attributes))
        hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
        rows.append(tuple(getattr(hook, "__code__", type(hook)) for hook in hooks))
    rows += [(name, value.shape, value.dtype) for name, value in module.named_parameters()]
    rows += [(name, value.shape, value.dtype, float(value.double().sum())) for name, value in module.named_buffers()]
    return tuple(rows)


def _build_comparable_value(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_build_comparable_value, value))
    if isinstance(value, dict):
        return tuple((_build_comparable_value(key), _build_comparable_value(held)) for key, held in value.items())
    known = bool | int | float | str | bytes | torch.dtype | types.FunctionType | types.BuiltinFunctionType | None
    return value if isinstance(value, known) else (type(value), id(value))


def copy_with_random_weights(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a module of the same structure with random weights, the same on all workers.

    Args:
        module: module that stays as it is; all of its attributes except parameters, buffers, hooks and children are
            shared with the copy.
        dtype: number format of floating-point parameters and buffers. None: their own.
    """
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}
    generators: dict[torch.device, torch.Generator] = {}

    def drawn(value: torch.Tensor) -> torch.Tensor:
        generator = generators.setdefault(value.device, torch.Generator(value.device).manual_seed(SEED))
        # Scaled so that activations keep the size of the inputs, and no scale, gate or bias is zero.
        if value.dim() < 2:
            return value.uniform_(0.5, 1.5, generator=generator)
        return value.normal_(0.0, (value.numel() / value.shape[0]) ** -0.5, generator=generator)

    def tensor(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in tensors:
            new = _cast_floating_tensor(value.detach(), dtype).clone()
            if isinstance(value, nn.Parameter) and value.is_floating_point():
                new = nn.Parameter(drawn(new))
            tensors[id(value)] = new
        return tensors[id(value)]

    def twin(original: nn.Module) -> nn.Module:
        if id(original) in modules:
            return modules[id(original)]
        new = modules[id(original)] = object.__new__(type(original))
        held = {
            name: value.copy() if name.startswith("_") and isinstance(value, dict) else value
            for name, value in original.__dict__.items()
            if name != "_compiled_call_impl"
        }
        for kind in ("_parameters", "_buffers"):
            held[kind] = {name: value if value is None else tensor(value) for name, value in held[kind].items()}
        held["_modules"] = {name: child if child is None else twin(child) for name, child in held["_modules"].items()}
        new.__dict__.update(held)
        return new

    return twin(module)


@contextmanager
def set_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Return a context in which a module is in evaluation mode, but gradients can be computed.

    cuDNN computes gradients of a recurrent layer only in training mode, so such layers stay in it, without dropout.
    """
    modes = [(part, part.training) for part in module.modules()]
    recurrent = [(layer, layer.dropout) for layer, _ in modes if isinstance(layer, nn.RNNBase)]
    module.eval()
    for layer, _ in recurrent:
        layer.training, layer.dropout = True, 0.0
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for layer, dropout in recurrent:
            layer.dropout = dropout


def compute_outputs_and_gradients(
    module: nn.Module,
    call: ModuleCall,
    dtype: torch.dtype | None,
    context: AbstractContextManager[Any],
    are_near: Callable[[list[torch.Tensor]], bool] = lambda _: True,
) -> ModuleResult:
    """Call a copy of a module, and run a backward pass from its outputs along fixed directions.

    Args:
        module: the copy.
        call: the arguments.
        dtype: format to which floating-point arguments are converted. None: they stay as they are.
        context: context in which the module is called.
        are_near: decides from the outputs whether gradients are worth computing.
    """
    leaves, arguments = _prepare_arguments(call, dtype)
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    floats = [leaf for leaf in leaves if _is_float(leaf)]
    device = next((value.device for value in (*parameters.values(), *floats)), torch.device("cpu"))
    with set_evaluation_mode(module), preserve_rng_states(device, SEED), torch.enable_grad():
        with context:
            results = tree_flatten(module(*arguments.args, **arguments.kwargs))[0]
        outputs = [put_together(value) for value in results if _is_float(value)]
        ways = [output for output in outputs if output.requires_grad] if are_near(outputs) else []
        directions = [torch.randn_like(output) for output in ways]
        wanted = [*floats, *parameters.values()]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if ways:
            found = torch.autograd.grad(ways, wanted, directions, allow_unused=True)
    found = [None if value is None else put_together(value.detach()) for value in found]
    return ModuleResult(
        outputs=[output.detach() for output in outputs],
        of_inputs=list(found[: len(floats)]),
        of_parameters=dict(zip(parameters, found[len(floats) :], strict=True)),
    )


def _prepare_arguments(call: ModuleCall, dtype: torch.dtype | None) -> tuple[list[Any], ModuleCall]:
    """Return the leaves of a call's arguments, which require gradients, and arguments computed from them."""
    values, shape = tree_flatten((call.args, call.kwargs))
    leaves = [
        _cast_floating_tensor(value, dtype).clone().requires_grad_() if _is_float(value) else value for value in values
    ]
    # Code may change its arguments in place, which autograd forbids for leaves.
    return leaves, ModuleCall(*tree_unflatten([leaf.clone() if _is_float(leaf) else leaf for leaf in leaves], shape))


class ModuleComparison:
    """A module in one piece, with which its divided copies are compared."""

    def __init__(self, module: nn.Module, call: ModuleCall, autocast: AbstractContextManager[Any] | None) -> None:
        """Compute the module in one piece.

        Args:
            module: module that stays as it is.
            call: the arguments.
            autocast: context that sets the number format of the run; None for fp32.

        Raises:
            Exception: the error that the module's code raises in its own number format.
        """
        self._module, self._call = module, call
        forms: list[tuple[torch.dtype | None, AbstractContextManager[Any]]] = [
            (torch.float64, nullcontext()), (None, nullcontext()), *([(None, autocast)] if autocast else [])
        ]  # fmt: skip
        for index, (dtype, context) in enumerate(forms):
            self._dtype, self._context = dtype, context
            try:
                self.whole = compute_outputs_and_gradients(
                    copy_with_random_weights(module, dtype), call, dtype, context
                )
                break
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the module's kernels support smaller formats only
                if index + 1 == len(forms):
                    raise

    @property
    def unused(self) -> set[str]:
        """Return the names of parameters that the call has not used."""
        return {name for name, value in self.whole.of_parameters.items() if value is None or not value.count_nonzero()}

    def is_dependent(self, source: str, target: str, degree: int) -> bool:
        """Return whether a matrix's first part of inputs depends on more than another one's first part of outputs.

        Args:
            source: inner module whose outputs are cut into parts along the last dim.
            target: inner module that has these parts as inputs.
            degree: number of parts.
        """
        module, seen = copy_with_random_weights(self._module, self._dtype), dict[str, torch.Tensor]()
        module.get_submodule(source).register_forward_hook(lambda _, __, output: seen.update(source=output))
        module.get_submodule(target).register_forward_pre_hook(lambda _, args: seen.update(target=args[0]))
        _, arguments = _prepare_arguments(self._call, self._dtype)
        device = next((value.device for value in module.parameters()), torch.device("cpu"))
        with set_evaluation_mode(module), preserve_rng_states(device, SEED), torch.enable_grad(), self._context:
            module(*arguments.args, **arguments.kwargs)
            if seen.keys() != {"source", "target"} or not seen["target"].requires_grad:
                return True
            part = seen["target"][..., : seen["target"].shape[-1] // degree]
            [found] = torch.autograd.grad(part, seen["source"], torch.randn_like(part), allow_unused=True)
        others = None if found is None else found[..., found.shape[-1] // degree :]
        return others is None or bool(others.count_nonzero())

    def compute_difference(
        self,
        divide: Callable[[nn.Module], object],
        group: dist.ProcessGroup,
        *,
        averaged: bool = False,
    ) -> ModuleDifference:
        """Compare a divided copy with the module in one piece; collective over a group of workers.

        Args:
            divide: changes a module in place into this worker's part of it.
            group: the workers.
            averaged: True if gradients must be averaged over the group to be right.

        Raises:
            DtctlError: the module cannot be divided in this way.
        """
        module = copy_with_random_weights(self._module, self._dtype)
        device = next((value.device for value in module.parameters()), torch.device("cpu"))
        far: list[ModuleDifference] = []

        def are_near(outputs: list[torch.Tensor]) -> bool:
            far.extend(one for one in self._output_differences(outputs, device, group) if one.share > LOOSEST)
            return not far

        try:
            divide(module)
            found = compute_outputs_and_gradients(module, self._call, self._dtype, self._context, are_near)
        except (DtctlError, torch.OutOfMemoryError):
            raise
        except Exception as exc:  # noqa: BLE001  # the module's code may raise any error for divided tensors
            text = str(exc).strip().partition("\n")[0]
            return ModuleDifference(float("inf"), f"{type(exc).__name__}: {text}", error=exc)
        if far:
            return max(far, key=lambda one: one.share)
        own = {name for name, value in module.named_parameters() if not hasattr(value, "device_mesh") and not averaged}
        differences = self._compute_tensor_differences(found, own, device, group, averaged=averaged)
        limit = TOLERANCE[self._dtype or torch.float32]
        worst = max(differences, key=lambda one: one.share)
        if limit < worst.share <= LOOSEST:
            limit = TOLERANCE[self._find_narrowest_dtype()]
        added_up = frozenset(name for one in differences for name in one.added_up)
        return ModuleDifference(worst.share, worst.of, worst.share <= limit, added_up)

    def _compute_tensor_differences(
        self, found: ModuleResult, own: set[str], device: torch.device, group: dist.ProcessGroup, *, averaged: bool
    ) -> list[ModuleDifference]:
        """Return the largest difference of each tensor over the group; the same list on all its workers."""
        whole = self.whole
        rows: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = []
        for index, gradients in enumerate(zip(whole.of_inputs, found.of_inputs, strict=True)):
            rows.append((f"gradient of argument {index}", *gradients))
        names = list(whole.of_parameters)
        rows += [(f"gradient of {name}", whole.of_parameters[name], found.of_parameters[name]) for name in names]
        # A gradient that is zero except for rounding, such as that of a bias of keys, is measured relative to the
        # others.
        least = (1e-3 if self._dtype else 1e-1) * max(
            (_compute_vector_norm(value) for _, value, _ in rows if value is not None), default=0.0
        )
        shares = []
        for _, one, other in rows:
            mean = _sum_over_group(one, other, group, divide_by=group.size()) if averaged else other
            shares.append(compute_relative_difference(one, mean, least))
        added = []
        for name, value in whole.of_parameters.items():
            part = found.of_parameters[name]
            added.append(
                compute_relative_difference(value, _sum_over_group(value, part, group) if name in own else part, least)
            )
        values = _largest_over([*shares, *added], device, group)
        differences = self._output_differences(found.outputs, device, group)
        for index, (text, _, _) in enumerate(rows):
            share, added_up = values[index], frozenset[str]()
            number = index - len(whole.of_inputs)
            if number >= 0 and names[number] in own and share > (summed := values[len(rows) + number]) * 10:
                share, added_up = summed, frozenset({names[number]})
            differences.append(ModuleDifference(share, text, added_up=added_up))
        return differences

    def _output_differences(
        self, outputs: list[torch.Tensor], device: torch.device, group: dist.ProcessGroup
    ) -> list[ModuleDifference]:
        """Return the largest difference of each output over the group; the same list on all its workers."""
        whole = self.whole.outputs
        # An output that exists on one side only cannot be compared.
        shares = [0.0 if len(whole) == len(outputs) else inf]
        shares += [
            compute_relative_difference(one, other.detach(), 0.0) for one, other in zip(whole, outputs, strict=False)
        ]
        texts = ["number of outputs", "output", *(f"output {index}" for index in range(1, len(whole)))]
        values = _largest_over(shares + [0.0] * (1 + len(whole) - len(shares)), device, group)
        return [ModuleDifference(share, text) for share, text in zip(values, texts, strict=False)]

    def _find_narrowest_dtype(self) -> torch.dtype:
        """Return the narrowest number format that the module in one piece uses."""
        module = copy_with_random_weights(self._module, self._dtype)
        with _DtypeRecorder() as formats:
            compute_outputs_and_gradients(module, self._call, self._dtype, self._context)
        return min(formats.seen, key=lambda dtype: dtype.itemsize, default=torch.float64)


class _DtypeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of the floating-point formats of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {value.dtype for value in tree_flatten(result)[0] if _is_float(value) and value.dtype in TOLERANCE}
        return result


def _largest_over(values: list[float], device: torch.device, group: dist.ProcessGroup) -> list[float]:
    everyone = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX, group=group)
    return everyone.tolist()


def _sum_over_group(
    like: torch.Tensor | None, value: torch.Tensor | None, group: dist.ProcessGroup, *, divide_by: int = 1
) -> torch.Tensor | None:
    """Return the sum over a group, if the module in one piece has a gradient."""
    if like is None:
        return value
    total = torch.zeros_like(like) if value is None else value.clone()
    dist.all_reduce(total, group=group)
    return total / divide_by


def find_largest_difference(
    whole: Mapping[str, torch.Tensor], divided: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """Return the largest relative difference between gradients of the same name, and that name."""
    least = 1e-1 * max(map(_compute_vector_norm, whole.values()), default=0.0)
    shares = {
        name: compute_relative_difference(whole.get(name), divided.get(name), least) for name in {**whole, **divided}
    }
    return max(((inf if isnan(share) else share, name) for name, share in shares.items()), default=(0.0, ""))


def compute_relative_difference(one: torch.Tensor | None, other: torch.Tensor | None, least: float) -> float:
    """Return the norm of a difference relative to the norm, or to `least` if that is larger; None counts as zero."""
    if one is None and other is None:
        return 0.0
    if one is None or other is None:
        held = other if one is None else one
        return 1.0 if held is not None and _compute_vector_norm(held) > 1e-6 * least else 0.0
    if one.shape != other.shape:
        return float("inf")
    away, size = _compute_vector_norm(one - other), _compute_vector_norm(one)
    if isfinite(away) and isfinite(size):
        return _compute_ratio(away, max(size, least))
    # Values that are not finite must be equal, and the others are compared.
    both = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(one[~both].nan_to_num(), other[~both].nan_to_num()):
        return float("inf")
    return _compute_ratio(_compute_vector_norm(one[both] - other[both]), max(_compute_vector_norm(one[both]), least))


def _compute_ratio(away: float, size: float) -> float:
    if not size:
        return 1.0 if away else 0.0
    return away / size


def _compute_vector_norm(value: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(value if value.itemsize > 2 else value.float()))


def put_together(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor, divided or not, in one piece; collective over the workers that have its parts."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast_floating_tensor(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(dtype.to_complex() if value.is_complex() else dtype)
