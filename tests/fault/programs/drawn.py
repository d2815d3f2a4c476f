"""Programs that are put together at random, each with one change of variants.py between two attempts.

The truth is found as for those of `scripts/`: boot.py writes down the raw bits of losses, gradients, parameters and the
optimizer's state in each attempt. What dtctl says of the resume is compared with them.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from tests.fault.programs.judged import DRAWN, FALSE, LATER, Judged, Program
from tests.fault.programs.variants import VARIANTS
from tests.verdicts import is_unrecorded

KINDS = tuple(dict.fromkeys(variant.kind for variant in VARIANTS))
IDLE, OPEN = "equal", "open"
"""What is expected: equal bits for certain, or anything."""
PROGRAM = '''\
"""Drawn."""

from toy import *

{tops}


def net():
    made = nn.Sequential(nn.Linear(6, 16), {layer}, {second}, nn.Linear(16, 1))
    {net}
    return made


def samples():
    inputs, targets = {points}
    return {samples}


def loss(model, batch):
    inputs, targets = batch
    {before}
    value = F.{distance}(model(inputs), targets)
    {after}
    return value


fit(loss, net, samples, settings={settings}{more})
'''
OPTIMIZERS = (
    "",
    "lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)",
    "lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01)",
    "lambda model: torch.optim.NAdam(model.parameters(), lr=0.01)",
)
AT = ((2, 4), (3, 6), (3, 6), (4, 7), (3, 4))
"""Steps between snapshots, and that in which it is killed: behind one or two that are recorded, or none."""
MISSES = (FALSE, "kind", "needless refusal", "needless not exact", "failed", "silent", "left alone failed")


def draw_program(seed: str, kind: str) -> Program:
    """Put a program together.

    Args:
        seed: of all that is random; the name of the program.
        kind: of the change.
    """
    source = random.Random(seed)
    variant = source.choice([variant for variant in VARIANTS if variant.kind == kind])
    every, kill_at = source.choice(AT)
    workers = variant.workers or source.choice((1, 1, 2))
    settings: dict[str, Any] = {"snapshot": {"every_steps": every, "keep": 3, "dir": "snapshots"}}
    if workers > 1:
        settings["strategy"] = source.choice(("ddp", "ddp", "zero1", "fsdp"))
    if source.random() < 0.2:
        settings |= {"accumulate": 2, "micro_batch": 2}
    if source.random() < 0.15:
        settings["ema"] = {"decay": 0.7}
    optimizer = source.choice(OPTIMIZERS)
    more = {"optimizer": optimizer, **variant.more}
    if "--train." in variant.change or variant.kind == "state":
        more["optimizer"] = ""  # what is changed is a setting of dtctl's own
    text = PROGRAM.format(
        tops=variant.tops,
        layer=variant.layer or source.choice(("nn.Tanh()", "nn.GELU()")),
        second=source.choice(("nn.Identity()", "nn.LayerNorm(16)", "nn.Dropout(0.2)", "nn.Linear(16, 16)")),
        net=variant.net or "pass",
        points=variant.points,
        samples=variant.samples,
        before=_indent(variant.before),
        distance=source.choice(("mse_loss", "huber_loss", "smooth_l1_loss")),
        after=_indent(variant.after),
        settings=json.dumps(settings),
        more="".join(f", {name}={value}" for name, value in more.items() if value),
    )
    fill = _numbers(source)
    return Program(
        name=seed,
        text=fill(text),
        workers=workers,
        expected=IDLE if variant.is_idle else OPEN,
        changes={kind: fill(variant.change)},
        part=DRAWN,
        kill_at=kill_at,
        environ={key: fill(value) for key, value in variant.environ.items()},
    )


def _numbers(source: random.Random) -> Any:
    a1, a2 = source.sample([number / 100 for number in range(25, 200) if number % 25], 2)
    n1, n2 = source.sample(range(11, 99), 2)
    words = {"A1": a1, "A2": a2, "N1": n1, "N2": n2, "D1": source.choice((1, 2, 3, 4, 6, 7, 8))}
    return lambda text: re.sub(r"\b(?:[AN][12]|D1)\b", lambda match: str(words[match[0]]), text)


def _indent(lines: str) -> str:
    return (lines or "pass").replace("\n", "\n    ")


def rate(row: Judged) -> str:
    """What came of a draw in one word; those of MISSES are defects."""
    if row.kind not in ("", "right"):
        return "kind"
    if row.verdict == "right, refused":
        return "needless refusal" if row.expected == IDLE else "refused"
    if row.verdict == "needless not exact":
        if row.kind == "right":
            return "not exact"  # a loss was another, and what it ended with is not
        return row.verdict if row.said.startswith("not exact") else "not confirmed, equal"
    if row.verdict in (FALSE, "needless refusal", "left alone failed") or row.verdict.split(",")[0] in MISSES:
        return row.verdict.split(",")[0]
    if row.said == "exact":
        return "exact, differs later" if row.verdict == LATER else "exact"
    if "never the same" in row.verdict:
        return "never the same twice"
    if row.said.startswith("not exact"):
        return "not exact"
    return "not recorded" if is_unrecorded(row.said) else "not confirmed, differs"


def draws(seed: str, count: int) -> list[Program]:
    """So many programs, as many of each kind of change."""
    return [draw_program(f"{seed}-{number:03}", KINDS[number % len(KINDS)]) for number in range(count)]


def as_table(rows: list[Judged]) -> str:
    """Kinds of changes by what came of them."""
    words = list(dict.fromkeys(sorted(rate(row) for row in rows)))
    lines = [["change", "draws", *words]]
    for kind in dict.fromkeys(row.change for row in rows):
        rated = [rate(row) for row in rows if row.change == kind]
        lines.append([str(kind), str(len(rated)), *(str(rated.count(word) or "") for word in words)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
