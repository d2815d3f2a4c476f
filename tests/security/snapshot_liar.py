"""A node's Python that lies about snapshots: `python snapshot_liar.py LIE -c ... MODULE VERB FOLDER ...`.

Runs what it was asked to run, and changes what that says. Imports nothing of dtctl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Said = tuple[bytes, bytes]
"""Standard output and standard error."""
Lie = Callable[[bytes, bytes], Said]


def rows(change: Callable[[dict[str, Any]], object]) -> Lie:
    """Change every row of an answer to `pieces`."""

    def lie(out: bytes, err: bytes) -> Said:
        answer = json.loads(out)
        for row in answer["rows"]:
            change(row)
        return json.dumps(answer).encode() + b"\n", err

    return lie


def manifests(change: Callable[[dict[str, Any]], object]) -> Lie:
    """Change the manifests in the rows, whose commit records then are others'."""

    def inner(row: dict[str, Any]) -> None:
        document = json.loads(row["manifest"])
        change(document)
        row["manifest"] = json.dumps(document)

    return rows(inner)


def words(change: Callable[[dict[str, Any]], object]) -> Lie:
    """Change what is said at the end of a `send` or an `export`."""

    def lie(out: bytes, err: bytes) -> Said:
        answer = json.loads(err)
        change(answer)
        return out, json.dumps(answer).encode() + b"\n"

    return lie


def endless(*_: bytes) -> Said:
    while True:
        os.write(1, b"x" * 65536)


EVIL = "\x1b]0;mine\x07[/red]\u202e"
LIES: dict[str, tuple[str, str, Lie]] = {
    # what it is asked -> by which command, and the lie
    "no rows": ("pieces", "show", lambda _out, err: (b'{"rows": 7}\n', err)),
    "no JSON": ("pieces", "show", lambda _out, err: (b"{\n", err)),
    "nothing": ("pieces", "verify", lambda _out, _err: (b"", b"")),
    "a traceback of markup": ("pieces", "show", lambda _out, _err: (b"", EVIL.encode())),
    "a deep answer": ("pieces", "show", lambda _out, err: (b"[" * 100_000 + b"]" * 100_000 + b"\n", err)),
    "an answer without end": ("pieces", "show", endless),
    "an answer that never comes": ("pieces", "ls", lambda _out, err: (time.sleep(10_000) or b"", err)),
    "an error of markup": ("pieces", "show", lambda _out, err: (json.dumps({"error": EVIL}).encode() + b"\n", err)),
    "files above the folder": ("pieces", "export", rows(lambda row: row.update(good=["../../x"]))),
    "files in the root": ("pieces", "export", rows(lambda row: row.update(good=["/etc/passwd"]))),
    "files of numbers": ("pieces", "export", rows(lambda row: row.update(good=[1, None]))),
    "a step below nothing": ("pieces", "verify", rows(lambda row: row.update(step=-1))),
    "a step of text": ("pieces", "verify", rows(lambda row: row.update(step="1"))),
    "a time that is not a number": ("pieces", "prune", rows(lambda row: row.update(made_s=float("nan")))),
    "a newer one than there is": ("pieces", "prune", rows(lambda row: row.update(step=row["step"] + 1000))),
    "its rows a thousand times": (
        "pieces", "verify",
        lambda out, err: (json.dumps({"rows": json.loads(out)["rows"] * 1000}).encode() + b"\n", err),
    ),
    "it keeps nothing": ("pieces", "prune", manifests(lambda it: it["facts"].update(retention={"keep": -9}))),
    "all is bad": ("pieces", "prune", rows(lambda row: row.update(good=[], bad=["x" * 100]))),
    "names in the manifest that are paths": (
        "pieces", "export", manifests(lambda it: it["files"].update({"../../../x": {"size_bytes": 1, "digest": "0"}})),
    ),
    "sizes without end": (
        "pieces", "export", manifests(lambda it: [one.update(size_bytes=1 << 62) for one in it["files"].values()]),
    ),
    "it has all the files": (
        "pieces", "export", rows(lambda row: row.update(good=[*json.loads(row["manifest"])["files"]])),
    ),
    "it sends nothing": ("send", "export", lambda _out, err: (b"", err)),
    "it sends less": ("send", "export", lambda out, err: (out[:-1], err)),
    "it sends more": ("send", "export", lambda out, err: (out + b"x", err)),
    "it sends without end": ("send", "export", endless),
    "it sends something else": ("send", "export", lambda out, err: (bytes(len(out)), err)),
    "it sends an archive": ("send", "export", lambda out, err: (b"../../x".ljust(100, b"\0") + bytes(len(out)), err)),
    "it sends and says nothing": ("send", "export", lambda out, _err: (out, b"")),
    "it sends and says another step": ("send", "export", words(lambda answer: answer.update(step=-1))),
    "it sends and says a path of markup": ("send", "export", words(lambda answer: answer.update(path=EVIL))),
    "it sends and says a megabyte": ("send", "export", lambda out, _err: (out, b"x" * (1 << 20))),
}  # fmt: skip


AS_WITHOUT_SNAPSHOTS = ("an error of markup",)
"""What a node without snapshots says too, which is in order: the others are looked at."""


def main(name: str, argv: list[str]) -> None:
    done = subprocess.run([sys.executable, *argv], capture_output=True, check=False)
    asked, _, lie = LIES[name]
    out, err = lie(done.stdout, done.stderr) if argv[3] == asked else (done.stdout, done.stderr)
    sys.stdout.buffer.write(out)
    sys.stdout.flush()
    sys.stderr.buffer.write(err)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
