"""Fingerprint of the program that is stored with each snapshot, and the state that the program keeps of its own.

Made when training begins; stateful.py finds what the program keeps, circumstances.py has what is compared.
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
from dtctl.runtime.data_loading.feed import Feed
from dtctl.runtime.data_loading.order import Indices
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.exactness import circumstances
from dtctl.runtime.exactness.stateful import (
    StatefulObjects,
    is_stateful,
    name_some,
    put_state,
    take_state,
)
from dtctl.runtime.own_code import digest_modules, name_class
from dtctl.runtime.snapshot.format.encoding import decode, encode, is_generator, with_devices
from dtctl.runtime.snapshot.json_collectives import gathered_json
from dtctl.train.compatibility import not_elastic

EVERYONE: Final = "all"
"""Key in the part `local`, in the place of a rank, of what is the same on all workers."""
PROGRAM: Final = "program"
BUFFERS: Final = "buffers"
"""Key of each worker's buffers, where running means are of its own samples until they are exchanged."""
BUFFER_BYTES: Final = 64 << 20
EXTRA: Final = "extra"


@dataclass(slots=True, kw_only=True)
class Account:
    """Fingerprint of the program of one run, and the state that it keeps of its own."""

    program: StatefulObjects
    model: nn.Module
    together: int
    """Number of workers that may each have seen other samples; 0 for one alone."""
    extra: Mapping[str, Any]
    """The user's `extra_state`."""
    names: frozenset[str]
    """Names in the model's state, before the first step."""
    detail: dict[str, str]
    """The long list of this worker, by `circumstances.detail`."""
    checksums: list[dict[str, Any]]
    """Checksums of the lists of all workers, by rank."""
    numerics: Callable[[], Mapping[str, str]]
    """Function that returns the numerical settings of this process now."""
    numerics_before: Mapping[str, str]
    irreproducible: list[str]
    """Reason why a run of this program is not the same twice, on any worker."""

    def look_at_code(self) -> None:
        """Take in modules that were loaded since, such as one that the loss function imports."""
        for name, digest in digest_modules().items():
            self.detail.setdefault(f"code of {name}", digest)

    @property
    def text(self) -> str:
        """The long list, as a snapshot keeps it."""
        return json.dumps(self.detail, separators=(",", ":"))

    def require_elastic(self) -> None:
        """See that the model keeps nothing that depends on what its worker has seen.

        Raises:
            PlanError: it does.
        """
        changed, lost = self.program.changed()
        own = [path for path in [*changed, *lost] if path.startswith("model.")]
        if own:
            raise not_elastic(f"{own[0]} changes in training, by what its worker has seen")

    def local(self) -> tuple[dict[str, Any], list[str]]:
        """Return what the program keeps of its own, encoded, and the paths of what cannot be kept."""
        changed, lost = self.program.changed()
        lost += [f"the {name}" for name, value in self.numerics().items() if self.numerics_before.get(name) != value]
        tree: dict[str, Any] = {PROGRAM: changed} if changed else {}
        buffers = {name: value for name, value in self.model.named_buffers() if name in self.names}
        if sum(value.numel() * value.element_size() for value in buffers.values()) <= BUFFER_BYTES:
            tree |= {BUFFERS: dict(buffers)} if buffers and self.together else {}
        if self.extra:
            tree[EXTRA] = {name: _encoded(value, name) for name, value in self.extra.items()}
        return tree, lost

    def load(self, parts: Mapping[str, Any], rank: int, *, going_back: bool = False) -> list[str]:
        """Put back what `local` returned.

        Args:
            parts: of a snapshot.
            rank: of this worker.
            going_back: whether this process has trained on since. Then only what belongs to model and optimizer goes
                back with them; a loss function that counts its calls counts on.

        Returns:
            What is not as it was, a phrase each.
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
            elif not put_state(value, decode(then[name])):
                phrases.append(f"extra_state.{name} could not be put back")
        phrases += self.program.load(program)
        buffers = dict(self.model.named_buffers())
        for name, value in mine.get(BUFFERS, {}).items() if len(held) == self.together or EVERYONE in held else ():
            if name in buffers and buffers[name].shape == value.shape and not hasattr(buffers[name], "device_mesh"):
                buffers[name].copy_(value)
        return phrases + [
            f"extra_state.{name} was kept, and nothing takes it" for name in then if name not in self.extra
        ]


def _encoded(value: Any, name: str) -> Any:
    return with_devices(encode(take_state(value), f"extra_state.{name}"))


def require_stateful(extra: Mapping[str, Any]) -> None:
    """See that snapshots can keep what the user gave.

    Raises:
        PlanError: something has no state that could be taken and put back.
    """
    for name, value in extra.items():
        if not is_generator(value) and not is_stateful(value):
            raise PlanError(
                f"extra_state.{name} is a {type(value).__qualname__}, which has no state_dict() and load_state_dict()",
                where="Trainer",
                hint="give an object that has both, or a random generator of torch, NumPy or Python",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountSubject:
    """Parts of a program that its account describes."""

    model: nn.Module
    loss: Any
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float] | None
    """The script's own; None if the learning rate follows from the configuration."""
    extra_state: Mapping[str, Any]
    apart: Sequence[Any]
    """Objects that refer to all of that and are no state of the program."""
    feed: Feed
    first: Indices
    """Positions of the first samples."""


