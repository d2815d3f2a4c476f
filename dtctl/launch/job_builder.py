"""Assembly of a job that can be launched, from a spec or the record of a run; nothing is started."""

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

from dtctl import names, shell
from dtctl.launch import cluster as clusters
from dtctl.launch.cluster import ResolvedCluster, resolve_cluster
from dtctl.launch.control.link import NodeLink
from dtctl.launch.files import push as pushing
from dtctl.launch.files.relay import BlockRelay
from dtctl.launch.files.tree import FileTree, scan_push_tree
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.launch.records.record import RunRecord, check_no_link
from dtctl.launch.run_spec import load_run_spec
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.environment import ON_CPUS, read_job_secrets
from dtctl.plan.model import Plan, ThreadCount
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec
from dtctl.supervisor.messages.attempt import RunOrigin
from dtctl.supervisor.messages.setup import EnvironmentOrder

CACHE_DIR = "cache"
COMMAND_CHARACTERS = 4000
"""Most characters of the command line in the records of nodes."""
SPARED_S = 10.0
"""Default of `cluster.link_timeout_s` in seconds, where a spare can take the place of a silent node."""
UNSPARED_S = 30.0
"""Same default without spares: a link can be interrupted for 12 s, and a busy node can be silent as long."""
if TYPE_CHECKING:
    from dtctl.launch.control.launch_job import LaunchJob, Push
    from dtctl.launch.files.data import DataPush
    from dtctl.launch.files.environment import EnvironmentPush
    from dtctl.plan.model import NodePlan


def rebuild_run_job(record: RunRecord) -> LaunchJob:
    """Return the job of a run that was launched before; its files are not pushed again.

    Raises:
        SpecError: the copy of its spec is gone or broken.
        PlanError: a secret that the job needs is not set here.
    """
    spec = load_run_spec(record)
    cluster = resolve_cluster(spec, start=False, record=record)
    info = record.info()
    if info.environment:
        cluster = clusters.set_cluster_environment(cluster, info.environment)
    job = build_launch_job(
        spec, cluster, run=record.run, keep=True, code=None, token=info.token, snapshots=info.snapshots
    )
    kept = EnvironmentOrder(digest=info.environment) if info.environment else None
    return replace(
        job,
        origin=build_run_origin(info.command_line, info.started),
        environment=lambda: kept,
        environment_digest=info.environment,
    )


def rebuild_run_attempt(record: RunRecord, job: LaunchJob) -> Plan:
    """Make the plan of the newest attempt of a run again.

    Raises:
        LaunchError: no attempt was ever started.
    """
    facts = record.whole_plan()
    rendezvous = facts["rendezvous"]
    slots = {node["name"]: int(node["slots"]) for node in facts["nodes"]}
    threads = ThreadCount(**facts["threads"]) if facts.get("threads") else None
    on_cpus = asdict(ON_CPUS) in facts["nodes"][0].get("env", [])
    gpus = dict.fromkeys(slots, 0) if on_cpus else slots
    return job.make_plan(
        int(facts["attempt"]), list(slots), rendezvous["address"], int(rendezvous["port"]), gpus=gpus, threads=threads
    )


