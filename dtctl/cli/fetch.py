"""`dtctl fetch`: bring a run's outputs from its nodes to this machine."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.completion import Run, complete_node_names
from dtctl.cli.common.remote_runs_view import find_elsewhere
from dtctl.errors import UsageError
from dtctl.printable import format_count
from dtctl.supervisor import run_workdir

if TYPE_CHECKING:
    from dtctl.launch.files.fetch import FetchResult, FetchSource
    from dtctl.launch.records.record import RunRecord
    from dtctl.launch.remote_runs import RemoteRun, RemoteRuns
    from dtctl.transport.base import Transport


def fetch(
    run: Run = None,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH",
            help="File or folder in the run's working folder, or an absolute path in job.outputs.  "
            "[default: job.outputs, or all that the run wrote]",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Only from this node.", autocompletion=complete_node_names)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to put them into.  [default: .dtctl/runs/RUN/outputs]"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Bring what a run has written on its nodes, while it runs or afterwards.

    A folder for each node. What is here already is not sent again, and a file that was interrupted is continued.
    """
    from dtctl.launch.files.fetch import fetch_run_outputs as fetch_all

    with _open_fetch_origin(run, node) as origin:
        paths = [_require_allowed_path(path, origin)] if path is not None else origin.paths
        into = out or origin.into
        answers = fetch_all(origin.sources, origin.transport, paths=paths, into=into)
    came = {name: answer for name, answer in answers.items() if not isinstance(answer, Exception)}
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if json_:
        output.emit_json({"run": origin.run, "folder": str(into), "nodes": _build_fetch_rows(came, errors)})
    else:
        _print_fetch_summary(came, origin, path, into)
    for name, fetched in came.items():
        for problem in fetched.problems:
            output.print_stderr(f"not fetched from {name}: {problem}", "red")
        for link in fetched.left_out:
            output.print_stderr(f"not fetched from {name}: {link}", "yellow")
    for error in errors.values():
        output.print_error_with_hint(error)
    if errors:
        return 6
    has_failed = any(fetched.problems for fetched in came.values())
    # A run that wrote nothing has nothing to fetch; a file that was named, or that was removed, is missing.
    is_missing = not _has_fetch_results(came) and (path is not None or _is_removed(came))
    return 7 if has_failed or is_missing else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _FetchTask:
    """Source and destination of the outputs of a run."""

    run: str
    sources: list[FetchSource]
    transport: Transport
    paths: list[str]
    """Paths that the spec names as outputs."""
    into: Path
    has_snapshots: bool = True
    """True if workers may have saved snapshots."""
    removed: Mapping[str, float] = field(default_factory=dict)
    """Node -> time at which `dtctl clean` has removed the run's files there, in seconds since the epoch."""


@contextmanager
def _open_fetch_origin(run: str | None, node: str | None) -> Iterator[_FetchTask]:
    """Yield the origin of a run: this folder, a job of Slurm, or a launch from another machine on the spec's nodes."""
    from dtctl.launch.cluster import build_run_cluster
    from dtctl.launch.records.record import find_run
    from dtctl.launch.run_spec import load_run_spec

    elsewhere = find_elsewhere(run)
    if elsewhere is not None:
        yield _build_elsewhere_origin(*elsewhere, node)
        return
    record = find_run(Path.cwd(), run)
    paths, into = list(load_run_spec(record).job.outputs), record.folder / names.OUTPUTS_DIR
    if record.info().slurm:
        with _open_job_source(record, node) as (source, transport):
            yield _FetchTask(run=record.run, sources=[source], transport=transport, paths=paths, into=into)
        return
    transport = build_run_cluster(record).make_transport()
    from dtctl.cli.common.followed_run import has_snapshot

    yield _FetchTask(
        run=record.run,
        sources=list_fetch_sources(record, node),
        transport=transport,
        paths=paths,
        into=into,
        has_snapshots=has_snapshot(record),
        removed=record.info().removed,
    )


def _build_elsewhere_origin(runs: RemoteRuns, found: RemoteRun, node: str | None) -> _FetchTask:
    from dtctl.launch.files.fetch import FetchSource
    from dtctl.launch.records.record import build_node_error
    from dtctl.launch.records.run_writer import prepare_state_folder
    from dtctl.spec.load import load_spec

    nodes = runs.nodes_of(found)
    if node is not None and node not in nodes:
        raise build_node_error(found.run, node, nodes, where="--node")
    return _FetchTask(
        run=found.run,
        sources=[
            FetchSource(target=target, python=each.python, run_dir=f"{each.workdir}/runs/{found.run}")
            for name, (each, target) in nodes.items()
            if node in (None, name)
        ],
        transport=runs.transport,
        paths=list(load_spec(Path(names.SPEC_FILE), ()).job.outputs),
        into=prepare_state_folder(Path.cwd(), names.OUTPUTS_DIR) / found.run,
    )


