"""Tensors that stand in for those of a GPU, and a count of what dtctl and torch's Python would make the host wait for.

Everything is computed on the CPU. The model is said to be on `cuda:0`, and so is whatever is computed from it: dtctl,
when it asks such a tensor for its device, is told so and goes the way of GPUs, while torch is told the truth and works.
Two modes of torch see every call: one the operations below autograd, which tell what was computed from what, the other
the functions that Python calls. Counted are reading a value (`item`, `tolist`, `float`, `bool`, `cpu`, shapes that
depend on values), and copies to the device from memory that is not page-locked. What torch's C++ does by itself, such
as DDP's reducer, is not seen here; on a GPU `torch.cuda.set_sync_debug_mode` sees it.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

DEVICE: Final = torch.device("cuda", 0)
READS: Final = (
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "__bool__", "__float__", "__int__"),
    *("__index__", "is_nonzero", "equal", "allclose"),
)
"""Functions of torch that return when the device has computed what they read, by the last part of their name."""
MAKE: Final = ("tensor", "as_tensor", "asarray", "from_numpy")
"""Functions that make a tensor of the host's values, and so copy from pageable memory if it is to be on a device."""


class OnDevice:
    """Which storages are said to be on the device, or page-locked."""

    def __init__(self) -> None:
        self._drop_overflow_choices: dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Say so of a tensor's storage from now on."""
        storage = _storage(tensor)
        if storage is not None:  # a weak reference keeps its address from being used again
            self._drop_overflow_choices.setdefault(storage._cdata, StorageWeakRef(storage))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self._drop_overflow_choices


def _storage(tensor: torch.Tensor) -> Any:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if getattr(local, "wait", None) is not None and hasattr(local, "elem"):  # of a collective under way
        local = local.elem
    try:
        return local.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


class _Spread(TorchDispatchMode):
    """What is computed from what is on the device is there, too."""

    def __init__(self, device: OnDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(one, torch.Tensor) and one in self._device for one in tree_iter((args, kwargs))):
            for one in tree_iter(found):
                if isinstance(one, torch.Tensor) and func is not torch.ops.aten._local_scalar_dense.default:
                    self._device.add(one)
        return found


