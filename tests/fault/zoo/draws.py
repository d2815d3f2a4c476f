"""One draw of the zoo: a model, a strategy, kills and perhaps a change, and whether what was said of it is true.

A training is run once by itself, and once with SIGKILL at random moments and something changed before the last attempt.
What dtctl says of each resume is then compared with the bits that it ends with.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import commands
from tests import forked
from tests.fault.zoo.models import DEFAULTS, KINDS, Kind
from tests.verdicts import is_unrecorded, read_verdict

ROOT = Path(__file__).parents[3]
STEPS = int(DEFAULTS["steps"])
LIMIT_S = 60.0
SCRIPT = """\
import sys

sys.path.insert(0, {root!r})
from tests.fault.zoo.models import main


def altered(loss):
    return loss * 1.0


if __name__ == "__main__":
    raise SystemExit(main({kind!r}, altered))
"""
ELASTIC = "exact: elastic is not possible"
CHANGING = (
    *("running mean", "hidden mean", "queue", "step buffer", "hidden step buffer", "attribute", "undeclared attribute"),
    *("generator", "undeclared generator", "schedule", "undeclared schedule", "loss that counts", "curriculum"),
)
"""Kinds with a state that a worker changes by the samples that it sees: elastic must refuse them."""
APART = "the workers' optimizers have diverged"
OVER_ALL = ("tensor in a group", "prodigal")
"""Kinds whose optimizer adds up over all parameters, which must be refused where it does not have them all."""
BY_SAMPLE = ("map", "stream", "cache", "generator in the data")
"""Kinds whose data a thread cannot read."""
FALSE = ("false exact", "needless not exact", "needless refusal", "failed", "left alone failed")
"""Verdicts that are defects."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a training is started with."""

    workers: int
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    script: str

    def changed(self, **values: Any) -> Run:
        """The same with other settings; groups are merged."""
        settings = {
            key: {**self.settings.get(key, {}), **value} if isinstance(value, dict) else value
            for key, value in values.items()
        }
        return Run(self.workers, {**self.settings, **settings}, self.options, self.script)

    def with_options(self, **values: Any) -> Run:
        """The same with other options of the script."""
        return Run(self.workers, self.settings, {**self.options, **values}, self.script)


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is changed between two attempts."""

    make: Callable[[Run], Run]
    fits: Callable[[Kind, str, Run], bool]
    is_idle: bool = False
    """Whether it may change no bit: then nothing else than exact may be said."""


def _with_script(run: Run) -> Run:
    return Run(run.workers, run.settings, run.options, run.script.replace("loss * 1.0", "loss * 0.5"))


def _with_workers(run: Run, workers: int) -> Run:
    return Run(workers, run.settings, run.options, run.script)


def _by_option(name: str) -> Callable[[Kind, str, Run], bool]:
    return lambda kind, *_: name in kind.changes


def _by_trainer(kind: Kind, *_: Any) -> bool:
    return kind.own is None


def _of_default_optimizer(kind: Kind, *_: Any) -> bool:
    return kind.own is None and not any(word in str(kind.make) for word in ("using", "torched"))


def _replicas(kind: Kind, strategy: str, run: Run) -> bool:
    return kind.own is None and strategy in ("ddp", "zero1", "fsdp") and run.workers > 1


CHANGES: dict[str, Change] = {
    "dropout": Change(lambda run: run.with_options(dropout=0.5), _by_option("dropout")),
    "activation": Change(lambda run: run.with_options(activation="ReLU"), _by_option("activation")),
    "class of the optimizer": Change(lambda run: run.with_options(optimizer="RMSprop"), _by_option("optimizer")),
    "decay of the optimizer": Change(lambda run: run.with_options(decay=0.5), _by_option("decay")),
    "contents of the data": Change(lambda run: run.with_options(data_seed=6), lambda kind, *_: kind.own is None),
    "length of the data": Change(lambda run: run.with_options(samples=72), lambda kind, *_: kind.own is None),
    "code": Change(_with_script, _by_trainer),
    "lr": Change(lambda run: run.changed(lr=0.02), _by_trainer),
    "train.optimizer": Change(lambda run: run.changed(optimizer="sgd"), _of_default_optimizer),
    "train.weight_decay": Change(lambda run: run.changed(weight_decay=0.3), _of_default_optimizer),
    "seed": Change(lambda run: run.changed(seed=4), _by_trainer),
    "clip_norm": Change(lambda run: run.changed(clip_norm=0.01), _by_trainer),
    "precision": Change(
        lambda run: run.changed(precision="bf16"),
        lambda kind, *_: kind.own is None and "precision" not in kind.settings and "compile" not in kind.settings,
    ),
    "workers": Change(
        lambda run: _with_workers(run, 2 if run.workers == 3 else 3),
        _replicas,
    ),
    "workers, elastic": Change(
        lambda run: _with_workers(run, 1 if run.workers == 2 else 2),
        lambda _, strategy, __: strategy == "elastic",
        is_idle=True,
    ),
    "strategy": Change(
        lambda run: run.changed(strategy="fsdp" if run.settings["strategy"] != "fsdp" else "ddp"),
        lambda kind, strategy, run: _replicas(kind, strategy, run) and "fsdp" in kind.strategies,
    ),
    "passes": Change(
        lambda run: run.changed(micro_batch=2, accumulate=2 * run.settings.get("accumulate", 1)),
        lambda kind, strategy, _: kind.own is None and strategy != "pipeline",
    ),
    "data_workers": Change(lambda run: run.changed(data_workers=1), _by_trainer, is_idle=True),
    "thread": Change(
        lambda run: run.changed(data_workers="thread"),
        lambda kind, *_: kind.own is None and kind not in [KINDS[name] for name in BY_SAMPLE],
        is_idle=True,
    ),
    "logging": Change(lambda run: run.changed(log_every=1), _by_trainer, is_idle=True),
    "snapshots": Change(lambda run: run.changed(snapshot={"every_steps": 3}), _by_trainer, is_idle=True),
}


@dataclass(slots=True)
class Drawn:
    """What a draw came to."""

    seed: str
    kind: str
    strategy: str
    workers: int
    change: str | None
    settings: Mapping[str, Any]
    verdict: str = ""
    said: list[str] = field(default_factory=list)
    """Of each attempt: what it was resumed with, or how it began."""
    kills: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    """Parts of the state that end with other bits than those of the run that was left alone."""
    note: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether everything that was said is true."""
        return self.verdict not in FALSE


