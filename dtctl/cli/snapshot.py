"""`dtctl snapshot`: inspect a run's snapshots at the place where they are stored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import DtctlError, LaunchError, SnapshotError
from dtctl.launch.snapshot_answers import (
    A,
    ExportAnswer,
    NewestGoodSnapshot,
    PruneAnswer,
    RemoveAnswer,
    SnapshotContents,
    SnapshotDigest,
    SnapshotListing,
    SnapshotParts,
    SnapshotVerification,
)
from dtctl.schema import Record

if TYPE_CHECKING:
    from dtctl.launch.collect_snapshot import PruneRule
    from dtctl.launch.snapshots import RunSnapshots

Newest = TypeVar("Newest", bound=NewestGoodSnapshot)
app = typer.Typer(help="Inspect snapshots in a folder, or those of a run on its nodes.", no_args_is_help=True)


def _resolve_snapshot_place(place: str | None) -> str | None:
    """Return the folder of snapshots instead of the name, if the run is a job of Slurm: all of its nodes share it."""
    from dtctl.launch.records.record import find_run
    from dtctl.launch.snapshots import is_folder

    if is_folder(place):
        return place
    try:
        record = find_run(Path.cwd(), place)
        slurm = record.info().slurm
    except LaunchError:
        return place  # the command reports a better error
    if not slurm:
        return place
    from dtctl.slurm.job_watcher import snapshot_folder

    return snapshot_folder(record)


Place = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR|RUN",
        help="A folder, a URL, or a run.  [default: the newest run]",
        show_default=False,
        callback=_resolve_snapshot_place,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@app.command("ls")
def ls(place: Place = None, json_: Json = False) -> int:
    """List snapshots; nothing is verified."""
    answers, silent = _collect_node_answers(SnapshotListing, place, [])
    rows = _by_step((node, row) for node, answer in answers.items() for row in answer.snapshots)
    if json_:
        output.emit_json({"snapshots": rows})
    else:
        cells = [
            [
                str(row["step"]),
                "yes" if row["committed"] else "no",
                f"{row['size_bytes'] / 2**20:.1f}",
                _format_snapshot_place(row),
            ]
            for row in rows
        ]
        output.print_table(cells, header=["STEP", "COMMITTED", "MIB", "PATH"])
    return _choose_exit_code(silent)


@app.command("verify", short_help="Compare every byte of every snapshot with its digest.")
def verify(place: Place = None, json_: Json = False) -> int:
    """Read every byte of every snapshot and compare digests; exit code 10 if one is damaged."""
    from dtctl.launch import snapshots
    from dtctl.launch.collect_snapshot import merge_node_snapshots

    if snapshots.is_folder(place):
        verified, silent = _collect_node_answers(SnapshotVerification, place, [])
        rows = _by_step((node, row) for node, answer in verified.items() for row in answer.snapshots)
    else:
        parts, silent = _of_all_nodes(SnapshotParts, _find_run_snapshots(place), [])
        rows = [snapshot.to_row() for snapshot in merge_node_snapshots(parts)]
    good = [row["path"] for row in rows if row["status"] == "ok"]
    newest = good[0] if good else None
    if json_:
        output.emit_json({"snapshots": rows, "newest_good": newest})
    else:
        for row in rows:
            colour = "green" if row["status"] == "ok" else "red"
            output.print_stdout(f"{row['status']}: {_format_snapshot_place(row)}", colour)
            for phrase in row["bad"]:
                output.print_stdout(f"  {phrase}")
        output.print_stdout(f"newest good: {newest or 'none'}")
    damaged = not rows or any(row["status"] != "ok" or row["bad"] for row in rows)
    return SnapshotError.exit_code if damaged else _choose_exit_code(silent)


@app.command("show", short_help="Show what the newest good snapshot consists of.")
def show(place: Place = None, json_: Json = False) -> int:
    """Show what the newest good snapshot consists of, and what it was made with."""
    answer, places = _find_newest_snapshot(SnapshotContents, place, [])
    if json_:
        output.emit_json(_build_answer_json(answer) | places)
        return 0
    output.print_stdout(f"step {answer.step}: {_format_snapshot_place(_build_answer_json(answer) | places)}", "bold")
    for key, value in answer.facts.get("circumstances", {}).items():
        output.print_stdout(f"  {key}: {value}")
    rows = [[name, str(file.size_bytes), file.digest] for name, file in answer.files.items()]
    output.print_table(rows, header=["FILE", "BYTES", answer.hash.upper()])
    tensors = [[name, tensor.dtype, str(tensor.shape)] for name, tensor in answer.tensors.items()]
    output.print_table(tensors, header=["TENSOR", "DTYPE", "SHAPE"])
    return 0


@app.command("digest", short_help="Print a digest of the newest good model and optimizer.")
def digest(place: Place = None, json_: Json = False) -> int:
    """Print the digest of the newest good snapshot's model and optimizer; the same for any number of ranks."""
    answer, _ = _find_newest_snapshot(SnapshotDigest, place, [])
    if json_:
        output.emit_json({"step": answer.step, "digest": answer.digest})
    else:
        output.print_stdout(f"{answer.digest}  step {answer.step}")
    return 0