class _Told(TorchFunctionMode):
    """Tells dtctl of a device, and notes who would wait for it."""

    def __init__(self, device: OnDevice, note: Callable[[str], None]) -> None:
        super().__init__()
        self._device, self._locked, self._note = device, OnDevice(), note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in ("device.__get__", "is_cuda.__get__", "is_cpu.__get__") and first is not None:
            return self._asked(func, name, first, args, kwargs)
        last = name.rpartition(".")[2]
        if last == "pin_memory" and first is not None:
            copy = first.clone()
            self._locked.add(copy)
            return copy
        if last == "is_pinned" and first is not None:
            return first in self._locked
        to_device = any(_is_device(one) for one in tree_iter((args, kwargs)))
        if to_device:
            return self._bring(func, last, args, kwargs)
        if first is not None and first in self._device:
            # torch, which knows the truth, means the tensor's own device when it says `cpu`.
            off = last == "to" and _by_dtctl() and any(_is_host(one) for one in tree_iter((args[1:], kwargs)))
            if off or last in READS:
                self._note("cpu" if off else last)
            with contextlib.ExitStack() as stack:
                if off or last == "cpu":
                    stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
                    return func(*args, **kwargs).detach().clone()
        return func(*args, **kwargs)

    def _asked(self, func: Any, name: str, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        if tensor in self._device and _by_dtctl():
            return {"device.__get__": DEVICE, "is_cuda.__get__": True, "is_cpu.__get__": False}[name]
        return func(*args, **kwargs)

    def _bring(self, func: Any, last: str, args: Any, kwargs: Any) -> Any:
        """A call that says `cuda`: the same on the CPU, and its result is on the device."""
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if last in MAKE and not (source is not None and source in self._device):
            self._note(f"pageable copy by {last}")
        elif last == "to" and source is not None and source not in self._device and source not in self._locked:
            self._note("pageable copy by to")
        args, kwargs = tree_map_only(torch.device, _host, (args, kwargs))
        found = func(*args, **kwargs)
        if last == "to" and found is source and source not in self._device:
            found = source.clone()
        for one in tree_iter(found):
            if isinstance(one, torch.Tensor):
                self._device.add(one)
        return found


def _name(func: Any) -> str:
    name = resolve_name(func)
    if name is None:
        name = getattr(func, "__qualname__", "") or getattr(func, "__name__", "")
    if getattr(func, "__name__", "") == "__get__":
        owner = getattr(func, "__self__", None)
        return f"{getattr(owner, '__name__', '')}.__get__"
    return str(name)


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == DEVICE.type


def _is_host(value: object) -> bool:
    return value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu")


def _host(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == DEVICE.type else device


def _by_dtctl() -> bool:
    """Whether the Python line that asked is dtctl's own, and not torch's."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    # torch's own frames in between belong to torch: only the caller counts.
    return frame is not None and frame.f_globals.get("__name__", "").startswith("dtctl.")


def _place() -> str:
    """The innermost line of dtctl, or of torch if there is none: who is to be mended."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("dtctl."):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class Waits:
    """What would have waited for the device, while it was counted.

    Attributes:
        found: `what at where` -> how often.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.counting = False

    def note(self, what: str) -> None:
        """One more."""
        if self.counting:
            self.found[f"{what} at {_place()}"] += 1


@contextmanager
def stand_in(*modules: torch.nn.Module) -> Iterator[Waits]:
    """Let models stand on a device that is not there; `Waits.counting` says when to count."""
    device, waits = OnDevice(), Waits()
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            device.add(tensor)
    with ExitStack() as stack:
        for target, name, value in _replaced():
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(_Told(device, waits.note))
        stack.enter_context(_Spread(device))
        yield waits


def _replaced() -> Iterator[tuple[Any, str, Any]]:
    """What asks for the driver itself."""
    from torch.distributed import device_mesh

    from dtctl.runtime.strategies import ddp
    from dtctl.runtime.telemetry import meter

    yield meter, "build_step_clock", lambda _: meter.HostClock()
    yield meter, "measure_worker_memory", lambda _: {}
    yield meter.ModelFlopsUtilization, "__init__", lambda self, *_: setattr(self, "_share", None)
    yield torch.cuda, "set_device", lambda _: None
    yield torch.cuda, "get_device_name", lambda _=None: "stand-in"
    yield torch.cuda, "get_device_properties", lambda _=None: SimpleNamespace(total_memory=1 << 34, name="stand-in")
    yield torch.cuda.nccl, "version", lambda: (0, 0, 0)
    yield torch.cuda, "get_rng_state", lambda _=None: torch.get_rng_state()
    yield torch.cuda, "set_rng_state", lambda *_: None
    wrapped = ddp.TransparentDDP

    class OnHost(wrapped):  # type: ignore[misc,valid-type]
        def __init__(self, module: Any, *, device_ids: Any = None, **options: Any) -> None:  # noqa: ARG002
            super().__init__(module, **options)

    yield ddp, "TransparentDDP", OnHost
    made = device_mesh.init_device_mesh
    yield device_mesh, "init_device_mesh", lambda _, *shape, **names: made("cpu", *shape, **names)


def steps_of(
    train: Callable[[Callable[[int], None]], object], waits: Waits, *, first: int, last: int
) -> Mapping[str, int]:
    """Count between two steps of a training, which is left after the second.

    Args:
        train: runs it, and calls what it is given after each step, with the steps done.
        waits: of `stand_in`.
        first: step after which counting begins, when all that happens once is through.
        last: step after which it ends.
    """

    class Enough(Exception):
        pass

    def after(step: int) -> None:
        waits.counting = step >= first
        if step >= last:
            waits.counting = False
            raise Enough

    with contextlib.suppress(Enough):
        train(after)
    return dict(waits.found)
