"""Weights that are not trained, which snapshots may leave out (`train.snapshot.trained_only`).

A resume has them from the program, as the first attempt had: a snapshot of an adapter (LoRA) has the size of the
adapter. A sum of their bits is stored with the snapshot, and a resume with other weights is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime.bits import sum_tensors
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import state_sum
from dtctl.runtime.snapshot.format.pieces import find_buffers
from dtctl.runtime.snapshot.json_collectives import gather_json

FACT: Final = "frozen"
"""Key in a manifest: the names that the snapshot leaves out, and the sum of their bits."""


class FrozenWeights:
    """Parameters of a model that require no gradient and keep their bits while the program trains."""

    def __init__(self, model: nn.Module, worker: Worker) -> None:
        """Begin with no weights; `record` finds them.

        Args:
            model: as this worker has it.
            worker: this worker.
        """
        self._model, self._worker = model, worker
        self._bits: dict[str, int] = {}
        self._changed: set[str] = set()

    def _sum_bits(self) -> dict[str, int]:
        """Return the sum of the bits of each frozen weight that this worker has."""
        named = self._model.named_parameters(remove_duplicate=False)
        frozen = {name: parameter.detach() for name, parameter in named if not parameter.requires_grad}
        return {
            name: sum_tensors({"weight": weight.to_local() if hasattr(weight, "to_local") else weight})
            for name, weight in frozen.items()
        }

    def record(self) -> None:
        """Record the weights that are frozen when training begins, or continues with other tensors."""
        now = self._sum_bits()
        self._changed |= {name for name, bits in self._bits.items() if name in now and now[name] != bits}
        self._bits = {name: bits for name, bits in now.items() if name not in self._changed}

    def build_fact(self) -> dict[str, Any]:
        """Return what a snapshot stores about the weights that it leaves out, JSON; collective over all workers.

        All bits are compared: a program may write a weight by way of `data`, or a single row of it.
        """
        now = self._sum_bits()
        changed = [name for name, bits in self._bits.items() if now.get(name) != bits]
        rows = gather_json([sorted(self._bits), changed], self._worker)
        names = sorted({name for own, _ in rows for name in own} - {name for _, lost in rows for name in lost})
        return {"names": names, "sum": self._sum(names)}

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse weights that are not those of the program which made a snapshot; collective over all workers.

        Args:
            facts: of the snapshot.

        Raises:
            SnapshotError: the weights that the snapshot leaves out have other bits here; on every worker.
        """
        stored = facts.get(FACT)
        if stored is not None and self._sum(stored["names"]) != stored["sum"]:
            raise SnapshotError(
                f"the snapshot has the trained weights alone, and the {len(stored['names'])} frozen ones that it was "
                "made with have other values now",
                where="the model",
                hint="load the weights that the run began with before the training begins, or start over with another "
                "`train.snapshot.dir`",
            )

    def _sum(self, names: Collection[str]) -> str:
        own = dict(self._model.state_dict())
        tree = {"model": {name: own[name] for name in names if name in own}}
        return state_sum.format_sum(state_sum.sum_state(tree, self._worker, find_buffers(self._model)))


def list_left_out(facts: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights that a snapshot leaves out, by its facts."""
    names: list[str] = facts.get(FACT, {}).get("names", [])
    return names