def format_this_user() -> str:
    """Return user and machine, `user@host`."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # No user has this id.
        user = "?"
    return f"{user}@{socket.gethostname()}"


def build_run_origin(command: str, started: float) -> RunOrigin:
    """Return the origin of the run for the nodes; `started` in seconds since the epoch."""
    return RunOrigin(launched_from=format_this_user(), command=command[:COMMAND_CHARACTERS], started=started)


class CodePush:
    """Push of the working tree: a scan in the background, and the transfer to every node that needs the tree."""

    def __init__(self, spec: Spec) -> None:
        self._payloads = pushing.PayloadCache()
        root = spec.base_dir / spec.job.files.root
        cache = spec.base_dir / names.STATE_DIR / CACHE_DIR
        check_no_link(spec.base_dir, CACHE_DIR)
        files = spec.job.files
        self._tree: Future[FileTree] = Future()

        def work() -> None:
            try:
                self._tree.set_result(
                    scan_push_tree(root, include=tuple(files.include), exclude=tuple(files.exclude), cache=cache)
                )
            except Exception as exc:  # noqa: BLE001 - raised again in the caller that requests the tree
                self._tree.set_exception(exc)

        threading.Thread(target=work, name="scan", daemon=True).start()

    @property
    def tree(self) -> FileTree:
        """The scanned tree; reading this property waits for the scan."""
        return self._tree.result()

    def expect_nodes(self, count: int) -> None:
        """Set the number of nodes that will need the tree."""
        self._payloads = pushing.PayloadCache(BlockRelay(count))

    def __call__(self, link: NodeLink, progress: PushReport) -> PushProgress:
        """Bring the tree to one node; return the final state of the transfer."""
        result = pushing.push_tree_to_node(link, self.tree, shared=self._payloads, progress=progress)
        return PushProgress(
            path=result.path, files=result.files_sent, bytes=result.bytes_sent, of=result.content_bytes,
            state=result.state,
        )  # fmt: skip


def join_pushes(code: CodePush | None, *others: Push | None) -> Push | None:
    """Return one push for the code of a job and all others; None if there are none."""
    joined: Push | None = code
    for other in others:
        joined = _combine_pushes(joined, other) if joined is not None and other is not None else joined or other
    return joined


def _combine_pushes(code: Push, data: Push) -> Push:
    def push(link: NodeLink, progress: PushReport) -> PushProgress:
        first = code(link, progress)
        second = data(link, pushing.report_after(first.of or 0, progress))
        state = "done" if "done" in (first.state, second.state) else first.state
        files, size = ((first.files or 0) + (second.files or 0), (first.bytes or 0) + (second.bytes or 0))
        return replace(first, files=files, bytes=size, of=(first.of or 0) + (second.of or 0), state=state)

    return push


def build_launch_job(
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
    """Return the job of a launch; `token` is given if the run has been started already.

    If this run continues another one, `snapshots` are the folders of that run by node, and `earlier` is its name.

    Raises:
        DtctlError: the job cannot be launched; the class depends on the problem. Nothing was started.
    """
    from dtctl.launch.control.launch_job import LaunchJob

    plan = clusters.build_first_plan(spec, cluster, run=run)
    for push in (code, data, environment):
        if push is not None:
            push.expect_nodes(len(cluster.nodes) + len(cluster.spares))
    values = read_job_secrets(spec.job.secrets, os.environ)
    source, share = clusters.read_job_source(spec), clusters.compute_machine_share(spec)

    known_nodes = {node.name: node for node in (*cluster.nodes, *cluster.spares)}

    def make_plan(
        attempt: int,
        nodes: Sequence[str],
        address: str,
        port: int,
        *,
        gpus: Mapping[str, int],
        cores: Mapping[str, int] | None = None,
        threads: ThreadCount | None = None,
    ) -> Plan:
        facts = PlanFacts(
            environ=os.environ, address=address, port=port, gpus=gpus, cores=cores or {}, threads=threads, share=share,
            source=source,
        )  # fmt: skip
        return build(spec, [known_nodes[name] for name in nodes], run=run, attempt=attempt, facts=facts)

    def spare_plan(spare: NodeSpec) -> NodePlan:
        """Return a spare as if it replaced a similar node: a plan of spares alone would have another world size."""
        nodes = list(cluster.nodes)
        nodes[max(range(len(nodes)), key=lambda index: (nodes[index].slots == spare.slots, index))] = spare
        plan = build(spec, nodes, run=run, facts=PlanFacts(environ=os.environ, share=share))
        return next(node for node in plan.nodes if node.name == spare.name)

    def make_script(plan: Plan, node: NodePlan) -> str:
        from dtctl.render import render_node_script  # The import overlaps the connections to the nodes.

        return render_node_script(plan, node, base_dir=spec.base_dir)

    transport = cluster.make_transport()
    copies = None
    # Without `job.shared`, a resume may have to report checkpoints that only some nodes have.
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
        origin=build_run_origin(shell.join_command(["dtctl", *sys.argv[1:]]), time.time()),
        keep=keep,
        **collect_job_settings(spec, nodes=len(cluster.nodes), has_spares=bool(cluster.spares)),
    )


def collect_job_settings(spec: Spec, *, nodes: int, has_spares: bool) -> dict[str, Any]:
    """Return the fields of a `LaunchJob` that are settings of the spec; JSON can represent them."""
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