Start = Callable[[Run, Path, forked.Kill | None], forked.Ended]
"""One attempt: of what, where, and what is killed when."""


def draw(
    seed: str, folder: Path, *, kinds: tuple[str, ...] = (), change: str | None = "", start: Start | None = None
) -> Drawn:
    """Draw and judge.

    Args:
        seed: of all that is random.
        folder: for files; emptied.
        kinds: to draw from. None: all.
        change: name of it; None for none, empty to draw it.
        start: makes an attempt. None: workers that are forked, which takes least time.
    """
    source = random.Random(seed)
    began_s = time.monotonic()
    name = source.choice(kinds or tuple(KINDS))
    kind = KINDS[name]
    strategy = source.choice(kind.strategies)
    run = _begin(kind, name, strategy, source)
    fitting = sorted(key for key, value in CHANGES.items() if value.fits(kind, strategy, run))
    drawn = source.choice(fitting) if fitting and source.random() < 0.5 else None
    chosen = drawn if change == "" else change
    found = Drawn(seed, name, strategy, run.workers, chosen, run.settings)
    shutil.rmtree(folder, ignore_errors=True)
    start = start or _start
    alone = start(run, folder / "alone", None)
    if strategy == "elastic" and ELASTIC in alone.output:
        found.verdict = "refused, named" if name in CHANGING else "needless refusal"
        found.note = "" if found.good else alone.output[-3000:]
    elif strategy in ("zero1", "fsdp") and APART in alone.output:
        found.verdict = "refused, named" if name in OVER_ALL else "needless refusal"
    elif alone.code or not _final(folder / "alone"):
        found.verdict, found.note = "left alone failed", alone.output[-3000:]
    else:
        _judge(found, run, CHANGES[chosen] if chosen else None, folder, source, start)
    found.seconds = round(time.monotonic() - began_s, 2)
    return found


def _begin(kind: Kind, name: str, strategy: str, source: random.Random) -> Run:
    workers = {"single": 1, "ddp": source.choice((2, 3)), "fsdp": source.choice((2, 2, 3))}.get(strategy, 2)
    settings: dict[str, Any] = {"strategy": strategy, "snapshot": {"every_steps": source.choice((1, 2, 3))}}
    if strategy == "elastic":
        settings |= {"strategy": "auto", "exact": "elastic", "global_batch": 8, "micro_batch": 2}
        workers = source.choice((1, 2))
    elif strategy == "cp":
        settings["strategy"] = {"cp": 2}
    elif strategy == "pipeline":
        settings["accumulate"] = 2
    elif source.random() < 0.3:
        settings |= {"accumulate": 2, "micro_batch": 2}
    if source.random() < 0.2 and kind.own is None:
        settings["data_workers"] = 1 if name in BY_SAMPLE else source.choice((1, "thread"))
    if source.random() < 0.2 and "ema" not in kind.settings:
        settings["ema"] = {"decay": 0.7}
    for key in kind.settings.keys() & settings.keys():
        del settings[key]
    return Run(workers, settings, kind.options, SCRIPT.format(root=str(ROOT), kind=name))


