"""Fingerprint of the program that is stored with each snapshot, and the state of the program's own objects.

It is made when training begins. stateful.py finds the objects with state, and run_conditions.py lists the facts that
are compared.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dtctl.errors import PlanError
from dtctl.runtime.data_loading.datasets import CollatedDataset
from dtctl.runtime.data_loading.feed import BatchLoader
from dtctl.runtime.data_loading.order import Indices
from dtctl.runtime.data_loading.reading import DatasetExamination
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness import run_conditions
from dtctl.runtime.exactness.stateful import StatefulObjects, encode_state, is_divided, name_some, put_encoded_state
from dtctl.runtime.own_code import digest_modules, name_class
from dtctl.runtime.snapshot.json_collectives import gather_json
from dtctl.train.compatibility import build_not_elastic_error

EVERYONE: Final = "all"
"""Key in the part `local` for the state that all workers have in common; other keys are ranks."""
PROGRAM: Final = "program"
BUFFERS: Final = "buffers"
"""Key of each worker's buffers: running means of its own samples differ until they are exchanged."""
BUFFER_BYTES: Final = 64 << 20
EXTRA: Final = "extra"


@dataclass(slots=True, kw_only=True)
class ProgramFingerprint:
    """Fingerprint of the program of one run, and the state of its own objects."""

    program: StatefulObjects
    model: nn.Module
    together: int
    """Number of workers that may have seen different samples; 0 if there is only one."""
    extra: Mapping[str, Any]
    """Objects that the user has passed as `extra_state`, by name."""
    names: frozenset[str]
    """Names in the model's state, before the first step."""
    detail: dict[str, str]
    """Facts about the program on this worker, from `run_conditions.collect_program_facts`."""
    checksums: list[dict[str, Any]]
    """Checksums of the facts of all workers, by rank."""
    numerics: Callable[[], Mapping[str, str]]
    """Function that returns the numerical settings of this process now."""
    irreproducible: list[str]
    """Reasons, from any worker, why two runs of this program differ."""

    def build_facts_text(self) -> str:
        """Return the facts as a snapshot keeps them, with modules that were loaded since the first step.

        The loss function may import such a module.
        """
        for name, digest in digest_modules().items():
            self.detail.setdefault(f"{run_conditions.CODE}{name}", digest)
        return json.dumps(self.detail, separators=(",", ":"))

    def require_elastic(self) -> None:
        """Refuse a model with state that depends on the samples of its worker.

        Raises:
            PlanError: the model has such state.
        """
        changed, lost = self.program.changed()
        own = [path for path in [*changed, *lost] if path.startswith("model.")]
        if own:
            raise build_not_elastic_error(f"{own[0]} changes in training, depending on the samples of its worker")

    def collect_program_state(self) -> tuple[dict[str, Any], list[str]]:
        """Return the encoded state of the program's own objects, and the paths of objects that cannot be kept."""
        changed, lost = self.program.changed()
        lost += [f"the {name}" for name, value in self.numerics().items() if self.detail.get(name) != value]
        tree: dict[str, Any] = {PROGRAM: changed} if changed else {}
        buffers = {name: value for name, value in self.model.named_buffers() if name in self.names}
        if sum(value.numel() * value.element_size() for value in buffers.values()) <= BUFFER_BYTES:
            tree |= {BUFFERS: buffers} if buffers and self.together else {}
        if self.extra:
            tree[EXTRA] = {name: _encode_object_state(value, name) for name, value in self.extra.items()}
        return tree, lost

    def load(self, parts: Mapping[str, Any], rank: int, *, going_back: bool = False) -> list[str]:
        """Restore what `collect_program_state` returned.

        Args:
            parts: parts of a snapshot.
            rank: rank of this worker.
            going_back: True if this process made the snapshot and has trained on since. Then only objects in the model
                and the optimizer return to the earlier state; a loss function that counts its calls keeps its count.

        Returns:
            Differences from the former state, a phrase each.
        """
        held = parts.get("local", {})
        mine = held.get(EVERYONE, held.get(str(rank)))
        if mine is None:
            return ["the snapshot has no state of the program for this worker"] if held or self.extra else []
        program: Mapping[str, Any] = mine.get(PROGRAM, {})
        if going_back:
            program = {path: value for path, value in program.items() if path.startswith(("model.", "optimizer."))}
        then = mine.get(EXTRA, {})
        phrases = []
        for name, value in self.extra.items():
            if name not in then:
                phrases.append(f"extra_state.{name} is not in the snapshot")
            elif not put_encoded_state(value, then[name]):
                phrases.append(f"extra_state.{name} could not be restored")
        phrases += self.program.load(program)
        buffers = dict(self.model.named_buffers())
        for name, value in mine.get(BUFFERS, {}).items() if len(held) == self.together or EVERYONE in held else ():
            if name in buffers and buffers[name].shape == value.shape and not hasattr(buffers[name], "device_mesh"):
                buffers[name].copy_(value)
        gone = [name for name in then if name not in self.extra]
        phrases += [f"extra_state.{name} is in the snapshot, but the program does not have it now" for name in gone]
        return phrases


