"""The steps behind `dtctl launch`: from options to a spec, from a spec to a run, from a run to an exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl import names, node_facts, shell
from dtctl.cli import output
from dtctl.cli.common.agreement import require_spec_agreement
from dtctl.cli.common.followed_run import catch_stop_signals
from dtctl.errors import ConnectError, DtctlError, Interrupted, LaunchError, NodeFailures, UsageError
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.cli.common.run_display import LaunchView
    from dtctl.launch.cluster import ResolvedCluster
    from dtctl.launch.control.launch_job import LaunchJob
    from dtctl.launch.files.data import DataItem, DataPush
    from dtctl.launch.files.tree import FileTree
    from dtctl.launch.records.events import Emit, Event, RunProgress
    from dtctl.launch.records.run_writer import RunWriter
    from dtctl.plan.model import Plan
    from dtctl.spec.model import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `dtctl launch`."""

    spec: Path | None
    nodes: str | None
    slots: int | None
    overrides: tuple[str, ...]
    rest: list[str] | None
    """Words after `--`; None if the command line has no `--`."""
    name: str | None
    detach: bool
    doctor: bool | None
    """True to examine the nodes first; None: `preflight.look_first` decides."""
    json_lines: bool
    resume: str | None = None
    """Run whose outputs this run continues."""
    sweep: Mapping[str, str] = field(default_factory=dict)
    """Key -> value of the settings that a sweep has chosen for this run; `overrides` has them, too."""
    begun: float = field(default_factory=node_facts.process_start)
    """Time when the run began, on the monotonic clock: the start of this process, except in a sweep."""
    yes: bool = False
    """True if the user agrees to everything outside of its folder that the spec uses."""

    @property
    def has_spec(self) -> bool:
        """Return whether the launch uses a spec: a named one, or dtctl.yaml, which `--nodes` makes optional."""
        return self.nodes is None or self.spec is not None or Path(names.SPEC_FILE).exists()

    @property
    def spec_name(self) -> str:
        """Return the path of the spec in the user's words; empty for a job without a spec."""
        return str(self.spec or names.SPEC_FILE) if self.has_spec else ""

    def command_on(self, nodes: Sequence[str]) -> str:
        """Return the command line of this launch on other nodes, without the run's name, which is taken."""
        from dtctl.spec import nodeset

        listed = min(",".join(nodes), nodeset.fold_node_names(nodes), key=lambda text: len(shell.quote_word(text)))
        words = ["dtctl", "launch", *([str(self.spec)] if self.spec else []), "--nodes", listed]
        words += ["--slots", str(self.slots)] if self.slots is not None else []
        words += [word for override in self.overrides for word in ("--set", override)]
        words += ["--detach"] if self.detach else []
        words += ["--resume", self.resume] if self.resume is not None else []
        return shell.join_command([*words, *(["--", *self.rest] if self.rest else [])])


def load_launch_spec(options: LaunchOptions) -> Spec:
    """Return the spec that the options name or describe.

    Raises:
        UsageError: the options contradict each other.
        SpecError: the spec is wrong.
    """
    if options.nodes is not None and not options.has_spec:
        from dtctl.spec.quick import build_quick_spec

        if not options.rest:
            raise UsageError("there is nothing to run", hint="dtctl launch --nodes a,b -- train.py --lr 1e-3")
        return build_quick_spec(
            options.nodes, slots=options.slots, argv=options.rest, overrides=options.overrides, base_dir=Path.cwd()
        )
    if options.slots is not None and options.nodes is None:
        raise UsageError("--slots requires --nodes", hint="with a spec: --set cluster.slots=N")
    from dtctl.spec.load import load_spec

    overrides = options.overrides
    if options.slots is not None:
        overrides = (*overrides, f"cluster.slots={options.slots}")
    spec = load_spec(options.spec or Path(names.SPEC_FILE), overrides)
    _check_arguments(options, spec)
    if options.nodes is not None:
        from dtctl.spec.narrow import narrow_nodes

        spec = narrow_nodes(spec, options.nodes)
    if not options.rest:
        return spec
    job = spec.job.model_copy(update={"args": (*spec.job.args, *options.rest)})
    return spec.model_copy(update={"job": job})


INTERPRETERS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "bash", "sh")
"""Programs that start a script, and therefore are no argument of one."""