def _start(run: Run, folder: Path, kill: forked.Kill | None) -> forked.Ended:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(run.script)
    (folder / "options.json").write_text(json.dumps(run.options))
    (folder / "progress").unlink(missing_ok=True)
    argv = ["train.py", *(f"--train.{line}" for line in _lines(run.settings))]
    return forked.launch(argv, run.workers, cwd=folder, limit_s=LIMIT_S, kill=kill)


def _lines(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def _kill(found: Drawn, run: Run, here: Path, source: random.Random, start: Start) -> bool:
    """Start and kill, once or twice; whether all that was said until then is true."""
    passes = int(run.settings.get("accumulate", KINDS[found.kind].settings.get("accumulate", 1)))
    if run.settings.get("exact") == "elastic":
        passes = 4 // run.workers  # of two samples each
    furthest = 0
    for _ in range(source.choice((1, 1, 2))):
        # Steps of this attempt; the first goes far enough for a snapshot to be there.
        after = source.randint(5 if furthest == 0 else 1, max(5, STEPS - furthest - 2))
        kill = forked.Kill(
            rank=source.randrange(run.workers),
            progress=str(here / "progress"),
            after=after * passes,
            drafts=str(here / "snapshots") if source.random() < 0.4 else None,
            delay_s=source.random() * 0.01,
            stop=KINDS[found.kind].own is None and source.random() < 0.15,
        )
        ended = start(run, here, kill)
        resumed = _said(ended.output)
        if furthest:
            found.said.append(resumed or _last(ended.output))
        if "killed\n" not in ended.output:
            if ended.code:
                found.verdict, found.note = "failed", ended.output[-3000:]
            break  # it came to its end before
        what = "stopped" if kill.stop else f"rank {kill.rank}"
        found.kills.append(f"{what} after {after} steps" + (", saving" if kill.drafts else ""))
        furthest = _newest_step(here)
        if furthest >= STEPS - 1:
            break
    return found.verdict == ""


def _judge(found: Drawn, run: Run, change: Change | None, folder: Path, source: random.Random, start: Start) -> None:
    """Kill and go on until the end; then compare what was said with the bits."""
    here = folder / "killed"
    if not _kill(found, run, here, source, start):
        return
    saved = _newest_step(here)
    last = change.make(run) if change else run
    ended = start(last, here, None)
    said = _said(ended.output)
    found.said.append(said or _last(ended.output))
    if ended.code:
        told = "error:" in ended.output and "Traceback" not in ended.output
        found.verdict = "failed" if not told else "refused" if change and not change.is_idle else "needless refusal"
        found.note = "" if found.good else ended.output[-3000:]
        return
    found.differing = _differing(folder, same=last.workers == run.workers, own=KINDS[found.kind].own is not None)
    refuted = [text for text in found.said if text.startswith("not exact")]
    if said is None:
        found.verdict = "began again" if not saved and (change or not found.differing) else "failed"
        found.note = "" if found.good else f"nothing was said of the resume: {ended.output[-1000:]}"
    elif refuted:
        found.verdict, found.note = "needless not exact" if not found.differing else "not exact", refuted[0]
    elif said == "exact":
        found.verdict = "equal" if not found.differing else "false exact"
    elif is_unrecorded(said):
        found.verdict = "equal" if not found.differing else "not exact, not recorded"
    else:
        found.verdict = "needless not exact" if change and change.is_idle and "thread" not in said else "named"
        found.note = "" if found.good else said


def _said(output: str) -> str | None:
    verdict = read_verdict(output)
    return "exact" if verdict == "nothing known differs" else verdict or None  # no step was left to be repeated


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if "rror" in line]
    return (lines or ["began"])[-1][:300]


def _newest_step(folder: Path) -> int:
    try:
        rows = commands.list_snapshots(folder / "snapshots")["snapshots"]
    except SnapshotError:
        return 0
    return max((row["step"] for row in rows if row["committed"]), default=0)


def _final(folder: Path) -> dict[str, dict[str, str]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("final.*.json"))}


def _differing(folder: Path, *, same: bool, own: bool) -> list[str]:
    """Parts that differ between the two runs; with another number of workers only what does not depend on it."""
    alone, killed = _final(folder / "alone"), _final(folder / "killed")
    parts = [
        f"{part} of {name}"
        for name in alone.keys() & killed.keys()
        for part, value in alone[name].items()
        if killed[name].get(part) != value and (same or part != "random")
    ]
    if not own:  # whose snapshots have parts of other names
        one, two = (commands.compute_snapshot_digest(folder / name / "snapshots") for name in ("alone", "killed"))
        parts += ["digest of the snapshot"] if one["digest"] != two["digest"] else []
    if same and alone.keys() != killed.keys():
        parts.append("workers that came to the end")
    return sorted(parts)


def as_row(found: Drawn) -> dict[str, Any]:
    """For the result."""
    return {**asdict(found), "good": found.good}
