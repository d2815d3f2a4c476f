"""A grammar of faults of a cluster: layers x places x directions x times, each with what an examiner has to say of it.

A fault is shell text that an administrator of one host runs, changes of the spec, or files beside the job's script; its
expectation was written from knowledge of the fault, before any doctor was asked. `FAULTS` are single ones, `PAIRS` two
of them on different hosts at once, and `HARMLESS` what looks odd and keeps nobody from training. By the hash of its
name each is in the half that the doctor is developed on (`is_held` false) or in the one that is only scored. `SECOND`
are singles of other layers, written when the doctor had learnt from the first half of `FAULTS`, and split alike.
`THIRD` are faults whose cause can be read on the node, and `ODD` clusters that look odd and train: all were written
before the doctor was asked about one, and each answer is compared with a launch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

from tests.fault.grammar import (
    addresses,
    harmless,
    interpreter,
    kernel,
    limits,
    login,
    partial,
    plan,
    ports,
    readable,
    streams,
    surroundings,
    times,
    variables,
)
from tests.fault.grammar.fault import NODES, PRELUDE, Collection, Expected, Fault

__all__ = [
    "FAULTS",
    "HARMLESS",
    "NODES",
    "ODD",
    "PAIRS",
    "PRELUDE",
    "SECOND",
    "THIRD",
    "Expected",
    "Fault",
    "of_half",
    "second_half",
]


def _singles() -> tuple[Fault, ...]:
    made = Collection()
    for layer in (ports, streams, addresses, plan, limits, interpreter, login, times, variables):
        layer.add(made)
    return tuple(made.faults)


def _second() -> tuple[Fault, ...]:
    made = Collection()
    for layer in (partial, kernel, surroundings):
        layer.add(made)
    return tuple(made.faults)


def _third() -> tuple[Fault, ...]:
    made = Collection()
    readable.add(made)
    return tuple(made.faults)


FAULTS = _singles()
SECOND = _second()
THIRD = _third()
HARMLESS = tuple(harmless.faults())
ODD = tuple(readable.odd())


def _pairs(wanted: int) -> Iterator[Fault]:
    """Two faults on different hosts, of different layers, both of the same half; as many of each half as there are."""
    for held in (False, True):
        able = [
            one
            for one in sorted(FAULTS, key=lambda fault: fault.order)
            if one.is_held is held
            and len(one.do) == 1
            and not one.spec
            and not one.expected[0].pair
            and one.layer != "way in"
        ]
        found = 0
        for first, second in itertools.combinations(able, 2):
            hosts = {first.do[0][0], second.do[0][0]}
            name = f"pair: {first.name} + {second.name}"
            if (
                len(hosts) == 2
                and first.layer != second.layer
                and hashlib.sha256(name.encode()).digest()[1] % 4 == 0
                and found < wanted // 2
            ):
                found += 1
                yield Fault(
                    name=name, layer="pairs", do=(*first.do, *second.do), expected=(*first.expected, *second.expected)
                )


PAIRS = tuple(_pairs(56))


def of_half(held: bool) -> list[Fault]:
    """Single faults and pairs of one half, in the order from whose front a sample is taken."""
    # A pair is in the half of its faults.
    names = {fault.name for fault in FAULTS if fault.is_held is held}
    pairs = [fault for fault in PAIRS if fault.name.removeprefix("pair: ").partition(" + ")[0] in names]
    return sorted([*(fault for fault in FAULTS if fault.name in names), *pairs], key=lambda fault: fault.order)


def second_half(held: bool) -> list[Fault]:
    """Faults of the second collection that are in one half."""
    return sorted((fault for fault in SECOND if fault.is_held is held), key=lambda fault: fault.order)
