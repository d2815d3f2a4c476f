"""The state of a training, to a snapshot and back: model, optimizer, averages, random numbers, the program's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtctl.errors import SnapshotError, WorkerFailed
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.ema import Ema
from dtctl.runtime.exactness import randomness
from dtctl.runtime.exactness.account import EVERYONE, Account
from dtctl.runtime.exactness.stateful import name_some
from dtctl.runtime.snapshot import state
from dtctl.runtime.snapshot.gather import gathered, gathered_optimizer
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.runtime.strategies import Strategy


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """State that a snapshot holds besides the counters of the loop."""

    model: nn.Module
    """Model of this worker."""
    optimizer: torch.optim.Optimizer
    configured: Any
    """Arguments that the optimizer was made with, by `snapshot.state.configured`."""
    strategy: Strategy
    ema: Ema | None
    worker: Worker
    account: Account
    seed: int
    """Seed of the training."""
    stream: int
    """Rank whose random numbers this worker draws."""
    elastic: bool
    """True if the program may keep nothing that depends on what its worker has seen."""

    def collect(self, *, in_pieces: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts of a snapshot, and facts about them; collective over all workers.

        Args:
            in_pieces: each worker gives what it has; else rank 0 gives all, and the others nothing.
        """
        everyone = randomness.gather(self.worker)
        local, lost = self._local(in_pieces=in_pieces)
        parts = self.own_parts() if in_pieces else self._whole()
        parts |= {"local": local} if local else {}
        if self.worker.is_first:
            parts["random"] = everyone
            self.account.look_at_code()
            parts["circumstances"] = {"detail": self.account.text}
        unkept = [f"{name_some(lost)} changes in training, and snapshots do not keep it"] if lost else []
        return parts, {
            "programs": self.account.checksums,
            "irreproducible": self.account.irreproducible + unkept,
            "late": [name for name in self.model.state_dict() if name not in self.account.names],
        }

    def load(
        self, parts: Mapping[str, Any], facts: Mapping[str, Any], *, step: int, held: dict[str, Any], going_back: bool
    ) -> list[str]:
        """Put back what `collect` returned.

        Args:
            parts: of a snapshot, as far as this worker needs them.
            facts: of the snapshot.
            step: of the snapshot.
            held: what the program had before a pass that was thrown away, by `ProgramState.hold`.
            going_back: whether this process has trained on since.

        Returns:
            The differences to the former state that this worker has found, a phrase each.
        """
        state.register_late(self.model, parts["model"], facts.get("late", ()))
        state.load_model(self.model, parts["model"], absent_keys=self.strategy.absent_keys)
        whole = not self.strategy.sharded_state
        differing = state.load_optimizer(
            self.model, self.optimizer, parts["optimizer"], whole=whole, configured=self.configured
        )
        if self.ema is not None:
            self.ema.load(parts.get("ema"), absent_keys=self.strategy.absent_keys)
        difference = self.strategy.load_state(parts.get("strategy", {}).get(str(self.worker.rank), {}))
        differing += [difference] if difference else []
        self.account.program.load(held)
        differing += self.account.load(parts, self.worker.rank, going_back=going_back)
        # Last, since all of the above may draw random numbers.
        mine = randomness.of_rank(parts["random"], self.stream)
        if mine is None:
            randomness.begin(self.seed, self.stream, step=step)
        else:
            randomness.restore(mine, self.worker.device)
        return differing

    def full_weights(self) -> dict[str, Any]:
        """Return the whole model's state on rank 0, whatever the strategy; empty elsewhere.

        Collective over all workers.
        """
        spread = self.strategy.sharded_state
        own = dict(self.model.state_dict()) if spread or self.worker.is_first else {}
        return (gathered(own, self.worker) or {}) if spread else own

    def _local(self, *, in_pieces: bool) -> tuple[dict[str, Any], list[str]]:
        """Return what the program keeps beside model and optimizer, once if all workers have the same; collective.

        Returns:
            What this worker gives to the snapshot, and the paths of what cannot be kept, on any.
        """
        worker = self.worker
        if self.elastic:
            self.account.require_elastic()
        mine, lost = self.account.local()
        groups = [
            {key: state.checksum_tree(value) for key, value in state.group_values(group).items()}
            if group["params"]
            else None
            for group in self.optimizer.param_groups
        ]
        reports = gathered_json([state.checksum_tree(mine) if mine else None, lost, groups], worker)
        _require_alike([rows for _, _, rows in reports], self.strategy.name)
        everywhere = list(dict.fromkeys(path for _, paths, _ in reports for path in paths))
        if all(digest is None for digest, _, _ in reports):
            return {}, everywhere
        if all(digest == reports[0][0] for digest, _, _ in reports):
            return ({EVERYONE: mine} if worker.is_first else {}), everywhere
        own = {str(worker.rank): mine}
        return (own if in_pieces else gathered(own, worker) or {}), everywhere

    def own_parts(self) -> dict[str, Any]:
        """Return what this worker has of the state; tensors are not copied."""
        tree = state.optimizer_tree(self.model, self.optimizer, self.configured)
        if any(True for _ in state.tensors(tree["groups"])):
            raise SnapshotError(
                "the optimizer has large tensors in param_groups, which workers cannot share the writing of",
                where="train.snapshot.layout",
                hint="use `layout: whole`",
            )
        parts: dict[str, Any] = {"model": dict(self.model.state_dict()), "optimizer": tree}
        if self.ema is not None:
            parts["ema"] = self.ema.state()
        if own := self.strategy.state():
            parts["strategy"] = {str(self.worker.rank): own}
        return parts

    def _whole(self) -> dict[str, Any]:
        """Return all there is, on rank 0, and nothing elsewhere; collective over all workers."""
        worker, spread, tree = self.worker, self.strategy.sharded_state, dict[str, Any]()
        if spread or worker.is_first:
            tree = state.optimizer_tree(self.model, self.optimizer, self.configured)
        parts: dict[str, Any] = {
            "model": self.full_weights(),
            "optimizer": gathered_optimizer(tree, worker) if spread else tree,
        }
        own = self.strategy.state()
        others = gathered({str(worker.rank): own}, worker) if own else None
        if self.ema is not None:
            average = self.ema.state()
            parts["ema"] = gathered(average, worker) if spread else average
        parts |= {"strategy": others} if others else {}
        return parts if worker.is_first else {}


def _require_alike(reports: list[list[dict[str, int] | None]], strategy: str) -> None:
    """Check that the counters of the optimizer's groups are the same on all workers, even if each has only a part.

    Raises:
        WorkerFailed: on every worker, if it is not.
    """
    if len({len(groups) for groups in reports}) > 1:  # stages of a pipeline, whose tensors lie on several meshes
        return
    for number, row in enumerate(zip(*reports, strict=True)):
        present = [values for values in row if values is not None]
        for key in present[0] if present else ():
            if len({values.get(key) for values in present}) > 1:
                raise WorkerFailed(
                    f"the workers' optimizers have diverged: param_groups[{number}] has another `{key}` on each",
                    where=f"train.strategy ({strategy})",
                    hint="an optimizer that counts over all parameters needs all of them on each worker: use ddp",
                )