def _check_arguments(options: LaunchOptions, spec: Spec) -> None:
    """Refuse a program after `--` if the spec has one already: the spec's program would get it as an argument.

    Raises:
        UsageError: the first word is a script or starts one. With `--nodes`, which has another meaning without a spec,
            any other file or program is an error, too.
    """
    import shutil

    first = options.rest[0] if options.rest else ""
    if not first or first.startswith("-"):
        return
    is_program = first.endswith((".py", ".sh")) or first.rpartition("/")[2] in INTERPRETERS
    if options.nodes is not None and not is_program:
        folders = (Path.cwd(), spec.base_dir / spec.job.files.root)
        is_program = any((folder / first).is_file() for folder in folders) or shutil.which(first) is not None
    if not is_program:
        return
    given = ["dtctl", "launch", *([str(options.spec)] if options.spec else [])]
    launch = [*given, *(["--nodes", options.nodes] if options.nodes is not None else [])]
    where = " on these nodes" if options.nodes is not None else ""
    without = ["dtctl", "launch", "--nodes", options.nodes or "localhost", "--", *(options.rest or ())]
    raise UsageError(
        f"{options.spec_name} has a program, and {first} follows `--`",
        where="the command line",
        hint=f"the job of the spec{where}: `{shell.join_command(launch)} -- ARGS`, or an argument that names a file "
        f"with `--set {shell.quote_word(f'job.args=[{first}]')}`; a job without a spec, in a folder that has no "
        f"{names.SPEC_FILE}: `{shell.join_command(without)}`",
    )


def show_dry_launch(options: LaunchOptions, folder: Path | None) -> int:
    """Print, or write to `folder`, exactly the files that a launch would send."""
    import time

    from dtctl.launch import trust
    from dtctl.launch.cluster import build_first_plan, resolve_cluster, set_cluster_environment
    from dtctl.launch.files.tree import scan_pushed_files
    from dtctl.launch.records.record import check_run_name, make_run_id
    from dtctl.render import render_node_scripts

    spec = load_launch_spec(options)
    tree = scan_pushed_files(spec)
    for text in (*trust.list_required_agreements(spec), *trust.list_sent_items(spec)):
        output.print_stderr(text, "yellow")
    run = check_run_name(options.name) if options.name is not None else make_run_id(spec.job.name, now=time.time())
    if (spec.base_dir / names.STATE_DIR / names.RUNS_DIR / run).exists():
        output.print_stderr(f"a run named {run} already exists: the launch will refuse this name", "yellow")
    cluster = resolve_cluster(spec, start=False)
    plan = build_first_plan(spec, cluster, run=run)  # refuses a spec for which no environment would be made
    if spec.job.environment is not None:
        from dtctl.launch.files.environment import lock_environment

        locked = lock_environment(spec, write=False)
        output.print_stderr(f"environment: {locked.short_summary}")
        plan = build_first_plan(
            spec, set_cluster_environment(cluster, locked.digest, _locate_environments(spec)), run=run
        )
    batch = _batch_file(spec, plan)
    # In plain mode the batch file is the whole job.
    scripts = {} if spec.is_plain else render_node_scripts(plan, base_dir=spec.base_dir)
    if folder is not None:
        write_scripts(folder, plan, scripts, batch)
        output.print_stderr(f"wrote {format_count(len(scripts) + bool(batch), 'script')} and plan.json to {folder}")
    if options.json_lines:
        from dtctl.cli.common.files_view import build_tree_json

        files = build_tree_json(spec, tree) if tree is not None else None
        document = {"event": "plan", "time": time.time(), **asdict(plan), "files": files, "scripts": scripts}
        output.emit_json(document | ({"batch": batch} if batch else {}))
    elif folder is None:
        show_plan(plan)
        if tree is not None:
            from dtctl.cli.common.files_view import show_files

            show_files(spec, tree)
        if spec.job.data:
            from dtctl.launch.files.data import find_data

            show_data(find_data(spec), tree)
        show_scripts(scripts, batch)
    return 0


def show_data(items: Sequence[DataItem], code: FileTree | None) -> None:
    """Print the part of `job.data` that a launch copies to the nodes.

    Raises:
        PlanError: the code has a file at a place for data.
    """
    from dtctl.launch.files.data import check_places

    check_places(items, code)
    for item in items:
        if item.tree is None:
            output.print_stderr(f"data: {item.to} is {item.path} on every node")
        else:
            amount = f"{format_count(len(item.tree.files), 'file')}, {output.format_size(item.tree.total_bytes)}"
            output.print_stderr(f"data: {item.to} is {item.source} ({amount}); nodes keep it between runs")


