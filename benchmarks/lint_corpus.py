"""How much of what people found in public training files `dtctl lint` finds, and how much of what it says is right.

    python benchmarks/lint_corpus.py FOLDER... [--judged FILE.json] [--show] [--keep NOTE]

A folder has, for each training file NAME.py (or .sh, .sbatch, .slurm), a file NAME.json with the mistakes
that a person wrote down before any tool ran: `{"source": "owner/repository path@commit", "mistakes":
[{"line", "end", "kind", "severity", "why", "sure"}]}`, and a folder NAME with the files that it imports, at
their places in the repository. A mistake is found if a rule for its kind reports a line of it (one more on
either side), or names such a line in its message. A finding that nobody had labelled is false, unless a
person has read it and judged otherwise: FILE.json maps "NAME:LINE:RULE" to "right" or "wrong".
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import keep

from dtctl.lint.engine import lint_paths
from dtctl.lint.model import ClusterFacts, Problem

RULES = {
    "hardcoded-addr": "DT035",
    "hardcoded-port": "DT035 DT042",
    "hardcoded-world": "DT035 DT037",
    "download-all-ranks": "DT040",
    "obsolete": "DT025 DT029 DT050",
    "rank-as-device": "DT016",
    "seed-same": "DT008",
    "find-unused": "DT010",
    "load-no-map-location": "DT052 DT007",
    "log-all-ranks": "DT054 DT018 DT014",
    "no-destroy": "DT030",
    "metric-not-reduced": "DT018 DT020 DT053 DT054",
    "no-set-epoch": "DT004",
    "eval-padding": "DT056",
    "val-not-sharded": "DT057 DT003",
    "not-sharded": "DT003 DT028",
    "no-sampler": "DT003 DT028",
    "local-rank-as-rank": "DT037 DT015",
    "collective-device": "DT043",
    "barrier-each-step": "DT046",
    "collective-each-step": "DT046 DT032",
    "sync-each-step": "DT032 DT046",
    "save-all-ranks": "DT014 DT015",
    "makedirs-race": "DT055",
    "scaler-misuse": "DT049 DT039 DT031 DT077",
    "no-zero-grad": "DT078",
    "early-exit": "DT013 DT033 DT045",
    "no-no-sync": "DT009",
    "device-wrong": "DT007 DT017 DT016",
    "no-set-device": "DT017",
    "rank-dep-schedule": "DT060",
    "rank-dep-collective": "DT011 DT012 DT013 DT045 DT036",
    "load-weights-only": "DT038",
    "launch-mismatch": "DT063 DT037",
    "sbatch": "DT041 DT062 DT063",
    "dataparallel": "DT001",
    "ddp-attr": "DT021",
    "state-prefix": "DT022",
    "optimizer-before-fsdp": "DT023",
    "clip": "DT031 DT061",
    "bypass-ddp": "DT059",
    "split-random": "DT058",
    "fsdp-clip": "DT061",
    "fsdp-wrap": "DT075 DT048",
    "fsdp-save": "DT012",
    "module-prefix": "DT022",
    "write-all-ranks": "DT014",
    "hardcoded-gpus": "DT035",
    "spawn-wrong": "DT066",
    "nondeterministic": "DT008",
    "clip-scaled": "DT031",
    "backend": "DT068",
    "resume-incomplete": "DT069",
    "result-thrown-away": "DT044",
    "seed-differs": "DT008 DT058",
    "opt-order": "DT023",
    "no-barrier-after-prep": "DT067",
    "policy": "DT048",
    "hook-step": "DT047",
    "uneven-steps": "DT013 DT045",
    "result-discarded": "DT044",
}
"""Kind of mistake -> the rules for it. A kind that is not here has no rule."""
SOME = {
    "crash": "DT000 DT021 DT025 DT026 DT027 DT044 DT048 DT067 DT070",
    "partial-data": "DT071",
}
"""Kinds of which rules find some: those that they find have a rule, the others have none."""


def labelled(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of a corpus, each with what people found in it."""
    for described in sorted(folder.glob("*.json")):
        code = next((path for suffix in (".py", ".sh", ".sbatch", ".slurm", ".job")
                     if (path := described.with_suffix(suffix)).is_file()), None)  # fmt: skip
        if code is not None:
            yield code, json.loads(described.read_text(encoding="utf-8"))