@app.command("prune", short_help="Remove old and damaged snapshots.")
def prune(
    place: Place = None,
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="How many of the newest good ones stay.  [default: the run's setting]"),
    ] = None,
    every_h: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Also keep older ones, this many hours apart.")
    ] = None,
    no_best: Annotated[bool, typer.Option("--no-best", help="Also remove the best ones.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    json_: Json = False,
) -> int:
    """Remove old and damaged snapshots; nothing is removed while there is no good one."""
    from dtctl.launch import snapshots

    every_s = None if every_h is None else every_h * 3600
    if snapshots.is_folder(place):
        options = []
        if keep is not None:
            options += ["--keep", str(keep)]
        if every_s is not None:
            options += ["--every-s", str(every_s)]
        if no_best:
            options.append("--no-best")
        if dry_run:
            options.append("--dry-run")
        answers, silent = _collect_node_answers(PruneAnswer, place, options)
        results: list[dict[str, Any]] = [
            {"kept": answer.kept, "removed": answer.removed, "left": answer.left} for answer in answers.values()
        ]
    else:
        from dtctl.launch.collect_snapshot import PruneRule

        rule = PruneRule(keep=keep, every_s=every_s, keep_best=not no_best)
        results, silent = _prune_run(_find_run_snapshots(place), rule, dry_run=dry_run)
    if json_:
        output.emit_json({"places": results, "dry_run": dry_run})
    verb = "would remove" if dry_run else "removed"
    for snapshot in results:
        node = snapshot.get("node")
        at = f"{node}:" if node else ""
        if not json_:
            for path in snapshot["removed"]:
                output.print_stdout(f"{verb} {at}{path}")
            on_node = f" on {node}" if node else ""
            output.print_stdout(f"kept {len(snapshot['kept'])}{on_node}")
        for path in snapshot["left"]:
            output.print_stderr(f"not removed: {at}{path} is a link, or something is mounted in it", "yellow")
    return SnapshotError.exit_code if any(snapshot["left"] for snapshot in results) else _choose_exit_code(silent)


def _prune_run(run: RunSnapshots, rule: PruneRule, *, dry_run: bool) -> tuple[list[dict[str, Any]], list[DtctlError]]:
    """Prune a run's snapshots by the parts on all nodes; return the paths that each node keeps and loses."""
    from dtctl.launch import collect_snapshot

    answers, silent = _of_all_nodes(SnapshotParts, run, [])
    snapshots_found = collect_snapshot.merge_node_snapshots(answers)
    rows = []
    for node, answer in answers.items():
        outdated = collect_snapshot.list_removable_snapshots(snapshots_found, rule, node, all_answered=not silent)
        steps = {snapshot.step for snapshot in outdated}
        unremoved: list[str] = []
        if steps and not dry_run:
            removal = run.query_nodes(
                RemoveAnswer, [word for step in sorted(steps) for word in ("--step", str(step))], [node]
            )[node]
            if isinstance(removal, DtctlError):
                raise removal
            unremoved = removal.left
        remaining = [row.path for row in answer.rows if row.step not in steps]
        removed = [row.path for row in answer.rows if row.step in steps and row.path not in unremoved]
        rows.append({"kept": remaining, "removed": removed, "left": unremoved, "node": node})
    return rows, silent


@app.command("export", short_help="Write the weights as a safetensors file.")
def export(
    place: Place = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="File to write.")] = Path(
        "model.safetensors"
    ),
    part: Annotated[str, typer.Option(metavar="PART", help="Which part: model, optimizer, ema ...")] = "model",
    json_: Json = False,
) -> int:
    """Write the weights of the newest good snapshot as a safetensors file."""
    from dtctl.launch import snapshots

    if snapshots.is_folder(place):
        answer, places = _find_newest_snapshot(ExportAnswer, place, ["--part", part, "--out", str(out)])
    else:
        answer, places = _find_newest_on_nodes(ExportAnswer, _find_run_snapshots(place), ["--part", part], out)
        places |= {"out": str(out)}
    if json_:
        output.emit_json(_build_answer_json(answer) | places)
    else:
        file = places.get("out", answer.out)
        output.print_stdout(f"{file}: {part} of step {answer.step}, {answer.size_bytes / 2**20:.1f} MiB")
    return 0


