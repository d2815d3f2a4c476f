"""Assembly of a job that can be launched, from a spec or the record of a run. Starts nothing."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dtctl import folders, names, shell
from dtctl.errors import SpecError
from dtctl.launch import cluster as clusters
from dtctl.launch.cluster import ResolvedCluster, cluster_of
from dtctl.launch.control.link import NodeLink
from dtctl.launch.files import push as pushing
from dtctl.launch.files.relay import Relay
from dtctl.launch.files.tree import Tree, scan
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.launch.records.record import RunRecord, check_no_link
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.environment import ON_CPUS, read_secrets
from dtctl.plan.model import Plan, Threads
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec
from dtctl.supervisor.messages.attempt import RunOrigin
from dtctl.supervisor.messages.setup import EnvironmentOrder

CACHE_DIR = "cache"
SPEC_BYTES = 4 << 20
"""Bytes of a run's copy of its spec."""
COMMAND_CHARACTERS = 4000
"""Characters of a command line that nodes remember."""
SPARED_S = 10.0
"""`cluster.link_timeout_s` by default, where a spare can take the place of a silent node."""
UNSPARED_S = 30.0
"""The same without spares: a link can be out for 12 s, and a busy node silent as long."""
if TYPE_CHECKING:
    from dtctl.launch.control.launch_job import LaunchJob, Push
    from dtctl.launch.files.data import DataPush
    from dtctl.launch.files.environment import EnvironmentPush
    from dtctl.plan.model import NodePlan


def spec_of_run(record: RunRecord) -> Spec:
    """Return the spec that a run was launched with.

    Raises:
        SpecError: its copy in the run's folder is gone or broken.
    """
    from dtctl.spec.load import parse_spec

    path = record.folder / names.RUN_SPEC_FILE
    try:
        text = folders.read_regular(str(path), SPEC_BYTES).decode(errors="replace")
    except OSError as exc:
        raise SpecError(f"the run's copy of its spec cannot be read: {exc.strerror}", where=str(path)) from exc
    return parse_spec(text, source=str(path), base_dir=record.base_dir, is_of_run=True)


def cluster_of_run(record: RunRecord) -> ResolvedCluster:
    """Return the nodes of a run that was launched before, and the way to them.

    Raises:
        SpecError: the copy of its spec is gone or broken.
    """
    return cluster_of(spec_of_run(record), start=False, record=record)


def job_of_run(record: RunRecord) -> LaunchJob:
    """Return the job of a run that was launched before; nothing is pushed for it again.

    Raises:
        SpecError: the copy of its spec is gone or broken.
        PlanError: a secret that it needs is not set here.
    """
    spec = spec_of_run(record)
    cluster = cluster_of(spec, start=False, record=record)
    info = record.info()
    if info.environment:
        cluster = clusters.with_environment(cluster, info.environment)
    job = job_of(spec, cluster, run=record.run, keep=True, code=None, token=info.token, snapshots=info.snapshots)
    kept = EnvironmentOrder(digest=info.environment) if info.environment else None
    return replace(
        job,
        origin=origin(info.command_line, info.started),
        environment=lambda: kept,
        environment_digest=info.environment,
    )


def attempt_of_run(record: RunRecord, job: LaunchJob) -> Plan:
    """Return the plan of the newest attempt of a run, made again.

    Raises:
        LaunchError: none was ever started.
    """
    facts = record.whole_plan()
    rendezvous = facts["rendezvous"]
    slots = {node["name"]: int(node["slots"]) for node in facts["nodes"]}
    threads = Threads(**facts["threads"]) if facts.get("threads") else None
    on_cpus = asdict(ON_CPUS) in facts["nodes"][0].get("env", [])
    gpus = dict.fromkeys(slots, 0) if on_cpus else slots
    return job.make_plan(
        int(facts["attempt"]), list(slots), rendezvous["address"], int(rendezvous["port"]), gpus=gpus, threads=threads
    )


