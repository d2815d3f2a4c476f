"""A snapshot of which every node of a run has a part: what it is worth as a whole, and bringing it together."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtctl.errors import SnapshotError
from dtctl.launch.snapshots import RunSnapshots, error_of

RECORDS = ("manifest.json", "COMMIT")


@dataclass(slots=True, kw_only=True)
class Spread:
    """One snapshot over all nodes that have something of it."""

    step: int
    path: str
    """On the first node that has some of it."""
    nodes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Of the manifest."""
    holders: dict[str, str] = field(default_factory=dict)
    """File -> a node where it is right."""
    complete: list[str] = field(default_factory=list)
    """Nodes that have all of it."""
    wrong: list[str] = field(default_factory=list)
    made_s: float = 0.0
    """When the first node of these had it, seconds since the epoch."""

    @property
    def whole(self) -> bool:
        """Whether every file is right on some node."""
        return bool(self.files) and all(name in self.holders for name in self.files)

    def row(self) -> dict[str, Any]:
        """As `dtctl snapshot verify` tells it: it is ok if it can be read, and a bad copy is named all the same."""
        missing = [f"{name} is missing" for name in self.files if name not in self.holders]
        known = [name for name in missing if not any(name.split(" ")[0] in phrase for phrase in self.wrong)]
        status = "ok" if self.whole else "corrupt" if self.wrong and self.files else "incomplete"
        bad = [*self.wrong, *known]
        return {"path": self.path, "step": self.step, "status": status, "bad": bad, "node": ", ".join(self.nodes)}


def spread(answers: Mapping[str, Mapping[str, Any]]) -> list[Spread]:
    """What the nodes have together, newest first, by what each says of its `pieces`.

    Snapshots of one step belong together if they have one commit record.
    """
    found: dict[tuple[int, str], Spread] = {}
    for node, answer in answers.items():
        for row in answer["rows"]:
            key = (row["step"], row["record"] or node)
            one = found.setdefault(key, Spread(step=row["step"], path=row["path"], made_s=row["made_s"]))
            one.nodes.append(node)
            one.files = row["files"]
            if one.files and set(one.files) <= set(row["good"]):
                one.complete.append(node)
            one.holders = {**dict.fromkeys(row["good"], node), **one.holders}
            one.wrong += [f"{node}: {phrase}" for phrase in row["bad"]]
    return sorted(found.values(), key=lambda one: -one.step)


def removable(found: Sequence[Spread], stays: Collection[int], *, all_told: bool) -> list[Spread]:
    """What `dtctl snapshot prune` removes of what nodes have together.

    Args:
        found: newest first.
        stays: steps of whole ones that are kept.
        all_told: whether every node of the run has answered; what seems to lack something may lie on one that has not.
    """
    newest = next((one.step for one in found if one.whole), None)
    if newest is None:  # nothing vouches for anything
        return []

    def goes(one: Spread) -> bool:
        if one.step in stays:  # also where a node has another one of the same step: it is asked by step
            return False
        # One that lacks something and is newer may be on its way: nodes commit one after another.
        under_way = one.step > newest and one.row()["status"] == "incomplete"
        return one.whole or (all_told and not under_way)

    return [one for one in found if goes(one)]


@contextmanager
def brought(run: RunSnapshots, one: Spread) -> Iterator[Path]:
    """A folder here that has all of a snapshot, as long as the context lasts.

    Raises:
        SnapshotError: something did not arrive.
        TransportError: a node, or the way to it, fails.
    """
    shares: dict[str, list[str]] = {}
    for name in one.files:
        shares.setdefault(one.holders[name], []).append(name)
    first = next(iter(shares))
    shares[first] = [*RECORDS, *shares[first]]
    with tempfile.TemporaryDirectory(prefix="dtctl-snapshot-") as temporary:
        target = Path(temporary, Path(one.path).name)
        target.mkdir()
        for node, names in shares.items():
            _bring(run, node, one.step, names, target)
        yield Path(temporary)


def _bring(run: RunSnapshots, node: str, step: int, names: Sequence[str], target: Path) -> None:
    options = ["--step", str(step), *(word for name in names for word in ("--name", name))]
    with tempfile.TemporaryFile(dir=target.parent) as archive:
        told = run.fetch(node, "send", options, archive)
        if "error" in told.answer:
            raise error_of(told)
        archive.seek(0)
        with tarfile.open(fileobj=archive, mode="r:") as members:
            for member in members:
                # Only what was asked for: a name is no path.
                content = members.extractfile(member) if member.name in names else None
                if content is None:
                    raise SnapshotError(f"{member.name} was not asked for", where=f"node {node}")
                with (target / member.name).open("wb") as out:
                    while chunk := content.read(1 << 20):
                        out.write(chunk)