def _fetch_export_file(
    source: RunSnapshots, node: str, kind: type[Newest], options: Sequence[str], out: Path, *, limit_bytes: int
) -> Newest:
    from dtctl import folders

    draft = out.with_name(f".{out.name}.{os.getpid()}.draft")
    created = False
    try:
        folder = os.open(draft.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fd = folders.create_in(folder, draft.name, 0o666)
        finally:
            os.close(folder)
        created = True
        with os.fdopen(fd, "wb") as stream:
            answer = source.fetch(node, kind, [*options, "--out", "-"], stream, limit_bytes=limit_bytes)
            stream.flush()
            os.fsync(stream.fileno())
        if not isinstance(answer, ExportAnswer) or draft.stat().st_size != answer.size_bytes:
            raise SnapshotError("the export arrived incomplete", where=f"node {node}", hint="try again")
        draft.replace(out)
        folders.sync_folder_entries(str(out.absolute().parent))
    except OSError as exc:
        raise SnapshotError(f"the export cannot be written: {exc}", where=str(out)) from exc
    finally:
        if created:
            draft.unlink(missing_ok=True)
    return answer


EXPORT_HEADER_BYTES = 64 << 20


def _find_run_snapshots(place: str | None) -> RunSnapshots:
    from dtctl.launch.records.record import find_run
    from dtctl.launch.snapshots import RunSnapshots

    try:
        return RunSnapshots(find_run(Path.cwd(), place))
    except LaunchError as exc:
        if place is None or (Path.cwd() / names.STATE_DIR / names.RUNS_DIR / place).is_dir():
            raise
        raise SnapshotError(f"{place} is neither a folder nor a run", where=exc.where, hint=exc.hint) from exc


def _collect_node_answers(
    kind: type[A], place: str | None, options: Sequence[str]
) -> tuple[dict[str | None, A], list[DtctlError]]:
    """Return the answers by node (None: this machine), and the errors of nodes that do not answer.

    Raises:
        DtctlError: no node answers.
    """
    from dtctl.launch import snapshots

    if snapshots.is_folder(place):
        return {None: snapshots.run_here(kind, [str(place), *options])}, []
    answers, silent = _of_all_nodes(kind, _find_run_snapshots(place), options)
    return dict[str | None, A](answers.items()), silent


def _of_all_nodes(kind: type[A], run: RunSnapshots, options: Sequence[str]) -> tuple[dict[str, A], list[DtctlError]]:
    """Return the answers of a run's nodes, and the errors of those that do not answer."""
    replies = run.query_nodes(kind, options)
    answers = {node: reply for node, reply in replies.items() if not isinstance(reply, DtctlError)}
    errors = [reply for reply in replies.values() if isinstance(reply, DtctlError)]
    # A node without snapshots is no error: in many runs only the first node has them.
    silent = [error for error in errors if not isinstance(error, SnapshotError)]
    if not answers:
        raise (silent or errors)[0]
    for error in silent:
        output.print_error_with_hint(error)
    return answers, silent


def _find_newest_snapshot(
    kind: type[Newest], place: str | None, options: Sequence[str]
) -> tuple[Newest, dict[str, str]]:
    """Return the answer with the newest good snapshot, and its place on a run's nodes; report newer bad ones."""
    from dtctl.launch import snapshots

    if not snapshots.is_folder(place):
        return _find_newest_on_nodes(kind, _find_run_snapshots(place), options)
    answer = snapshots.run_here(kind, [str(place), *options])
    for reason in answer.rejected:
        output.print_stderr(f"skipped: {reason}", "yellow")
    return answer, {}


def _find_newest_on_nodes(
    kind: type[Newest], run: RunSnapshots, options: Sequence[str], out: Path | None = None
) -> tuple[Newest, dict[str, str]]:
    """Return the newest good snapshot of a run, from a node that has all of it, or else from parts of several nodes."""
    from dtctl.launch import collect_snapshot, snapshots

    answers, _ = _of_all_nodes(SnapshotParts, run, [])
    candidates = collect_snapshot.merge_node_snapshots(answers)
    chosen = next((snapshot for snapshot in candidates if snapshot.is_readable), None)
    newer = candidates[: candidates.index(chosen)] if chosen is not None else candidates
    reasons = []
    for snapshot in newer:
        row = snapshot.to_row()
        reasons.append(f"{Path(snapshot.path).name} is {row['status']}: {'; '.join(row['bad'])}")
    if chosen is None:
        reason = f"there is no good snapshot: {'; '.join(reasons)}" if reasons else "there is no snapshot"
        raise SnapshotError(reason, where=", ".join(answers))
    for reason in reasons:
        output.print_stderr(f"skipped: {reason}", "yellow")
    if not chosen.complete:
        with collect_snapshot.fetch_whole_snapshot(run, chosen) as folder:
            try:
                to_file = ["--out", str(out)] if out else []
                answer = snapshots.run_here(kind, [str(folder), *options, *to_file])
            except SnapshotError as exc:
                holders = chosen.holders
                senders = {node for name, node in holders.items() if name in exc.message} or {*holders.values()}
                raise SnapshotError(exc.message, where=f"sent by {', '.join(sorted(senders))}", hint=exc.hint) from exc
        return answer, {"path": chosen.path, "node": ", ".join(chosen.nodes)}
    node = chosen.complete[0]
    if out is not None:
        # Tensors are written without gaps, behind a header that is smaller than those of the files.
        limit_bytes = sum(chosen.sizes.values()) + EXPORT_HEADER_BYTES
        return _fetch_export_file(run, node, kind, options, out, limit_bytes=limit_bytes), {"node": node}
    reply = run.query_nodes(kind, options, [node])[node]
    if isinstance(reply, DtctlError):
        raise reply
    return reply, {"path": chosen.path, "node": node}


def _build_answer_json(record: Record) -> dict[str, Any]:
    """Return an answer as JSON."""
    document: dict[str, Any] = json.loads(json.dumps(record, default=Record.to_json))
    return document


def _by_step(rows: Iterable[tuple[str | None, Record]]) -> list[dict[str, Any]]:
    documents = [{**_build_answer_json(row), **_build_node_field(node)} for node, row in rows]
    return sorted(documents, key=lambda row: -int(row["step"]))


def _build_node_field(node: str | None) -> dict[str, str]:
    return {} if node is None else {"node": node}


def _format_snapshot_place(row: Mapping[str, Any]) -> str:
    return f"{row['node']}:{row['path']}" if "node" in row else str(row["path"])


def _choose_exit_code(silent: Sequence[DtctlError]) -> int:
    return silent[0].exit_code if silent else 0