def _locate_environments(spec: Spec) -> str:
    """Return the folder with the environments of all nodes of a Slurm job; empty for other transports."""
    if spec.cluster.transport != "slurm":
        return ""
    from dtctl.slurm.submit import locate_folder

    return str(locate_folder(spec, "").parent)


def _batch_file(spec: Spec, plan: Plan) -> str:
    """Return the batch file for Slurm; empty for other transports."""
    if plan.transport != "slurm":
        return ""
    from dtctl.slurm.submit import locate_folder, make_files

    return make_files(spec, plan, locate_folder(spec, plan.run), followed=True)[0]


def write_scripts(folder: Path, plan: Plan, scripts: dict[str, str], batch: str) -> None:
    """Write each node's script as `NODE.sh`, the batch file, and the plan as `plan.json`.

    Raises:
        UsageError: the folder cannot be written to.
    """
    import json

    from dtctl.launch.records.run_writer import write_private

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for node, text in scripts.items():
            write_private(folder / f"{node}.sh", text)
            (folder / f"{node}.sh").chmod(0o700)
        if batch:
            write_private(folder / names.BATCH_FILE, batch)
        write_private(folder / names.PLAN_FILE, json.dumps(asdict(plan), indent=1) + "\n")
    except LaunchError as exc:
        raise UsageError(exc.message, where=exc.where) from exc
    except OSError as exc:
        raise UsageError(f"cannot write the scripts: {exc.strerror}", where=str(exc.filename or folder)) from exc


def show_plan(plan: Plan) -> None:
    """Print the plan: each node with its workers and command."""
    output.print_stdout(
        f"run {plan.run}: {plan.job}, {plan.kind} over {plan.transport}, rendezvous {plan.rendezvous.endpoint}", "bold"
    )
    rows = [[n.name, n.address, str(n.node_rank), str(n.slots), f"{n.ranks[0]}-{n.ranks[-1]}"] for n in plan.nodes]
    output.print_table(rows, header=["NODE", "ADDRESS", "NODE RANK", "SLOTS", "RANKS"])
    for note in ("no node was contacted; `dtctl doctor` contacts them", *plan.notes):
        output.print_stdout(f"note: {note}", "cyan")


def show_scripts(scripts: dict[str, str], batch: str) -> None:
    """Print the batch file, if there is one, and the script of every node."""
    if batch:
        output.print_stdout(f"\n--- {names.BATCH_FILE}", "bold")
        output.print_raw_text(batch)
    for node, text in scripts.items():
        output.print_stdout(f"\n--- {node}: node.sh", "bold")
        output.print_raw_text(text)


def run_real_launch(options: LaunchOptions) -> int:
    """Launch the job, follow it, and report its end; return the exit code."""
    from dtctl.launch.records.record import check_run_name, make_run_id

    spec = load_launch_spec(options)
    require_spec_agreement(spec, yes=options.yes, launching=True)
    if spec.metrics is not None:
        from dtctl.metrics.secrets import read_metrics_secrets

        read_metrics_secrets(spec)  # a missing one is an error now, not when the first message has to be sent
    run = check_run_name(options.name) if options.name is not None else make_run_id(spec.job.name, now=time.time())
    # The name of the run if this process is the launcher that `--detach` has started in the background.
    background = os.environ.pop(names.BACKGROUND, None)
    starts_background = options.detach and background is None
    is_slurm = spec.cluster.transport == "slurm"
    snapshots: Mapping[str, str] = {}
    if options.resume is not None and (is_slurm or not starts_background):
        spec, snapshots = _resolve_continuation(spec, options.resume)
    if is_slurm:
        from dtctl.cli.common.slurm_runs import launch_job

        return launch_job(
            spec, run, spec_name=options.spec_name, detach=options.detach, json_lines=options.json_lines,
            resume=options.resume,
        )  # fmt: skip
    if background is None and (options.doctor or spec.cluster.transport != "local"):
        from dtctl.cli.common.preflight import look_first

        look_first(spec, options.doctor)
    if starts_background:
        return start_background_launch(options, spec, run)
    return _launch_and_follow(options, spec, background or run, snapshots)


