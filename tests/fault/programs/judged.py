"""What a program says of its resume, beside the bits that it ends with.

Every file of `scripts/` is a program as people write them, with what was expected of it before it was ever run. It is
run alone, twice; killed in the middle and started again; and once more for each of its changes, made before it is
started again. The truth is not what was expected but what the bits are.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import forked
from tests.verdicts import is_unrecorded, read_verdict

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPTS = HERE / "scripts"
LIMIT_S = 150.0
FALSE = "false exact"
LATER = "right, differs later"
"""It is said to be exact, and it is, as far as steps were recorded."""
RESUMED = re.compile(r"resumed at step (\d+) of")
DIFFERS = re.compile(
    r"not exact: (?:steps? [\w ]+ repeated bit for bit, and )?the (loss|gradient|update) of step (\d+) differs"
)
LOADED = "not exact: the state that was loaded differs from the one that was saved"
REPEATED = re.compile(r"(?:exact|confirmed): steps? (\d+)(?: to (\d+))? repeated")
NEEDLESS = ("needless not exact", "needless refusal")
DRAWN = "drawn"
"""Part of the programs that drawn.py makes, each with one change."""
BROKEN = ("failed", "silent")
"""Verdicts that are defects, the worst first."""


@dataclass(frozen=True, slots=True)
class Program:
    """A file of `scripts/`."""

    name: str
    text: str
    workers: int
    expected: str
    """What its author took for the truth before it was run."""
    changes: dict[str, str]
    """What is changed between two attempts, by name: `edit A => B`, `arg`, `argv`, `env` or `python`."""

    part: str
    """`learn`, `held-out` (nobody learned from it before it was scored), or `later` (written after those were)."""
    kill_at: int = 0
    """Step in which it is killed. 0: one that follows from its name."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of all attempts."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of a program, unchanged or with one of its changes."""

    program: str
    change: str | None
    part: str
    expected: str
    verdict: str
    said: str
    equal: bool | None
    """Whether the bits are those of the program left alone. None: it did not come to its end."""
    seconds: float
    note: str = ""
    kind: str = ""
    """`right` if what is said to differ first is what does, else what was said and what is true; empty if neither."""


def programs() -> list[Program]:
    """All of them, by name."""
    return [_read(path) for path in sorted(SCRIPTS.rglob("*.py")) if path.name != "toy.py"]


def _read(path: Path) -> Program:
    text = path.read_text()
    notes = re.findall(r"^# (workers|expect|change (?:\w+)): (.*)$", text, re.MULTILINE)
    facts = dict(notes)
    changes = {key.split()[1]: value for key, value in facts.items() if key.startswith("change ")}
    half = "held-out" if hashlib.sha256(path.stem.encode()).digest()[0] >= 128 else "learn"
    part = half if path.parent == SCRIPTS else path.parent.name
    return Program(path.stem, text, int(facts.get("workers", 1)), facts["expect"], changes, part)


def judge_in(program: Program, folder: Path, keep: bool) -> list[Judged]:
    """Judge in a folder beside those of others, and leave it if it is to be kept."""
    here = folder / program.name
    found = judge(program, here)
    if not keep:
        shutil.rmtree(here, ignore_errors=True)
    return found


def judge(program: Program, folder: Path) -> list[Judged]:
    """Run a program in all its ways. The folder is emptied, and left with what the runs left."""
    shutil.rmtree(folder, ignore_errors=True)
    began_s = time.monotonic()
    first = _attempt(program, folder / "alone")
    again = _attempt(program, folder / "again")
    bits = _bits(folder / "alone", program)
    row = {"program": program.name, "part": program.part, "expected": program.expected}
    if first.code or again.code or bits is None:
        note = (first.output if first.code else again.output)[-2000:]
        seconds = round(time.monotonic() - began_s, 2)
        return [
            Judged(**row, change=None, verdict="left alone failed", said="", equal=None, seconds=seconds, note=note)
        ]
    same = _bits(folder / "again", program) == bits
    found = []
    for name in program.changes if program.part == DRAWN else (None, *program.changes):
        here = folder / (name or "killed")
        # A step after the newest snapshot is recorded.
        at = program.kill_at or 4 + 2 * (hashlib.sha256(program.name.encode()).digest()[1] % 2)
        killed = _attempt(program, here, kill_at=at)
        ended, change = killed, program.changes.get(name or "", "")
        if "killed\n" in killed.output:
            ended = _attempt(program, here, change=change)
        said = read_verdict(ended.output)
        equal = None if ended.code else same and _bits(here, program) == bits
        verdict = _verdict(killed, ended, said, equal, changed=name is not None)
        if verdict == FALSE and _is_repeated(folder / "alone", here, ended.output):
            verdict = LATER
        if verdict == "right" and not same:
            verdict = "right, never the same twice"
        note = ended.output[-2000:] if verdict.split(",")[0] in (*BROKEN, "needless refusal") else ""
        seconds = round(time.monotonic() - began_s, 2)
        kind = _judge_kind(folder / "alone", here, ended.output) if same else ""
        found.append(
            Judged(**row, change=name, verdict=verdict, said=said, equal=equal, seconds=seconds, note=note, kind=kind)
        )
        began_s = time.monotonic()
    return found


def _verdict(killed: forked.Ended, ended: forked.Ended, said: str, equal: bool | None, *, changed: bool) -> str:
    if "killed\n" not in killed.output:
        return "failed, was not killed"
    if ended.code:
        told = "error:" in ended.output and "Traceback" not in ended.output
        return "failed" if not told else "right, refused" if changed else "needless refusal"
    if not said:
        return "silent"
    if said == "exact":
        return "right" if equal else FALSE
    if is_unrecorded(said):
        return "right"
    return "needless not exact" if equal else "right"


def _is_repeated(alone: Path, here: Path, output: str) -> bool:
    """Whether the steps that are said to be repeated have left the parameters as they were without a kill."""
    found = REPEATED.findall(output)
    if not found:
        return False
    begin, end = int(found[-1][0]), int(found[-1][1] or found[-1][0])
    then, now = ([step[2] for step in _steps(folder)[0]] for folder in (alone, here))
    first = now[: end - begin + 1]
    return any(then[place : place + len(first)] == first for place in range(len(then)))


def _judge_kind(alone: Path, here: Path, output: str) -> str:
    """Whether the first thing that differs is what is said; of programs with one step of an optimizer for each."""
    resumed = RESUMED.findall(output)
    said, told = DIFFERS.search(output), [(int(a), int(b or a)) for a, b in REPEATED.findall(output)]
    ranks = list(zip(_steps(alone), _steps(here), strict=False))
    if not resumed or any(len(then) != 10 for then, _ in ranks):
        return ""
    begun, seen = int(resumed[-1]), ["loss", "gradient", "update"]
    known = output.partition("known to differ: ")[2].partition("\n")[0]
    if re.search("(workers|micro_batch|accumulate) changed", known):
        seen.remove("loss")  # which is one of other samples
    if "clip_norm changed" in known:
        seen.remove("gradient")  # dtctl means that before clipping
    true = _first_difference(alone, here, begun, ranks, seen)
    wrong = [step for _, step in (true,) if any(first <= step <= last for first, last in told)]
    if wrong:
        return f"said step {wrong[0]} is repeated, its {true[0]} differs"
    if LOADED in output:
        return "right" if true == ("state", begun) else f"said state, is {true[0]} of step {true[1]}"
    if said is None:
        return ""
    if "repeated bit for bit" in said[0] and "loss" in seen:  # of later steps there are losses alone
        true = _first_difference(alone, here, begun, ranks, ["loss"])
    found = said[1], int(said[2])
    return "right" if found == true else f"said {found[0]} of step {found[1]}, is {true[0]} of step {true[1]}"


def _first_difference(
    alone: Path, here: Path, begun: int, ranks: list[tuple[list[list[str]], list[list[str]]]], seen: list[str]
) -> tuple[str, int]:
    """What differs first and in which step; `nothing` of step 0 if nothing does."""
    loaded = [path.read_text().split() for path in sorted(here.glob("loaded.*"))]
    if begun and any(then[begun - 1][2:] != row for (then, _), row in zip(ranks, loaded, strict=False)):
        return "state", begun
    for number in range(begun, 10):
        pairs = [(then[number], now[number - begun]) for then, now in ranks if number - begun < len(now)]
        for kind in seen:
            if any(_is_different(one, other, kind) for one, other in pairs):
                return kind, number + 1
    return "nothing", 0


def _is_different(one: list[str], other: list[str], kind: str) -> bool:
    if kind != "loss":
        place = ("loss", "gradient", "update").index(kind)
        return one[place] != other[place]
    losses = one[0].split(","), other[0].split(",")
    count = min(map(len, losses))  # a pass that is thrown away may come before the first step
    return losses[0][-count:] != losses[1][-count:]


def _steps(folder: Path) -> list[list[list[str]]]:
    """Checksums of the losses, gradients and parameters, by rank and by step; what boot.py has written."""
    return [[line.split() for line in path.read_text().splitlines()] for path in sorted(folder.glob("steps.*"))]


def _attempt(program: Program, folder: Path, *, kill_at: int = 0, change: str = "") -> forked.Ended:
    """One start in a folder of its own, which a later attempt finds as this one left it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "snapshots").mkdir(exist_ok=True)
    (folder / "ready").unlink(missing_ok=True)
    kind, _, what = change.partition(" ")
    text, argv, environ = program.text, [], {}
    if kind == "edit":
        old, new = what.split(" => ")
        assert old in text.split("\n", 1)[1], (program.name, old)
        head, body = re.split(r"(?<=\n)(?=from toy|import )", text, maxsplit=1)
        assert old in body, (program.name, old)
        text = head + body.replace(old, new)
    elif kind in ("arg", "argv"):
        argv = shlex.split(what)
    elif kind == "env":
        name, _, value = what.partition("=")
        environ = {name: value}
    elif kind == "python":
        subprocess.run([sys.executable, "-c", what], cwd=folder, check=True)
    else:
        assert not kind, change
    (folder / "train.py").write_text(text)
    shutil.copy(SCRIPTS / "toy.py", folder)
    kill = forked.Kill(rank=0, progress=str(folder / "ready"), after=1) if kill_at else None
    return forked.launch(
        [HERE / "boot.py", str(kill_at), "train.py", *argv],
        program.workers,
        cwd=folder,
        environ={"HOME": str(folder), **program.environ, **environ},
        limit_s=LIMIT_S,
        kill=kill,
    )


def _bits(folder: Path, program: Program) -> list[str] | None:
    files = [folder / f"final.{rank}.json" for rank in range(program.workers)]
    return [json.loads(path.read_text()) for path in files] if all(path.exists() for path in files) else None