def this_user() -> str:
    """User and machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # no user has this id
        user = "?"
    return f"{user}@{socket.gethostname()}"


def origin(command: str, started: float) -> RunOrigin:
    """Return the origin of the run for the nodes; `started` in seconds since the epoch."""
    return RunOrigin(launched_from=this_user(), command=command[:COMMAND_CHARACTERS], started=started)


class CodePush:
    """Scans the working tree in the background and brings it to every node that asks."""

    def __init__(self, spec: Spec) -> None:
        self._payloads = pushing.Payloads()
        root = spec.base_dir / spec.job.files.root
        cache = spec.base_dir / names.STATE_DIR / CACHE_DIR
        check_no_link(spec.base_dir, CACHE_DIR)
        files = spec.job.files
        self._tree: Future[Tree] = Future()

        def work() -> None:
            try:
                self._tree.set_result(
                    scan(root, include=tuple(files.include), exclude=tuple(files.exclude), cache=cache)
                )
            except Exception as exc:  # noqa: BLE001 - raised again for the caller that requests the tree
                self._tree.set_exception(exc)

        threading.Thread(target=work, name="scan", daemon=True).start()

    @property
    def tree(self) -> Tree:
        """The scanned tree; waits for the scan."""
        return self._tree.result()

    def expect_nodes(self, count: int) -> None:
        """Set the number of nodes that will need the tree."""
        self._payloads = pushing.Payloads(Relay(count))

    def __call__(self, link: NodeLink, progress: PushReport) -> PushProgress:
        """Bring the tree to one node; what was done."""
        result = pushing.push(link, self.tree, shared=self._payloads, progress=progress)
        return PushProgress(path=result.path, files=result.files_sent, bytes=result.bytes_sent, state=result.state)


def join_pushes(code: CodePush | None, *others: Push | None) -> Push | None:
    """Return what brings the code of a job and all else; None where there is nothing to bring."""
    joined: Push | None = code
    for other in others:
        joined = _join(joined, other) if joined is not None and other is not None else joined or other
    return joined


def _join(code: Push, data: Push) -> Push:
    def push(link: NodeLink, progress: PushReport) -> PushProgress:
        first = code(link, progress)
        second = data(link, pushing.report_after(first.bytes or 0, progress))
        state = "done" if "done" in (first.state, second.state) else first.state
        files, size = ((first.files or 0) + (second.files or 0), (first.bytes or 0) + (second.bytes or 0))
        return replace(first, files=files, bytes=size, state=state)

    return push


def job_of(
    spec: Spec,
    cluster: ResolvedCluster,
    *,
    run: str,
    keep: bool,
    code: CodePush | None,
    data: DataPush | None = None,
    environment: EnvironmentPush | None = None,
    token: str | None = None,
    snapshots: Mapping[str, str] | None = None,
    earlier: str = "",
) -> LaunchJob:
    """Return all decisions that a launch needs; `token` is that of a run that is under way already.

    `snapshots` are the folders, by node, of a run that this one continues, and `earlier` is its name.

    Raises:
        DtctlError: of the class for the problem; nothing was started.
    """
    from dtctl.launch.control.launch_job import LaunchJob

    plan = clusters.first_plan(spec, cluster, run=run)
    for push in (code, data, environment):
        if push is not None:
            push.expect_nodes(len(cluster.nodes) + len(cluster.spares))
    values = read_secrets(spec.job.secrets, os.environ)
    source, share = clusters.source_of(spec), clusters.share_of(spec)

    known_nodes = {node.name: node for node in (*cluster.nodes, *cluster.spares)}

    def make_plan(
        attempt: int,
        nodes: Sequence[str],
        address: str,
        port: int,
        *,
        gpus: Mapping[str, int],
        cores: Mapping[str, int] | None = None,
        threads: Threads | None = None,
    ) -> Plan:
        facts = PlanFacts(
            environ=os.environ, address=address, port=port, gpus=gpus, cores=cores or {}, threads=threads, share=share,
            source=source,
        )  # fmt: skip
        return build(spec, [known_nodes[name] for name in nodes], run=run, attempt=attempt, facts=facts)

    def spare_plan(spare: NodeSpec) -> NodePlan:
        """A spare as it would be in the place of a node like it: a plan of spares alone would be another training."""
        nodes = list(cluster.nodes)
        nodes[max(range(len(nodes)), key=lambda index: (nodes[index].slots == spare.slots, index))] = spare
        plan = build(spec, nodes, run=run, facts=PlanFacts(environ=os.environ, share=share))
        return next(node for node in plan.nodes if node.name == spare.name)

    def make_script(plan: Plan, node: NodePlan) -> str:
        from dtctl.render import node_script  # loaded while the nodes are being connected

        return node_script(plan, node, base_dir=spec.base_dir)

    transport = cluster.make_transport()
    copies = None
    # Without the key a resume may have to name it.
    is_wanted = bool(spec.job.shared) or (spec.train is None and bool(earlier or spec.job.max_restarts))
    if spec.cluster.transport in ("ssh", "sandbox") and len(known_nodes) > 1 and is_wanted:
        from dtctl.launch.files.shared_copies import SharedCopies

        copies = SharedCopies(
            run=run,
            roots=_shared_folders(spec),
            transport=transport,
            targets=cluster.targets,
            spares=[spare_plan(spare) for spare in cluster.spares],
            is_resumed=bool(earlier),
        )
    return LaunchJob(
        run=run,
        token=token or secrets.token_hex(16),
        first_plan=plan,
        make_plan=make_plan,
        make_script=make_script,
        transport=transport,
        targets=cluster.targets,
        spares={spare.name: spare_plan(spare) for spare in cluster.spares},
        push=join_pushes(code, data, environment),
        data=data.links if data is not None else list,
        environment=environment.make_order if environment is not None else lambda: None,
        environment_digest=environment.locked.digest if environment is not None else "",
        code_folder="" if spec.pushes else spec.code_folder,
        secrets=values,
        snapshots=snapshots or {},
        earlier=earlier,
        copies=copies,
        origin=origin(shell.join(["dtctl", *sys.argv[1:]]), time.time()),
        keep=keep,
        **settings_of(spec, nodes=len(cluster.nodes), has_spares=bool(cluster.spares)),
    )


def settings_of(spec: Spec, *, nodes: int, has_spares: bool) -> dict[str, Any]:
    """Return the fields of a `LaunchJob` that are settings of the spec; JSON can hold them."""
    fixed = spec.network.rendezvous_port
    return {
        "min_nodes": spec.cluster.min_nodes or nodes,
        "return_s": spec.cluster.return_s,
        "fixed_address": spec.network.rendezvous_address or "",
        "fixed_port": fixed if isinstance(fixed, int) else None,
        "link_timeout_s": spec.cluster.link_timeout_s or (SPARED_S if has_spares else UNSPARED_S),
        "hang_s": spec.job.hang_s,
        "hang_start_s": spec.job.hang_start_s,
        "hang_output_s": spec.job.hang_output_s,
        "heal_s": spec.job.heal_s,
        "time_s": spec.job.time_s,
        "trains": spec.train is not None,
        "outputs": tuple(spec.job.outputs),
        "shared": _shared_folders(spec),
        "log_bytes": spec.job.log_mib << 20,
    }


def _shared_folders(spec: Spec) -> tuple[tuple[str, str], ...]:
    """Return path and pattern of each folder of `job.shared`; none under Slurm, where the disk is shared."""
    if spec.cluster.transport == "slurm":
        return ()
    return tuple((entry.path, entry.complete or "") for entry in spec.job.shared_folders)