def _launch_and_follow(options: LaunchOptions, spec: Spec, run: str, snapshots: Mapping[str, str]) -> int:
    """Launch the job from this process, follow it, and return the exit code."""
    from dtctl.cli.common.followed_run import create_run, make_event_emitter, send_run_metrics
    from dtctl.cli.common.run_display import LaunchView, list_push_warnings
    from dtctl.launch.records.events import Note, RunPlanned, RunProgress
    from dtctl.plan.warnings import list_warnings

    job, cluster, tree = _build_job(options, spec, run, snapshots)
    record = create_run(
        spec, run, spec_name=options.spec_name, detached=options.detach, token=job.token, snapshots=snapshots,
        begun=options.begun, sweep=options.sweep, environment=job.environment_digest,
    )  # fmt: skip
    view = LaunchView(json_lines=options.json_lines, record=record)
    progress = RunProgress()
    pass_on = make_event_emitter(record, view, json_lines=options.json_lines)

    def emit(event: Event) -> None:
        progress.apply(event)
        pass_on(event)

    plan = job.first_plan
    has_state = _has_earlier_state(options, spec)
    emit(RunPlanned(run=run, kind=plan.kind, world_size=plan.world_size, nodes=tuple(cluster.targets)))
    if tree is not None:
        for note in list_push_warnings(spec, tree):
            emit(note)
    view.begin(plan)
    for text in list_warnings(spec, cluster.nodes, per_worker=plan.per_worker):
        emit(Note(text=text))
    if options.resume is not None and not has_state:
        from dtctl.launch.continuation import describe_fresh_start

        emit(Note(text=describe_fresh_start(spec, options.resume), warning=True))
    with send_run_metrics(spec, record, emit):
        return _run_job_to_end(job, record, emit, view, progress, options)


def _build_job(
    options: LaunchOptions, spec: Spec, run: str, snapshots: Mapping[str, str]
) -> tuple[LaunchJob, ResolvedCluster, FileTree | None]:
    """Return the job with everything that it sends, its cluster, and the tree of its code if that is sent."""
    from dtctl.cli.common.followed_run import build_environment_push
    from dtctl.launch.cluster import resolve_cluster, set_cluster_environment
    from dtctl.launch.job_builder import CodePush, build_launch_job

    environment = build_environment_push(spec)  # before the scan of the files, since the lock may be one of them
    code = CodePush(spec) if spec.pushes else None
    data = _data_push(spec)
    cluster = resolve_cluster(spec, start=True)
    if environment is not None:
        cluster = set_cluster_environment(cluster, environment.locked.digest)
    job = build_launch_job(
        spec, cluster, run=run, keep=options.detach, code=code, data=data, environment=environment,
        snapshots=snapshots, earlier=options.resume or "",
    )  # fmt: skip
    tree = code.tree if code is not None else None
    if data is not None:
        show_data(data.items, tree)
    if tree is not None:
        from dtctl.launch.files.tree import check_program_files

        check_program_files(spec, tree)
    return job, cluster, tree


def _data_push(spec: Spec) -> DataPush | None:
    """Return the push of a job's data; None if it has none."""
    if not spec.job.data:
        return None
    from dtctl.launch.files.data import DataPush

    return DataPush(spec)


def _name_way_without(error: DtctlError, options: LaunchOptions, nodes: Sequence[str], *, run: str | None) -> None:
    """Add the command that omits the nodes which do not answer to the hint of the error about them.

    Args:
        error: error about the nodes.
        options: options of the launch.
        nodes: nodes of the run.
        run: run that the command continues; None: the job was not started.
    """
    if run is not None:
        options = replace(options, resume=run, name=None)
    failures = error.failures if isinstance(error, NodeFailures) else {getattr(error, "node", ""): error}
    others = [name for name in nodes if name not in failures]
    if not others or not all(isinstance(failure, ConnectError) for failure in failures.values()):
        return
    last = [*failures.values()][-1]
    last.hint = "; ".join(filter(None, (last.hint, f"without: `{options.command_on(others)}`")))