def rules_for(kind: str) -> frozenset[str]:
    """The rules that are about a kind of mistake."""
    return frozenset((RULES.get(kind) or SOME.get(kind, "")).split())


def linted(code: Path, source: str, into: Path) -> list[Problem]:
    """The findings on a file, at its place in its repository, beside what it imports."""
    place = source.partition(" ")[2].rpartition("@")[0]
    beside = code.with_suffix("")
    if beside.is_dir():
        shutil.copytree(beside, into, dirs_exist_ok=True)
    target = into / place
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(code, target)
    return lint_paths([target], cluster=ClusterFacts())


def covers(problem: Problem, mistake: dict[str, Any]) -> bool:
    """Whether a finding is about a labelled mistake."""
    first, last = mistake["line"] - 1, (mistake.get("end") or mistake["line"]) + 1
    named = [int(number) for number in re.findall(r"\bline (\d+)", problem.message)]
    here = problem.line <= last and problem.end_line >= first
    return problem.rule in rules_for(mistake["kind"]) and (here or any(first <= line <= last for line in named))


def scored(folder: Path, judged: dict[str, str]) -> dict[str, Any]:
    """The figures of a folder, and everything that was missed or is false."""
    kinds: Counter[str] = Counter()
    found: Counter[str] = Counter()
    said: Counter[str] = Counter()
    right: Counter[str] = Counter()
    missed, false, repositories = [], [], set()
    for code, described in labelled(folder):
        repositories.add(described["source"].split()[0])
        with tempfile.TemporaryDirectory() as into:
            problems = linted(code, described["source"], Path(into))
        mistakes = [mistake for mistake in described["mistakes"] if mistake.get("sure", True)]
        for mistake in mistakes:
            kinds[mistake["kind"]] += 1
            if any(covers(problem, mistake) for problem in problems):
                found[mistake["kind"]] += 1
            else:
                kind, level = mistake["kind"], mistake["severity"]
                missed.append(f"{code.name}:{mistake['line']}: {kind} ({level}): {mistake['why']}")
        for problem in problems:
            said[problem.severity] += 1
            verdict = judged.get(f"{code.name}:{problem.line}:{problem.rule}")
            if verdict == "right" or (
                verdict is None and any(covers(problem, mistake) for mistake in described["mistakes"])
            ):
                right[problem.severity] += 1
            else:
                place = f"{code.name}:{problem.line}"
                verdict = verdict or "not labelled"
                false.append(f"{place}: {problem.severity} {problem.rule} ({verdict}): {problem.message}")
    with_rule = {kind: found[kind] if kind in SOME else number for kind, number in kinds.items() if rules_for(kind)}
    return {
        "files": sum(1 for _ in labelled(folder)),
        "repositories": len(repositories),
        "mistakes": sum(kinds.values()),
        "found": sum(found.values()),
        "recall_all": ratio(sum(found.values()), sum(kinds.values())),
        "recall_with_rule": ratio(sum(found[kind] for kind in with_rule), sum(with_rule.values())),
        "findings": dict(said),
        "right": {level: f"{right[level]} of {said[level]}" for level in said},
        "kinds": {kind: f"{found[kind]} of {kinds[kind]}" for kind in sorted(kinds, key=lambda one: -kinds[one])},
        "missed": missed,
        "false": false,
    }


def ratio(part: int, whole: int) -> float:
    """A share, rounded; 1.0 of nothing."""
    return round(part / whole, 3) if whole else 1.0


def main() -> None:
    """Score a folder and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="their names are those of the figures: learn, held")
    parser.add_argument("--judged", type=Path, help="verdicts on findings that nobody had labelled")
    parser.add_argument("--show", action="store_true", help="print every miss and every false finding")
    parser.add_argument("--keep", metavar="NOTE", help="write benchmarks/results/lint-corpus-DATE.json, with a note")
    given = parser.parse_args()
    judged = json.loads(given.judged.read_text(encoding="utf-8")) if given.judged else {}
    figures = {folder.name: scored(folder, judged) for folder in given.folders}
    for name, figure in figures.items():
        short = {key: value for key, value in figure.items() if key not in ("missed", "false")}
        print(name, json.dumps(short, indent=1))
        for one in [*figure["missed"], *figure["false"]] if given.show else ():
            print(one)
    if given.keep:
        keep("lint-corpus", {"date": time.strftime("%Y-%m-%d %H:%M"), "note": given.keep, **figures})


if __name__ == "__main__":
    main()
