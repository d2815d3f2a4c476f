"""Search for the origin of a gradient that is not finite: the step, the workers, the parameters.

A check in every step would wait for the GPU each time. So steps only keep values that exist anyway: the loss, and the
norm if clipping needs it, as tensors that are not read until such a gradient is found. These values show the step, and
the workers whose loss was not finite. After the exchange all workers have the same gradients, which do not show the
worker. The next attempt finds the rest: it checks every step up to the one in which the gradient was found.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from dtctl import names
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot.json_collectives import gather_json

LONGEST: Final = 1024
"""Number of steps whose values are kept."""
SHOWN: Final = 4
"""Number of parameters that are named."""
LOOK_FILE: Final = "not-finite"
"""File in the run's folder on each node, with the step up to which the next attempt checks every step."""

Spoilt = Callable[[], list[str]]
"""Function that returns the names of parameters whose gradients are not finite on this worker."""


@dataclass(frozen=True, slots=True)
class NonFiniteOrigin:
    """Origin of the first gradient that was not finite."""

    step: int
    text: str
    """Description of the origin, as far as it is known."""


class LossHistory:
    """Losses and norms of the steps since the last good one."""

    def __init__(self, worker: Worker, spoilt: Spoilt, environ: Mapping[str, str] = os.environ) -> None:
        """Start without values; collective over all workers if the run was restarted.

        Args:
            worker: this worker.
            spoilt: called once, after a gradient of the last step was found that is not finite.
            environ: environment of the process, which names the run's folder and the attempt.
        """
        self._worker, self._spoilt = worker, spoilt
        self._losses: deque[tuple[int, torch.Tensor]] = deque(maxlen=LONGEST)
        self._norms: deque[tuple[int, torch.Tensor]] = deque(maxlen=LONGEST)
        self._good = -1
        folder = environ.get(names.RUN_DIR)
        self._file = Path(folder) / LOOK_FILE if folder else None
        self.watched = 0
        """Step up to which every step must be checked."""
        if environ.get(names.ATTEMPT, "0") != "0":
            self.watched = max(gather_json(_read_recorded_step(self._file), worker))

    def add_loss(self, step: int, loss: torch.Tensor) -> None:
        """Store this worker's share of the loss of a step."""
        self._losses.append((step, loss))

    def add_norm(self, step: int, norm: torch.Tensor) -> None:
        """Store the norm of the gradient of a step."""
        self._norms.append((step, norm))

    def clear(self, step: int) -> None:
        """Remove the values up to this step, which were all finite."""
        self._losses.clear()
        self._norms.clear()
        self._good = step

    def find_origin(self, step: int) -> NonFiniteOrigin:
        """Return the origin, given that the gradient of this step is not finite; collective over all workers."""
        if self._file is not None and self._worker.local_rank == 0:
            _write_recorded_step(self._file, step)
        mine = {
            "loss": _find_first_nonfinite_step(self._losses),
            "norm": _find_first_nonfinite_step(self._norms),
            "spoilt": self._spoilt(),
        }
        everyone = gather_json(mine, self._worker)
        bad = {rank: report["loss"] for rank, report in enumerate(everyone) if report["loss"]}
        began = min([*bad.values(), *(report["norm"] for report in everyone if report["norm"]), step])
        ranks = [rank for rank, first in bad.items() if first == began]
        steps_seen = {*(number for number, _ in self._norms), self._good, 0}
        if ranks and len(ranks) == self._worker.world_size and began - 1 not in steps_seen:
            text = (
                f"the loss of step {began} is the first that is not{_format_rank_suffix(ranks, everyone)}; "
                f"the gradient of step {began - 1}, which was not checked, may have corrupted the weights before"
            )
        elif ranks:
            text = f"the loss{_format_rank_suffix(ranks, everyone)} was not"
        else:
            where = "; the worker is not known, since gradients are shared" if self._worker.world_size > 1 else ""
            text = f"the loss was finite, so it appeared in the backward pass{where}"
        if began == step:
            spoilt_names = list(dict.fromkeys(name for report in everyone for name in report["spoilt"]))
            text += f"; not finite: {_format_parameter_names(spoilt_names)}" if spoilt_names else ""
        elif self._file is not None:
            text += "; if the run is started again, the parameters are named"
        return NonFiniteOrigin(began, text)


def find_nonfinite_gradients(model: nn.Module, groups: Sequence[Mapping[str, Iterable[torch.Tensor]]]) -> list[str]:
    """Return the parameters whose gradients are not finite here, with their group if there are several."""
    of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    names = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and not bool(torch.isfinite(getattr(gradient, "_local_tensor", gradient)).all()):
            group = f" (group {of[id(parameter)]})" if len(groups) > 1 and id(parameter) in of else ""
            names.append(name + group)
    return names


def _find_first_nonfinite_step(entries: Iterable[tuple[int, torch.Tensor]]) -> int:
    """Return the first step whose value is not finite; 0 if there is none."""
    entries = list(entries)
    if not entries:
        return 0
    values = torch.stack([torch.as_tensor(value).detach().reshape(()).double().cpu() for _, value in entries]).tolist()
    return next((step for (step, _), value in zip(entries, values, strict=True) if not math.isfinite(value)), 0)


def _format_rank_suffix(ranks: Sequence[int], everyone: Sequence[object]) -> str:
    if len(everyone) == 1:
        return ""
    if len(ranks) == len(everyone):
        return " on all workers"
    return f" of rank {', '.join(map(str, ranks))}"


def _format_parameter_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more parameters" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _read_recorded_step(file: Path | None) -> int:
    try:
        return int(file.read_text(encoding="ascii")) if file is not None else 0
    except (OSError, ValueError):
        return 0


def _write_recorded_step(file: Path, step: int) -> None:
    try:
        file.write_text(str(step), encoding="ascii")
    except OSError:
        return  # the disk may be full; without the file the next attempt just finds no more than this one
