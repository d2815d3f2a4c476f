"""Modules and optimizers: parameters, buffers, hooks, and what users have put there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dtctl.runtime.program.code import class_name, function_name, is_own_code
from dtctl.runtime.program.containers import ContainerWalk
from dtctl.runtime.program.kinds import CONTAINERS, FUNCTIONS, PLAIN, is_value
from dtctl.runtime.program.marks import text_of
from dtctl.runtime.program.walk import StateEntry, refuse, set_attribute

OPTIMIZER: Final = "optimizer"
"""The root that is the optimizer of the training."""

_MODULE_KEYS: Final = frozenset(nn.Module().__dict__)

_WEIGHT: Final = torch.zeros(1, requires_grad=True)

_OPTIMIZER_KEYS: Final = frozenset(torch.optim.AdamW([_WEIGHT], fused=True).__dict__) | {"_opt_called", "_step_count"}
"""What torch's own optimizers have beside groups and state; the last two are put there by learning rate schedulers."""


class ModuleWalk(ContainerWalk):
    """Below modules and optimizers."""

    def _module(self, module: nn.Module, path: str, depth: int) -> None:
        self._note(f"{path} (class)", lambda: class_name(module))
        self._leaf(f"{path} (class)", class_name(module), refuse)
        self._leaf(f"{path}.training", module.training, functools.partial(setattr, module, "training"))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if not parameter.requires_grad:
                    self._note(f"{path}.{name} (frozen)", lambda: "frozen")
                put = functools.partial(setattr, parameter, "requires_grad")
                self._leaf(f"{path}.{name}.requires_grad", parameter.requires_grad, put)
                if id(parameter) in self._known and not hasattr(parameter, "device_mesh"):
                    self._public(parameter, f"{path}.{name}", depth)
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    self.visit(tensor, f"{path}.{name}", functools.partial(table.__setitem__, name), depth + 1)
        self._hooks(module, path, depth)
        # What torch's own modules have in private is theirs: LSTM keeps its weights once more.
        theirs = not any(is_own_code(kind.__module__) for kind in type(module).__mro__)
        own = {
            name: value
            for name, value in vars(module).items()
            if name not in _MODULE_KEYS and not (theirs and name.startswith("_"))
        }
        self._attributes(own, path, functools.partial(set_attribute, module), depth)
        if isinstance(module, torch.jit.ScriptModule):
            self._scripted(module, path, depth)
        self._class_attributes(module, path, depth)
        for name, child in module._modules.items():
            if child is not None and self._first_time(child, f"{path}.{name}"):
                self._module(child, f"{path}.{name}", depth)

    def _scripted(self, module: torch.jit.ScriptModule, path: str, depth: int) -> None:
        """Attributes that TorchScript has, of which Python is given copies."""
        names = getattr(module, "_concrete_type").get_attributes().keys() - vars(module).keys()  # noqa: B009 # no stub
        for name in sorted(names):
            value, put = getattr(module, name), functools.partial(setattr, module, name)
            if isinstance(value, CONTAINERS):
                if is_value(value, self._stop()):
                    self._note(f"{path}.{name}", lambda: text_of(value)[:200])  # noqa: B023 # called at once
                    self.leaves.setdefault(f"{path}.{name}", StateEntry(value, put, copied=True))
                else:
                    self._tell(f"{path}.{name} is a container of TorchScript, which cannot be looked into")
            else:
                self.visit(value, f"{path}.{name}", put, depth + 1)

    def _hooks(self, module: nn.Module, path: str, depth: int) -> None:
        hooks = [
            hook
            for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
            for hook in (getattr(module, table, None) or {}).values()
        ]
        for parameter in module._parameters.values():
            hooks += (getattr(parameter, "_backward_hooks", None) or {}).values()
            hooks += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        # torch's own strategies work by hooks, too.
        own = [hook for hook in hooks if is_own_code(getattr(hook, "__module__", None) or type(hook).__module__)]
        if own:
            self._note(f"{path} (hooks)", lambda: ", ".join(map(function_name, own)))
        for number, hook in enumerate(own):
            self.visit(hook, f"{path}.hook{number}", refuse, depth + 1)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str, put: Callable[[Any], None], depth: int) -> None:
        own = {name: value for name, value in vars(optimizer).items() if name not in _OPTIMIZER_KEYS}
        if path != OPTIMIZER:  # one that something else has; that of the training has a part of its own in snapshots
            self._leaf(path, optimizer, put)
        else:
            self._note(f"{path} (class)", lambda: class_name(optimizer))
        for table in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            for number, hook in enumerate(getattr(optimizer, table, {}).values()):
                self.visit(hook, f"{path}.{table}{number}", refuse, depth + 1)
        for number, group in enumerate(optimizer.param_groups):  # numbers and tensors are in the optimizer's own part
            for name, value in list(group.items()):
                if name != "params" and not isinstance(value, (*PLAIN, *CONTAINERS, torch.Tensor, np.ndarray)):
                    put = functools.partial(group.__setitem__, name)
                    self.visit(value, f"{path}.param_groups[{number}].{name}", put, depth + 1)
        # A step function that torch has wrapped for its profiler, or a scheduler to count, is none of the user's.
        own = {name: value for name, value in own.items() if not isinstance(value, FUNCTIONS)}
        self._attributes(own, path, functools.partial(set_attribute, optimizer), depth)
        if is_own_code(type(optimizer).__module__):
            self._class_attributes(optimizer, path, depth)
