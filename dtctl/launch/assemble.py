"""From a spec to a job that can be launched: nodes found, plan made, code scanned, transport chosen. Starts nothing."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtctl import names
from dtctl.errors import LaunchError, PlanError, SpecError
from dtctl.launch import push as pushing
from dtctl.launch import trust
from dtctl.launch.cores import usable_cores
from dtctl.launch.job import Job
from dtctl.launch.link import Link
from dtctl.launch.record import RunRecord
from dtctl.launch.tree import Tree, scan
from dtctl.plan.build import Facts, build
from dtctl.plan.environment import Share, check_text
from dtctl.plan.model import Plan
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec, resolve_nodes, resolve_spares
from dtctl.transport.base import Target, Transport
from dtctl.transport.dial import EarlyCalls, OpenSocket, open_socket

if TYPE_CHECKING:
    from dtctl.plan.model import NodePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes of a spec and the way to them."""

    nodes: tuple[NodeSpec, ...]
    spares: tuple[NodeSpec, ...] = ()
    targets: Mapping[str, Target]
    """Of nodes and spares."""
    make_transport: Callable[[], Transport]
    """Calls the nodes and imports what the transport needs, which takes a while; not called in a dry run."""


def cluster_of(spec: Spec, *, start: bool) -> Cluster:
    """The nodes that a spec names.

    Args:
        spec: the checked spec.
        start: whether a sandbox may be started for it.

    Raises:
        SpecError: the nodes are not well formed.
        SandboxError: the sandbox cannot be used.
    """
    if spec.cluster.transport == "sandbox":
        from dtctl.launch.sandboxed import sandbox_cluster

        return sandbox_cluster(spec, start=start)
    nodes = resolve_nodes(spec)
    spares = resolve_spares(spec)
    targets = _targets(spec, (*nodes, *spares))
    if spec.cluster.transport == "slurm":
        return Cluster(nodes=nodes, spares=spares, targets=targets, make_transport=_slurm)
    if spec.cluster.transport == "local":
        return Cluster(nodes=nodes, targets=targets, make_transport=_local)
    first = [targets[node.name] for node in nodes]

    def over_ssh() -> Transport:
        trust.check(spec)  # before ssh reads a configuration that could run commands
        return ssh_transport(first)

    return Cluster(nodes=nodes, spares=spares, targets=targets, make_transport=over_ssh)


def _slurm() -> Transport:
    raise PlanError(
        "this command needs machines that it can reach, and Slurm's are known inside a job only",
        where="cluster.transport",
        hint="`dtctl launch`, `status`, `logs`, `watch`, `stop`, `doctor` and `report` know Slurm",
    )


def _local() -> Transport:
    from dtctl.transport.local import LocalTransport

    return LocalTransport()


def ssh_transport(targets: Iterable[Target], connect: OpenSocket = open_socket) -> Transport:
    """SSH to these nodes, which are being called when this returns."""
    early = EarlyCalls(targets, connect)
    from dtctl.transport.ssh import SshTransport  # takes a while, in which the nodes get ready

    return SshTransport(open_socket=connect, early=early)


def _targets(spec: Spec, nodes: Sequence[NodeSpec]) -> dict[str, Target]:
    cluster = spec.cluster
    return {
        node.name: Target(
            name=node.name,
            address=node.address,
            user=node.user,
            port=node.port,
            identity_file=str(cluster.identity_file) if cluster.identity_file else None,
            known_hosts=str(cluster.known_hosts) if cluster.known_hosts else None,
            ssh_config=str(cluster.ssh_config) if cluster.ssh_config else None,
            connect_timeout_s=cluster.connect_timeout_s,
        )
        for node in nodes
    }


def spec_of_run(record: RunRecord) -> Spec:
    """The spec that a run was launched with.

    Raises:
        SpecError: its copy in the run's folder is gone or broken.
    """
    from dtctl.spec.load import parse_spec

    path = record.folder / names.RUN_SPEC_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise SpecError(f"the run's copy of its spec cannot be read: {exc.strerror}", where=str(path)) from exc
    return parse_spec(text, source=str(path), base_dir=record.base_dir)


def cluster_of_run(record: RunRecord) -> Cluster:
    """The nodes of a run that was launched before, and the way to them.

    Raises:
        SpecError: the copy of its spec is gone or broken.
    """
    return cluster_of(spec_of_run(record), start=False)


def job_of_run(record: RunRecord) -> Job:
    """The job of a run that was launched before; nothing is pushed for it again.

    Raises:
        SpecError: the copy of its spec is gone or broken.
        PlanError: a secret that it needs is not set here.
    """
    spec = spec_of_run(record)
    cluster = cluster_of(spec, start=False)
    info = record.info()
    return job_of(spec, cluster, run=record.run, keep=True, code=None, token=info.token, snapshots=info.snapshots)


def attempt_of_run(record: RunRecord, job: Job) -> Plan:
    """The plan of the newest attempt of a run, made again.

    Raises:
        LaunchError: none was ever started.
    """
    facts = record.plan()
    if not facts:
        raise LaunchError(f"run {record.run} was never started", where=str(record.folder))
    meeting = facts["rendezvous"]
    slots = {node["name"]: int(node["slots"]) for node in facts["nodes"]}
    return job.make_plan(int(facts["attempt"]), meeting["address"], int(meeting["port"]), slots, list(slots))


def first_plan(spec: Spec, cluster: Cluster, *, run: str) -> Plan:
    """The plan as it is known before any node was asked; what a dry run shows.

    Raises:
        PlanError: no job can be made of the spec.
    """
    return build(
        spec, cluster.nodes, run=run, facts=Facts(environ=os.environ, share=_share(spec), source=_source(spec))
    )


