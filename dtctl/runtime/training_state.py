"""State of a run in snapshots: model, optimizer, averages, random numbers, and the program's own objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from dtctl.errors import SnapshotError, WorkerFailed
from dtctl.runtime import randomness
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.ema import Ema
from dtctl.runtime.exactness.program_fingerprint import EVERYONE, ProgramFingerprint
from dtctl.runtime.exactness.stateful import name_some
from dtctl.runtime.frozen_weights import FACT, FrozenWeights, list_left_out
from dtctl.runtime.snapshot import state
from dtctl.runtime.snapshot.gather import gather_entries_on_first, gather_optimizer
from dtctl.runtime.snapshot.json_collectives import gather_json


class StateLayout(Protocol):
    """Layout of a model's state over the workers, as far as snapshots depend on it; a part of `Strategy`."""

    name: str
    sharded_state: bool
    absent_keys: Collection[str]

    def state(self) -> Mapping[str, Any]:
        """Return the state besides model and optimizer, as `Strategy.state` does."""

    def load_state(self, tree: Mapping[str, Any]) -> str | None:
        """Restore what `state` returned; return the reason if that is not exact, else None."""


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """State that a snapshot holds in addition to the counters of the loop."""

    model: nn.Module
    """Model of this worker."""
    optimizer: torch.optim.Optimizer
    configured: Any
    """Arguments that the optimizer was made with, from `snapshot.state.read_optimizer_settings`."""
    strategy: StateLayout
    ema: Ema | None
    worker: Worker
    account: ProgramFingerprint
    seed: int
    """Seed of the run."""
    stream: int
    """Rank whose random numbers this worker draws."""
    elastic: bool
    """True if the program may keep nothing that depends on what its worker has seen."""
    frozen: FrozenWeights | None = None
    """Weights that are left out of snapshots; None if snapshots have all."""

    def collect(self, *, in_pieces: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts of a snapshot, and facts about them; collective over all workers.

        Args:
            in_pieces: True if each worker returns its own pieces; else rank 0 returns everything, and the others
                nothing.
        """
        everyone = randomness.gather_rng_states(self.worker)
        local, lost = self._collect_local_state(in_pieces=in_pieces)
        about_frozen = {} if self.frozen is None else {FACT: self.frozen.build_fact()}
        left_out = list_left_out(about_frozen)
        parts = self.collect_own_parts(left_out) if in_pieces else self._gather_whole_state(left_out)
        parts |= {"local": local} if local else {}
        if self.worker.is_first:
            parts["random"] = everyone
            parts["circumstances"] = {"detail": self.account.build_facts_text()}
        unkept = [f"{name_some(lost)} changes in training, and snapshots do not keep it"] if lost else []
        return parts, {
            "programs": self.account.checksums,
            "irreproducible": self.account.irreproducible + unkept,
            "late": [name for name in self.model.state_dict() if name not in self.account.names],
            **about_frozen,
        }

    def load(
        self, parts: Mapping[str, Any], facts: Mapping[str, Any], *, step: int, held: dict[str, Any], going_back: bool
    ) -> list[str]:
        """Restore what `collect` returned.

        Args:
            parts: parts of a snapshot that this worker needs.
            facts: facts of the snapshot.
            step: step of the snapshot.
            held: state of the program's objects before the discarded pass, by `StatefulObjects.copy_states`.
            going_back: True if this process made the snapshot and has trained on since.

        Returns:
            Differences from the former state that this worker has found, a phrase each.
        """
        state.register_late(self.model, parts["model"], facts.get("late", ()))
        left_out = list_left_out(facts)
        state.load_model(self.model, parts["model"], absent_keys=self.strategy.absent_keys, left_out=left_out)
        if left_out:
            FrozenWeights(self.model, self.worker).require_same(facts)
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
        # Random states come last, since the calls above may draw random numbers.
        mine = randomness.select_rank_state(parts["random"], self.stream)
        if mine is None:
            randomness.seed_worker_generators(self.seed, self.stream, step=step)
        else:
            randomness.restore_rng_states(mine, self.worker.device)
        return differing

    def full_weights(self) -> dict[str, Any]:
        """Return the whole model's state on rank 0, with any strategy; empty elsewhere.

        Collective over all workers.
        """
        return self._gather_weights(())

    def _gather_weights(self, left_out: Collection[str]) -> dict[str, Any]:
        spread = self.strategy.sharded_state
        own = _without(self.model.state_dict(), left_out) if spread or self.worker.is_first else {}
        return (gather_entries_on_first(own, self.worker) or {}) if spread else own

    def _collect_local_state(self, *, in_pieces: bool) -> tuple[dict[str, Any], list[str]]:
        """Return the program's own state apart from model and optimizer, once if all workers have the same; collective.

        Returns:
            This worker's share of the snapshot, and the paths of what any worker cannot keep.
        """
        worker = self.worker
        if self.elastic:
            self.account.require_elastic()
        mine, lost = self.account.collect_program_state()
        groups = [
            {key: state.checksum_tree(value) for key, value in state.group_values(group).items()}
            if group["params"]
            else None
            for group in self.optimizer.param_groups
        ]
        reports = gather_json([state.checksum_tree(mine) if mine else None, lost, groups], worker)
        _require_alike([rows for _, _, rows in reports], self.strategy.name)
        everywhere = list(dict.fromkeys(path for _, paths, _ in reports for path in paths))
        if all(digest is None for digest, _, _ in reports):
            return {}, everywhere
        if all(digest == reports[0][0] for digest, _, _ in reports):
            return ({EVERYONE: mine} if worker.is_first else {}), everywhere
        own = {str(worker.rank): mine}
        return (own if in_pieces else gather_entries_on_first(own, worker) or {}), everywhere

    def collect_own_parts(self, left_out: Collection[str] = ()) -> dict[str, Any]:
        """Return what this worker has of the state; tensors are not copied.

        Args:
            left_out: names of weights that are not part of it.
        """
        tree = state.optimizer_tree(self.model, self.optimizer, self.configured)
        if any(True for _ in state.iter_named_tensors(tree["groups"])):
            raise SnapshotError(
                "the optimizer has large tensors in param_groups, and workers cannot divide the writing of these",
                where="train.snapshot.layout",
                hint="use `layout: whole`",
            )
        parts: dict[str, Any] = {"model": _without(self.model.state_dict(), left_out), "optimizer": tree}
        if self.ema is not None:
            parts["ema"] = self.ema.state()
        if own := self.strategy.state():
            parts["strategy"] = {str(self.worker.rank): own}
        return parts

    def _gather_whole_state(self, left_out: Collection[str]) -> dict[str, Any]:
        """Return all there is but some weights, on rank 0, and nothing elsewhere; collective over all workers."""
        worker, spread, tree = self.worker, self.strategy.sharded_state, dict[str, Any]()
        if spread or worker.is_first:
            tree = state.optimizer_tree(self.model, self.optimizer, self.configured)
        parts: dict[str, Any] = {
            "model": self._gather_weights(left_out),
            "optimizer": gather_optimizer(tree, worker) if spread else tree,
        }
        own = self.strategy.state()
        others = gather_entries_on_first({str(worker.rank): own}, worker) if own else None
        if self.ema is not None:
            average = self.ema.state()
            parts["ema"] = gather_entries_on_first(average, worker) if spread else average
        parts |= {"strategy": others} if others else {}
        return parts if worker.is_first else {}


def _without(weights: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return the weights but those of these names."""
    dropped = set(left_out)
    return {name: value for name, value in weights.items() if name not in dropped}


def _require_alike(reports: list[list[dict[str, int] | None]], strategy: str) -> None:
    """Check that the counters of the optimizer's groups are the same on all workers, even if each has only a part.

    Raises:
        WorkerFailed: the counters differ; raised on every worker.
    """
    # the stages of a pipeline, as their tensors lie on different meshes
    if len({len(groups) for groups in reports}) > 1:
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