@contextmanager
def _open_job_source(record: RunRecord, node: str | None) -> Iterator[tuple[FetchSource, Transport]]:
    """Yield the source for a job of Slurm: the machine with Slurm's commands sees the files of all its nodes."""
    from dtctl.launch.files.fetch import FetchSource
    from dtctl.launch.run_spec import load_run_spec
    from dtctl.slurm.job_watcher import read_job_reference
    from dtctl.slurm.site import choose_slurm_host

    if node is not None:
        raise UsageError(
            "the nodes of a Slurm job share one working folder", where="--node", hint="leave the option out"
        )
    ref = read_job_reference(record)
    with closing(choose_slurm_host(load_run_spec(record))) as site:
        yield FetchSource(target=site.target, python=ref.python, run_dir=ref.folder), site.transport


def list_fetch_sources(record: RunRecord, node: str | None, *, where: str = "--node") -> list[FetchSource]:
    """Return the nodes of a run, or only the one that the argument `where` names.

    Raises:
        LaunchError: the run has no such node, or was never started.
    """
    from dtctl.launch.cluster import build_run_cluster
    from dtctl.launch.files.fetch import FetchSource
    from dtctl.launch.records.record import build_node_error

    plan, cluster = record.whole_plan(), build_run_cluster(record)
    targets = cluster.targets
    if not targets:
        cluster.make_transport()  # raises an error with the reason if there are none
    nodes = [each for each in plan["nodes"] if each["name"] in targets and node in (None, each["name"])]
    if not nodes:
        raise build_node_error(record.run, node, (each["name"] for each in plan["nodes"]), where)
    return [
        FetchSource(target=targets[each["name"]], python=each["python"], run_dir=f"{each['workdir']}/runs/{record.run}")
        for each in nodes
    ]


def _require_allowed_path(path: str, origin: _FetchTask) -> str:
    """Return a path that may be fetched: one in the working folder, or one that `job.outputs` allows.

    Raises:
        UsageError: the path is neither.
    """
    if not path.startswith("/"):
        return _require_inner_path(path)
    plain = posixpath.normpath(path)
    if any(f"{plain}/".startswith(f"{each.rstrip('/')}/") for each in origin.paths if each.startswith("/")):
        return plain
    _, is_inside, inner = plain.partition(f"/runs/{origin.run}/{run_workdir.FOLDER}/")
    if is_inside:
        raise UsageError(f"{path} lies in the run's working folder", where="PATH", hint=f"write `{inner}` instead")
    raise UsageError(
        f"{path} lies outside of the run's working folder, and job.outputs of the run does not name it", where="PATH",
        hint=f"write `job.outputs: [{plain}]` into the spec before the launch, or a path in the working folder",
    )  # fmt: skip


def _require_inner_path(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith(("/", "~")) or ".." in parts or not parts:
        raise UsageError(
            f"{path!r} is not a path inside the run's working folder",
            where="PATH",
            hint="name it as the program did: `out/checkpoint-40`; leave it out for all that was written",
        )
    return "/".join(parts)


def _has_fetch_results(came: dict[str, FetchResult]) -> bool:
    return any(fetched.files or fetched.unchanged or fetched.problems for fetched in came.values())


def _describe_nothing(came: dict[str, FetchResult], origin: _FetchTask, path: str | None) -> str:
    """Return the reason why no file was fetched."""
    from dtctl.launch.records.record import describe_removal

    nodes = output.shorten_names(list(came))
    if _is_removed(came):
        removal = describe_removal(origin.run, origin.removed, list(came))
        return removal or f"there are no files of run {origin.run} on {nodes}"
    if path is not None:
        return f"there is no file {path} on {nodes}"
    where = f"{', '.join(origin.paths)} (job.outputs)" if origin.paths else "the working folder"
    exports = "; `dtctl snapshot export` brings the snapshots here" if origin.has_snapshots else ""
    return f"no file was written into {where} on {nodes}{exports}"


def _build_fetch_rows(came: dict[str, FetchResult], errors: Mapping[str, Exception]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        name: {key: getattr(each, key) for key in ("files", "bytes", "unchanged", "problems", "left_out")}
        for name, each in came.items()
    }
    return {**rows, **{name: {"error": str(error)} for name, error in errors.items()}}


def _is_removed(came: dict[str, FetchResult]) -> bool:
    """Return whether no node has a working folder of the run."""
    return bool(came) and not any(fetched.is_there for fetched in came.values())


def _print_fetch_summary(came: dict[str, FetchResult], origin: _FetchTask, path: str | None, into: Path) -> None:
    if not _has_fetch_results(came):
        if came:
            output.print_stderr(_describe_nothing(came, origin, path), "yellow")
        return
    files, size = sum(each.files for each in came.values()), sum(each.bytes for each in came.values())
    unchanged = sum(each.unchanged for each in came.values())
    here_already = f", {unchanged:,} unchanged" if unchanged else ""
    output.print_stderr(f"fetched {format_count(files, 'file')}, {output.format_size(size)}{here_already}")
    output.print_stdout(str(into))