def _share(spec: Spec) -> Share | None:
    """What each node has of this machine, if they all lie on it."""
    if spec.cluster.transport == "local":
        return Share(cores=usable_cores(), nodes=1, threads=os.environ.get("OMP_NUM_THREADS"))
    if spec.cluster.transport == "sandbox":
        return Share(cores=usable_cores(), nodes=len(resolve_nodes(spec)))
    return None


def _source(spec: Spec) -> str:
    """Text of the job's script, if it is here."""
    if spec.job.script is None or spec.job.kind != "direct":
        return ""
    try:
        return (spec.base_dir / spec.job.files.root / spec.job.script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def read_secrets(spec: Spec) -> dict[str, str]:
    """Values of the secrets that the spec names, from this machine's environment.

    Raises:
        PlanError: one of them is not set.
    """
    missing = [name for name in spec.job.secrets if name not in os.environ]
    if missing:
        raise PlanError(
            f"the job needs {', '.join(missing)}, which is not set here",
            where="job.secrets",
            hint=f"export {missing[0]}=... in the shell that runs dtctl",
        )
    for name in spec.job.secrets:
        check_text(name, os.environ[name], where="job.secrets")
    return {name: os.environ[name] for name in spec.job.secrets}


class CodePush:
    """Scans the working tree in the background and brings it to every node that asks."""

    def __init__(self, spec: Spec) -> None:
        self._payloads = pushing.Payloads()
        root = spec.base_dir / spec.job.files.root
        cache = spec.base_dir / names.STATE_DIR / "cache"
        files = spec.job.files
        self._tree: Future[Tree] = Future()

        def work() -> None:
            try:
                self._tree.set_result(
                    scan(root, include=tuple(files.include), exclude=tuple(files.exclude), cache=cache)
                )
            except Exception as exc:  # noqa: BLE001 - raised again by whoever asks for the tree
                self._tree.set_exception(exc)

        threading.Thread(target=work, name="scan", daemon=True).start()

    @property
    def tree(self) -> Tree:
        """The scanned tree; waits for the scan."""
        return self._tree.result()

    def __call__(self, link: Link, progress: Callable[[int], None]) -> dict[str, Any]:
        """Bring the tree to one node; what was done."""
        done = pushing.push(link, self.tree, shared=self._payloads, progress=progress)
        return {"path": done.path, "files": done.files_sent, "bytes": done.bytes_sent, "state": done.state}


def check_program_files(spec: Spec, tree: Tree) -> None:
    """Refuse a job whose script is not among the files that are pushed.

    Raises:
        PlanError: the script does not exist, or is left out of the push.
    """
    script = spec.job.script
    if script is None or Path(script).is_absolute():
        return
    wanted = os.path.normpath(script)
    if any(os.fsdecode(entry.path) == wanted for entry in tree.files):
        return
    path = Path(spec.base_dir) / spec.job.files.root / script
    if wanted.startswith(".."):
        raise PlanError(
            f"{script} lies outside of the folder that is pushed",
            where=str(path),
            hint="move it there, or name a folder above both as `job.files.root`",
        )
    if path.is_dir():
        raise PlanError(f"{script} is a folder", where=str(path), hint="name the script in it, or use `job.module`")
    if path.exists():
        raise PlanError(
            f"{script} is not among the files that are pushed",
            where=str(path),
            hint="take it out of .gitignore and .dtctlignore, or name it in `job.files.include`",
        )
    raise PlanError(f"there is no {script}", where=str(path), hint="`job.script` is relative to the folder of the spec")


def job_of(
    spec: Spec,
    cluster: Cluster,
    *,
    run: str,
    keep: bool,
    code: CodePush | None,
    token: str | None = None,
    snapshots: Mapping[str, str] | None = None,
) -> Job:
    """Everything that a launch needs, decided; `token` is that of a run that is under way already.

    `snapshots` are the folders, by node, of a run that is gone on from.

    Raises:
        DtctlError: of the class that says what is wrong; nothing was started.
    """
    plan = first_plan(spec, cluster, run=run)
    values = read_secrets(spec)
    fixed = spec.network.rendezvous_port
    source, share = _source(spec), _share(spec)

    everyone = {node.name: node for node in (*cluster.nodes, *cluster.spares)}

    def make_plan(attempt: int, address: str, port: int, gpus: Mapping[str, int], nodes: Sequence[str]) -> Plan:
        facts = Facts(environ=os.environ, address=address, port=port, gpus=gpus, share=share, source=source)
        return build(spec, [everyone[name] for name in nodes], run=run, attempt=attempt, facts=facts)

    spare_facts = Facts(environ=os.environ, share=share)
    standing_by = build(spec, cluster.spares, run=run, facts=spare_facts).nodes if cluster.spares else ()

    def make_script(plan: Plan, node: NodePlan) -> str:
        from dtctl.render.scripts import node_script  # loaded while the nodes are being connected

        return node_script(plan, node, base_dir=spec.base_dir)

    return Job(
        run=run,
        token=token or secrets.token_hex(16),
        first_plan=plan,
        make_plan=make_plan,
        make_script=make_script,
        transport=cluster.make_transport(),
        targets=cluster.targets,
        spares={node.name: node for node in standing_by},
        min_nodes=spec.cluster.min_nodes or len(cluster.nodes),
        return_s=spec.cluster.return_s,
        push=code,
        fixed_address=spec.network.rendezvous_address is not None,
        fixed_port=fixed if isinstance(fixed, int) else None,
        secrets=values,
        link_timeout_s=spec.cluster.link_timeout_s,
        hang_s=spec.job.hang_s,
        hang_start_s=spec.job.hang_start_s,
        time_s=spec.job.time_s,
        trains=spec.train is not None,
        snapshots=snapshots or {},
        keep=keep,
    )
