"""Power failures: `python power.py FOLDER OUT PROGRAM` runs a program, and writes down what a disk could have.

This is done at each of its steps: before and after each fsync, and before each change of a name.

A disk has of a file what it had at its last fsync, and in a folder the names that it had at that folder's last fsync;
of what came later it may have anything: nothing, all names, or some of them. Each of these is rebuilt below OUT, as
`POINT-KIND`, together with `POINT.done`, the lines that the program had printed by then.
"""

from __future__ import annotations

import os
import random
import stat
import sys
from pathlib import Path

WATCHED = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "open"}


class Disk:
    """What of a folder has reached the disk."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self.names: dict[int, dict[str, int]] = {}
        self.kinds: dict[int, bool] = {}
        self.contents: dict[int, bytes] = {}
        self.kept: list[int] = []
        self.points, self.busy = 0, False
        self.done: list[str] = []
        self.chance = random.Random(0)
        self.sync(folder)

    def inode(self, path: Path) -> int:
        """A number that no later file has: what it means is held open."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        info = os.fstat(fd)
        if info.st_ino in self.kinds:
            os.close(fd)
        else:
            self.kept.append(fd)
            self.kinds[info.st_ino] = stat.S_ISDIR(info.st_mode)
        return info.st_ino

    def now(self, folder: Path) -> dict[str, int]:
        return {path.name: self.inode(path) for path in folder.iterdir()}

    def sync(self, path: Path) -> None:
        number = self.inode(path)
        if self.kinds[number]:
            self.names[number] = self.now(path)
        else:
            self.contents[number] = path.read_bytes()

    def point(self) -> None:
        """The power fails here."""
        for kind in ("least", "most", "some"):
            place = self.out / f"{self.points:03d}-{kind}"
            self.rebuild(self.inode(self.folder), place, kind, self.folder)
        (self.out / f"{self.points:03d}.done").write_text("".join(self.done))
        self.points += 1

    def rebuild(self, number: int, place: Path, kind: str, real: Path | None) -> None:
        if not self.kinds[number]:
            place.write_bytes(self.contents.get(number, b""))
            return
        place.mkdir()
        names = self.names.get(number, {})
        current = self.now(real) if real is not None and real.is_dir() else names
        if kind == "most":
            names = current
        elif kind == "some":
            chosen = {name: self.chance.choice((names, current)).get(name) for name in {**names, **current}}
            names = {name: inner for name, inner in chosen.items() if inner is not None}
        for name, inner in names.items():
            there = real / name if real is not None and current.get(name) == inner else None
            self.rebuild(inner, place / name, kind, there)


def main(folder: Path, out: Path, program: Path) -> None:
    disk = Disk(folder, out)

    def step() -> None:
        if not disk.busy:
            disk.busy = True
            disk.point()
            disk.busy = False

    def synced(descriptor: int) -> None:
        step()
        disk.busy = True
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(folder):
            disk.sync(path)
        disk.busy = False
        step()

    def seen(event: str, arguments: tuple[object, ...]) -> None:
        if event in WATCHED and not disk.busy:
            writes = event != "open" or (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))
            if writes:
                step()

    def say(text: str) -> None:
        disk.done.append(f"{text}\n")
        step()

    os.fsync = synced
    sys.addaudithook(seen)
    exec(compile(program.read_text(), str(program), "exec"), {"folder": folder, "say": say})
    step()


if __name__ == "__main__":
    main(*[Path(os.path.realpath(word)) for word in sys.argv[1:4]])