def take(subject: AccountSubject, worker: Worker, *, elastic: bool) -> Account:
    """Return the account of a training that is about to begin; collective over all workers."""
    reader = subject.feed.reader
    roots = {"model": subject.model, "loss": subject.loss, "optimizer": subject.optimizer, "data": reader.data}
    if subject.rate is not None:
        roots["rate"] = subject.rate
    roots |= {f"extra_state.{name}": value for name, value in subject.extra_state.items()}
    # The reader's generators are seeded by position.
    program = StatefulObjects(roots, model=subject.model, apart=[*subject.apart, *reader.generators()])
    examined = subject.feed.examine(subject.first)
    classes = {f"{name} (class)": name_class(root) for name, root in roots.items()}
    detail = circumstances.detail(classes, examined, worker, elastic=elastic)
    reasons = [examined.irreproducible] if examined.irreproducible else []
    numerics = functools.partial(circumstances.numerics, worker, elastic=elastic)
    reports = gathered_json([circumstances.checksum(detail), reasons], worker)
    return Account(
        names=frozenset(subject.model.state_dict()),
        program=program,
        model=subject.model,
        together=worker.world_size if worker.backend is not None else 0,
        extra=subject.extra_state,
        detail=detail,
        checksums=[number for number, _ in reports],
        numerics=numerics,
        numerics_before=numerics(),
        irreproducible=list(dict.fromkeys(reason for _, reasons in reports for reason in reasons)),
    )


def differences(account: Account, parts: Mapping[str, Any], facts: Mapping[str, Any], rank: int) -> list[str]:
    """Return the differences that this worker has found between the program and that of a snapshot, a phrase each."""
    recorded = parts.get("circumstances")
    if recorded is None:
        return ["the snapshot does not say what program it is of"]
    phrases = [*facts["irreproducible"], *account.irreproducible]
    before, now = facts["programs"], account.checksums
    if rank == 0:
        phrases += circumstances.differences_in_detail(json.loads(recorded["detail"]), account.detail)
    elif (
        len(before) == len(now)
        and not circumstances.is_alike(before[rank], now[rank])
        and circumstances.is_alike(before[0], now[0])
    ):
        phrases.append(f"what rank {rank} runs with is not what it was, and what rank 0 runs with is")
    changed = {path for tree in parts.get("local", {}).values() for path in tree.get(PROGRAM, {})}
    if changed and len(before) != len(now):
        phrases.append(
            f"{name_some(sorted(changed))} changed on each of {len(before)} workers, and there are {len(now)}"
        )
    return phrases
