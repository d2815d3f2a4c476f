"""Tell how old each figure is: the date, the commit, and how many lines of the files that it measures changed since.

python benchmarks/ages.py            a table of all figures
python benchmarks/ages.py --check    exit code 1 if one on the front page is too old; part of `make dist-check`
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from questions import Answer

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
"""Changed lines of its files after which a figure on the front page has to be measured again."""


@dataclass(frozen=True, slots=True)
class Age:
    """When a result was measured, and what has changed since."""

    file: str
    date: str
    """As 2026-11-27."""
    commit: str
    """Empty where the history does not know it."""
    changed_lines: int | None
    """Added and removed lines of the measured files in HEAD; None where the history does not tell."""

    def describe(self) -> str:
        """Return one sentence."""
        measured = f"Measured on {self.date}" + (f" at {self.commit[:10]}" if self.commit else "")
        if self.changed_lines is None:
            return f"{measured}; an unknown number of lines of the files that it measures changed since."
        return f"{measured}; {self.changed_lines:,} lines of the files that it measures changed since."


def find_age(answer: Answer) -> Age:
    """Return the age of an answer, which is that of its oldest file by changed lines."""
    ages = [_find_age_of(file, answer.measures) for file in answer.files]
    return max(ages, key=lambda age: (age.changed_lines is None, age.changed_lines or 0))


def mask_lines(text: str) -> str:
    """Return a text without its numbers of changed lines, which each commit changes."""
    return re.sub(r"; [\d,]+ lines of the files that it measures", "; N lines of the files that it measures", text)


@cache
def _find_age_of(file: str, measures: tuple[str, ...]) -> Age:
    kept = json.loads((ROOT / file).read_text(encoding="utf-8"))
    stamp = re.search(r"(\d{4})(\d\d)(\d\d)-\d{4}\.json$", file)
    date = "-".join(stamp.groups()) if stamp else ""
    # Results of before 2026-11-25 do not name their commit: they were committed right after they had been measured.
    commit = kept.get("commit") or _git("log", "--diff-filter=A", "--format=%H", "-1", "--", file)
    return Age(file, date, commit, _count_changed_lines(commit, measures) if commit else None)


def _count_changed_lines(commit: str, paths: Sequence[str]) -> int | None:
    if not _git("cat-file", "-t", commit):
        return None
    rows = _git("diff", "--numstat", commit, "HEAD", "--", *paths).splitlines()
    return sum(int(number) for row in rows for number in row.split("\t")[:2] if number.isdigit())


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def find_too_old(answers: Sequence[Answer], limit: int = MAX_LINES) -> list[str]:
    """Return a line for each answer whose figures are older than a number of changed lines, or of unknown age."""
    found = []
    for answer in answers:
        age = find_age(answer)
        if age.changed_lines is None or age.changed_lines > limit:
            found.append(f"{answer.question} {age.describe()} Measure again: {answer.command}")
    return found


def main() -> int:
    """Print ages, or check those of the front page."""
    from questions import answers
    from readme import IN_README, filled

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only the front page; exit code 1 if one is too old")
    options = parser.parse_args()
    if not options.check:
        for answer in answers():
            age = find_age(answer)
            lines = "unknown" if age.changed_lines is None else f"{age.changed_lines:,}"
            print(f"{answer.slug:<12}{age.date:<12}{age.commit[:10]:<12}{lines:>8} lines  {age.file}")
        return 0
    old = find_too_old([answer for answer in answers() if answer.slug in IN_README])
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not old and filled(text) != text:
        old.append("README.md shows other figures or ages than the newest results have: python benchmarks/readme.py")
    for line in old:
        print(f"error: {line}", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    raise SystemExit(main())