def _run_job_to_end(
    job: LaunchJob, record: RunWriter, emit: Emit, view: LaunchView, progress: RunProgress, options: LaunchOptions
) -> int:
    """Run the job from the first connection to the last line of output; return the exit code."""
    from dtctl.cli.common.followed_run import report_run_end
    from dtctl.launch.control.run import run_launch_job
    from dtctl.launch.records.events import RunEnded, decide_end_status
    from dtctl.launch.records.ledger import Ledger

    with record.launcher_lock(), catch_stop_signals() as signals:
        try:
            ledger = Ledger(time.monotonic, begun=options.begun)
            result = run_launch_job(job, record, emit=emit, signals=signals, ledger=ledger)
        except DtctlError as exc:
            view.close()
            has_run = progress.attempt >= 0
            _name_way_without(
                exc, options, [node.name for node in job.first_plan.nodes], run=job.run if has_run else None
            )
            if has_run:
                output.print_stderr(f"`dtctl launch --resume {job.run}` continues it once all nodes are back")
                output.print_stderr(f"`dtctl stop {job.run}` ends and counts what is left on them")
            number = signals[-1] if signals else None
            code_of_end = 128 + number if number else exc.exit_code
            error = exc.summary if isinstance(exc, NodeFailures) else str(exc)
            emit(
                RunEnded(
                    run=job.run, status=decide_end_status(is_stopped=number is not None, has_failed=True),
                    exit_code=code_of_end, attempts=progress.attempt + 1, left_behind=progress.left_behind, error=error,
                )
            )  # fmt: skip
            when = "while it was being restarted" if has_run else "before the job was started"
            raise Interrupted(f"stopped {when}", signal=number) if number else exc from None
        finally:
            view.close()
    return report_run_end(result, emit, record)


def _resolve_continuation(spec: Spec, earlier: str) -> tuple[Spec, Mapping[str, str]]:
    """Return the spec of a run that continues from an earlier one, and its folders of snapshots by node."""
    from dtctl.launch import continuation
    from dtctl.launch.records.record import find_run

    record = find_run(spec.base_dir, earlier)
    continuation.require_over(record)
    if record.info().slurm:
        from dtctl.slurm.job_watcher import snapshot_folder

        if spec.train is None and spec.job.outputs:
            return spec, {}
        return continuation.set_snapshot_folder(spec, snapshot_folder(record)), {}
    return continuation.build_continuation_spec(spec, record)


def _has_earlier_state(options: LaunchOptions, spec: Spec) -> bool:
    """Return False if the program keeps its own state, and no node has a file of it from the earlier run."""
    if options.resume is None:  # the import below is for a resume only
        return True
    from dtctl.launch import continuation

    if not continuation.keeps_own_state(spec):
        return True
    from dtctl.cli.fetch import list_fetch_sources
    from dtctl.launch.cluster import build_run_cluster
    from dtctl.launch.files.fetch import count_run_outputs
    from dtctl.launch.records.record import find_run

    record = find_run(spec.base_dir, options.resume)
    transport = build_run_cluster(record).make_transport()
    paths = continuation.list_state_paths(spec)
    counts = count_run_outputs(list_fetch_sources(record, None), transport, paths=paths)
    return any(counts.values())  # numbers of files, or errors of nodes that may have some


def start_background_launch(options: LaunchOptions, spec: Spec, run: str) -> int:
    """Start a launcher in the background, and return when that launcher reports that the job runs."""
    from dtctl.cli.common.run_display import LaunchView, print_run_header
    from dtctl.launch.background import launch_in_background
    from dtctl.launch.records.events import RunPlanned
    from dtctl.spec.nodes import resolve_nodes

    view = LaunchView(json_lines=options.json_lines)
    nodes = [node.name for node in resolve_nodes(spec)]
    view.expect(nodes)

    def on_event(event: Event) -> None:
        if options.json_lines:
            output.emit_json(event.to_json())
        if isinstance(event, RunPlanned):
            transport = spec.cluster.transport
            print_run_header(run, event.kind, transport, nodes=len(nodes), workers=event.world_size)
        view.event(event)

    exit_code, text = launch_in_background(spec.base_dir, run, on_event=on_event)
    view.close()
    if text:
        output.print_stderr(text.rstrip())
    if exit_code == 0:
        if not options.json_lines:  # the events contain the name
            output.print_stdout(run)
        output.print_stderr("it continues in the background: `dtctl status`, `dtctl logs -f`, `dtctl stop`")
    return exit_code
