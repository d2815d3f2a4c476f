"""`python -m dtctl.runtime.snapshot VERB PLACE`: one JSON object on standard output, exit code 10 on damage.

`dtctl snapshot` runs it on the machine of the snapshots, and prints the result in human-readable form.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dtctl.errors import DtctlError, SnapshotError
from dtctl.runtime.snapshot import commands
from dtctl.runtime.snapshot.storage.place import Place, parse_place


def main(argv: list[str]) -> int:
    """Run one command, and return the exit code."""
    options = _parse_snapshot_options(argv)
    try:
        answer = _run_snapshot_command(options, parse_place(options.place))
    except DtctlError as exc:
        answer = {"error": exc.message, "where": exc.where, "hint": exc.hint}
        code = exc.exit_code
    else:
        damaged = any(row.get("status", "ok") != "ok" for row in answer.get("snapshots", []))
        code = SnapshotError.exit_code if damaged else 0
    # Standard output is reserved for the data of a sent or exported file.
    stream = sys.stderr if options.verb == "send" or getattr(options, "out", None) == "-" else sys.stdout
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
    return code


def _run_snapshot_command(options: argparse.Namespace, where: Place) -> dict[str, Any]:
    if options.verb == "prune":
        rule = {"keep": options.keep, "every_s": options.every_s, "keep_best": not options.no_best}
        return commands.prune_snapshot_folder(where, **rule, dry_run=options.dry_run)
    if options.verb == "remove":
        return commands.remove_snapshot_steps(where, options.step)
    if options.verb == "export":
        out = sys.stdout.buffer if options.out == "-" else Path(options.out)
        return commands.export_snapshot_part(where, part=options.part, out=out)
    if options.verb == "send":
        return commands.send_snapshot_files(where, step=options.step, names=options.name, out=sys.stdout.buffer)
    simple = {
        "ls": commands.list_snapshots,
        "pieces": commands.list_good_files,
        "verify": commands.verify_snapshots,
        "show": commands.describe_newest_snapshot,
        "digest": commands.compute_snapshot_digest,
    }
    return simple[options.verb](where)


def _parse_snapshot_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dtctl.runtime.snapshot")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("ls", "verify", "show", "digest", "prune", "export", "pieces", "send", "remove"):
        sub = verbs.add_parser(verb)
        sub.add_argument("place")
        if verb == "prune":
            sub.add_argument("--keep", type=int)
            sub.add_argument("--every-s", type=float)
            sub.add_argument("--no-best", action="store_true")
            sub.add_argument("--dry-run", action="store_true")
        if verb == "remove":
            sub.add_argument("--step", type=int, action="append", required=True)
        if verb == "export":
            sub.add_argument("--part", default="model")
            sub.add_argument("--out", required=True)
        if verb == "send":
            sub.add_argument("--step", type=int, required=True)
            sub.add_argument("--name", action="append", required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
