"""`dtctl fetch`: bring a run's outputs from its nodes to this machine."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.completion import Run, node_names
from dtctl.cli.common.elsewhere_view import find_elsewhere
from dtctl.errors import LaunchError, UsageError
from dtctl.supervisor import work

if TYPE_CHECKING:
    from dtctl.launch.elsewhere import FoundRun, RunElsewhere
    from dtctl.launch.files.fetch import Fetched, FetchSource
    from dtctl.launch.records.record import RunRecord
    from dtctl.transport.base import Transport


def fetch(
    run: Run = None,
    path: Annotated[
        str | None,
        typer.Argument(
            help="File or folder in the run's working folder, or an absolute path in job.outputs.  "
            "[default: job.outputs, or all that the run wrote]",
            show_default=False,
        ),
    ] = None,
    node: Annotated[str | None, typer.Option(help="Only from this node.", autocompletion=node_names)] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to put them into.  [default: .dtctl/runs/RUN/outputs]"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Bring what a run has written on its nodes, while it runs or afterwards.

    A folder for each node. What is here already is not sent again, and a file that was interrupted is continued.
    """
    from dtctl.launch.files.fetch import fetch as fetch_all

    with _origin(run, node) as origin:
        paths = [_allowed(path, origin)] if path is not None else origin.paths
        into = out or origin.into
        answers = fetch_all(origin.sources, origin.transport, paths=paths, into=into)
    came = {name: answer for name, answer in answers.items() if not isinstance(answer, Exception)}
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if json_:
        output.emit_json({"run": origin.run, "folder": str(into), "nodes": _rows(came, errors)})
    else:
        _show(came, into, path, has_snapshots=origin.has_snapshots)
    for name, fetched in came.items():
        for problem in fetched.problems:
            output.err(f"not fetched from {name}: {problem}", "red")
        for link in fetched.left_out:
            output.err(f"not fetched from {name}: {link}", "yellow")
    for error in errors.values():
        output.error(error)
    if errors:
        return 6
    return 7 if any(fetched.problems for fetched in came.values()) or not _any(came) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Source and destination of the outputs of a run."""

    run: str
    sources: list[FetchSource]
    transport: Transport
    paths: list[str]
    """Paths worth keeping, by the spec."""
    into: Path
    has_snapshots: bool = True
    """True if workers may have saved some."""


@contextmanager
def _origin(run: str | None, node: str | None) -> Iterator[_Origin]:
    """A run of this folder, a job of Slurm, or a run that another machine has launched on the nodes of the spec."""
    from dtctl.launch.assemble import cluster_of_run, spec_of_run
    from dtctl.launch.records.record import find_run

    elsewhere = find_elsewhere(run)
    if elsewhere is not None:
        yield _elsewhere(*elsewhere, node)
        return
    record = find_run(Path.cwd(), run)
    paths, into = list(spec_of_run(record).job.outputs), record.folder / names.OUTPUTS_DIR
    if record.info().slurm:
        with _of_job(record, node) as (source, transport):
            yield _Origin(run=record.run, sources=[source], transport=transport, paths=paths, into=into)
        return
    transport = cluster_of_run(record).make_transport()
    from dtctl.cli.common.followed_run import has_snapshot

    yield _Origin(
        run=record.run,
        sources=sources(record, node),
        transport=transport,
        paths=paths,
        into=into,
        has_snapshots=has_snapshot(record),
    )


def _elsewhere(runs: RunElsewhere, found: FoundRun, node: str | None) -> _Origin:
    from dtctl.launch.files.fetch import FetchSource
    from dtctl.launch.records.run_writer import state_folder
    from dtctl.spec.load import load_spec

    nodes = runs.nodes_of(found)
    if node is not None and node not in nodes:
        raise _no_node(found.run, node, nodes)
    return _Origin(
        run=found.run,
        sources=[
            FetchSource(target=target, python=each.python, run_dir=f"{each.workdir}/runs/{found.run}")
            for name, (each, target) in nodes.items()
            if node in (None, name)
        ],
        transport=runs.transport,
        paths=list(load_spec(Path(names.SPEC_FILE), ()).job.outputs),
        into=state_folder(Path.cwd(), names.OUTPUTS_DIR) / found.run,
    )


@contextmanager
def _of_job(record: RunRecord, node: str | None) -> Iterator[tuple[FetchSource, Transport]]:
    """A job of Slurm: all of its nodes share the run's folder, which the machine with Slurm's commands sees."""
    from dtctl.launch.assemble import spec_of_run
    from dtctl.launch.files.fetch import FetchSource
    from dtctl.slurm.follow import reference
    from dtctl.slurm.site import site_of

    if node is not None:
        raise UsageError(
            "the nodes of a Slurm job share one working folder", where="--node", hint="leave the option out"
        )
    ref = reference(record)
    with closing(site_of(spec_of_run(record))) as site:
        yield FetchSource(target=site.target, python=ref.python, run_dir=ref.folder), site.transport


def sources(record: RunRecord, node: str | None) -> list[FetchSource]:
    """Return the nodes of a run, or the one that is named.

    Raises:
        LaunchError: it has no such node, or was never started.
    """
    from dtctl.launch.assemble import cluster_of_run
    from dtctl.launch.files.fetch import FetchSource

    plan, cluster = record.whole_plan(), cluster_of_run(record)
    targets = cluster.targets
    if not targets:
        cluster.make_transport()  # raises the reason why there are none
    nodes = [each for each in plan["nodes"] if each["name"] in targets and node in (None, each["name"])]
    if not nodes:
        raise _no_node(record.run, node, [each["name"] for each in plan["nodes"]])
    return [
        FetchSource(target=targets[each["name"]], python=each["python"], run_dir=f"{each['workdir']}/runs/{record.run}")
        for each in nodes
    ]


def _no_node(run: str, node: str | None, nodes: Iterable[str]) -> LaunchError:
    return LaunchError(f"run {run} has no node {node}", hint=f"its nodes are {', '.join(nodes)}")


def _allowed(path: str, origin: _Origin) -> str:
    """Return a path that may be brought: one in the working folder, or one that `job.outputs` allows.

    Raises:
        UsageError: it is another one.
    """
    if not path.startswith("/"):
        return _inside(path)
    plain = posixpath.normpath(path)
    if any(f"{plain}/".startswith(f"{each.rstrip('/')}/") for each in origin.paths if each.startswith("/")):
        return plain
    _, is_inside, inner = plain.partition(f"/runs/{origin.run}/{work.FOLDER}/")
    if is_inside:
        raise UsageError(f"{path} lies in the run's working folder", where="PATH", hint=f"write `{inner}` instead")
    raise UsageError(
        f"{path} lies outside of the run's working folder, and job.outputs of the run does not name it", where="PATH",
        hint=f"write `job.outputs: [{plain}]` into the spec before the launch, or a path in the working folder",
    )  # fmt: skip


def _inside(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith(("/", "~")) or ".." in parts or not parts:
        raise UsageError(
            f"{path!r} is not a path inside the run's working folder",
            where="PATH",
            hint="name it as the program did: `out/checkpoint-40`; leave it out for all that was written",
        )
    return "/".join(parts)


def _any(came: dict[str, Fetched]) -> bool:
    return any(fetched.files or fetched.unchanged or fetched.problems for fetched in came.values())


def _rows(came: dict[str, Fetched], errors: Mapping[str, Exception]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        name: {key: getattr(each, key) for key in ("files", "bytes", "unchanged", "problems", "left_out")}
        for name, each in came.items()
    }
    return {**rows, **{name: {"error": str(error)} for name, error in errors.items()}}


def _show(came: dict[str, Fetched], into: Path, path: str | None, *, has_snapshots: bool) -> None:
    if not _any(came):
        if came:
            subject = f"there is no file {path}" if path is not None else "no file was written into the working folder"
            exports = path is None and has_snapshots
            snapshots = "; `dtctl snapshot export` brings the snapshots here" if exports else ""
            output.err(f"{subject} on {', '.join(came)}{snapshots}", "yellow")
        return
    files, size = sum(each.files for each in came.values()), sum(each.bytes for each in came.values())
    unchanged = sum(each.unchanged for each in came.values())
    here_already = f", {unchanged:,} unchanged" if unchanged else ""
    output.err(f"fetched {files:,} {'file' if files == 1 else 'files'}, {output.size(size)}{here_already}")
    output.out(str(into))
