"""Release notes of a tag: `python .ci/release.py v0.1.0` prints what CHANGELOG.md says of that version.

The version stands in dtctl/__init__.py alone. It is no output of git, because it is part of what a run records and a
resume compares, also where the code has come without its history: on nodes, from a tarball. So a tag cannot make
another one, and this refuses a tag that says so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version(root: Path = ROOT) -> str:
    """The version that a build would have."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "dtctl/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("error: dtctl/__init__.py names no version")
    return found[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """What changed in the version of a tag."""
    if tag != f"v{version(root)}":
        raise SystemExit(f"error: the tag is {tag}, and dtctl/__init__.py says {version(root)}")
    parts = re.split(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        name, _, date = heading.partition(" - ")
        if name == version(root):
            if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
                raise SystemExit(f"error: CHANGELOG.md has no date for {name}: `## {heading}`")
            return text.strip()
    raise SystemExit(f"error: CHANGELOG.md says nothing about {version(root)}")


if __name__ == "__main__":
    print(notes(*sys.argv[1:]))