def _encode_object_state(value: Any, name: str) -> Any:
    state = encode_state(value, f"extra_state.{name}")
    if is_divided(state):
        raise PlanError(
            f"extra_state.{name} is divided over workers, and snapshots keep of `extra_state` what each worker has",
            where=f"extra_state.{name}",
            hint="make it a part of the model; a session takes several models and optimizers by name",
        )
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintInputs:
    """Parts of a program that its fingerprint describes."""

    model: nn.Module
    loss: Any
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float] | None
    """Learning rate function of the script; None if the configuration defines the rate."""
    extra_state: Mapping[str, Any]
    apart: Sequence[Any]
    """Objects that refer to these parts and are not state of the program."""
    feed: BatchLoader
    first: Indices
    """Indices of the first samples."""


def build_training_account(subject: FingerprintInputs, worker: Worker, *, elastic: bool) -> ProgramFingerprint:
    """Return the fingerprint of a run that is about to begin; collective over all workers."""
    reader = subject.feed.reader
    roots = {"model": subject.model, "loss": subject.loss, "optimizer": subject.optimizer}
    roots |= reader.data.parts if isinstance(reader.data, CollatedDataset) else {"data": reader.data}
    if subject.rate is not None:
        roots["rate"] = subject.rate
    roots |= {f"extra_state.{name}": value for name, value in subject.extra_state.items()}
    # The reader's generators are left out, since they are seeded by position.
    program = StatefulObjects(roots, apart=[*subject.apart, *reader.seeder.list_dataset_generators()])
    examined = subject.feed.examine_dataset(subject.first)
    return build_program_fingerprint(program, roots, examined, worker, extra=subject.extra_state, elastic=elastic)


def build_program_fingerprint(
    program: StatefulObjects,
    roots: Mapping[str, Any],
    examined: DatasetExamination,
    worker: Worker,
    *,
    extra: Mapping[str, Any],
    elastic: bool = False,
) -> ProgramFingerprint:
    """Return the fingerprint of a program that has not taken a step yet; collective over all workers.

    Args:
        program: objects of the program that have state.
        roots: objects that the program consists of, by name, with the `model`; their classes are recorded.
        examined: facts about some samples.
        worker: this worker.
        extra: objects of `extra_state`, by name.
        elastic: True if the result must not depend on the number of workers.
    """
    classes = {f"{name} (class)": name_class(root) for name, root in roots.items()}
    detail = run_conditions.collect_program_facts(classes, examined, worker, elastic=elastic)
    numerics = functools.partial(run_conditions.collect_numeric_settings, worker, elastic=elastic)
    reports = gather_json([run_conditions.compute_facts_checksum(detail), examined.irreproducible], worker)
    return ProgramFingerprint(
        names=frozenset(roots["model"].state_dict()),
        program=program,
        model=roots["model"],
        together=worker.world_size if worker.backend is not None else 0,
        extra=extra,
        detail=detail,
        checksums=[number for number, _ in reports],
        numerics=numerics,
        irreproducible=list(dict.fromkeys(reason for _, reason in reports if reason)),
    )


def find_program_differences(
    account: ProgramFingerprint, parts: Mapping[str, Any], facts: Mapping[str, Any], rank: int
) -> list[str]:
    """Return the differences between the program and that of a snapshot, as this worker sees them, a phrase each."""
    recorded = parts.get("circumstances")
    if recorded is None:
        return ["the snapshot does not identify its program"]
    phrases = [*facts["irreproducible"], *account.irreproducible]
    before, now = facts["programs"], account.checksums
    if rank == 0:
        phrases += run_conditions.describe_differences(json.loads(recorded["detail"]), account.detail)
    elif (
        len(before) == len(now)
        and not run_conditions.is_alike(before[rank], now[rank])
        and run_conditions.is_alike(before[0], now[0])
    ):
        phrases.append(f"the run conditions of rank {rank} have changed, but not those of rank 0")
    local = parts.get("local", {})
    own = [name for name in account.extra if f"extra_state.{name} (class)" in account.detail]
    if own and local and EVERYONE not in local and len(before) > len(now):
        phrases.append(
            f"extra_state ({name_some(own)}) of {len(before) - len(now)} workers is left out: each of {len(before)} "
            f"workers kept its own, and there are {len(now)}"
        )
    changed = {path for tree in local.values() for path in tree.get(PROGRAM, {})}
    if changed and len(before) != len(now):
        phrases.append(
            f"{name_some(sorted(changed))} changed on each of {len(before)} workers, and there are {len(now)}"
        )
    return phrases
