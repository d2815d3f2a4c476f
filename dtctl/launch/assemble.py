"""From a spec, or the record of a run, to a job that can be launched. Starts nothing."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtctl import folders, names
from dtctl.errors import PlanError, SpecError
from dtctl.launch import first_plan as first
from dtctl.launch.cluster import ResolvedCluster, cluster_of
from dtctl.launch.control.link import NodeLink
from dtctl.launch.files import push as pushing
from dtctl.launch.files.tree import Tree, scan
from dtctl.launch.job import LaunchJob
from dtctl.launch.records.record import RunRecord
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.environment import check_text
from dtctl.plan.model import Plan
from dtctl.spec.model import Spec

SPEC_BYTES = 4 << 20
"""Of a run's copy of its spec."""
if TYPE_CHECKING:
    from dtctl.plan.model import NodePlan


def spec_of_run(record: RunRecord) -> Spec:
    """The spec that a run was launched with.

    Raises:
        SpecError: its copy in the run's folder is gone or broken.
    """
    from dtctl.spec.load import parse_spec

    path = record.folder / names.RUN_SPEC_FILE
    try:
        text = folders.read_regular(str(path), SPEC_BYTES).decode(errors="replace")
    except OSError as exc:
        raise SpecError(f"the run's copy of its spec cannot be read: {exc.strerror}", where=str(path)) from exc
    return parse_spec(text, source=str(path), base_dir=record.base_dir)


def cluster_of_run(record: RunRecord) -> ResolvedCluster:
    """The nodes of a run that was launched before, and the way to them.

    Raises:
        SpecError: the copy of its spec is gone or broken.
    """
    return cluster_of(spec_of_run(record), start=False)


def job_of_run(record: RunRecord) -> LaunchJob:
    """The job of a run that was launched before; nothing is pushed for it again.

    Raises:
        SpecError: the copy of its spec is gone or broken.
        PlanError: a secret that it needs is not set here.
    """
    spec = spec_of_run(record)
    cluster = cluster_of(spec, start=False)
    info = record.info()
    return job_of(spec, cluster, run=record.run, keep=True, code=None, token=info.token, snapshots=info.snapshots)


def attempt_of_run(record: RunRecord, job: LaunchJob) -> Plan:
    """The plan of the newest attempt of a run, made again.

    Raises:
        LaunchError: none was ever started.
    """
    facts = record.whole_plan()
    rendezvous = facts["rendezvous"]
    slots = {node["name"]: int(node["slots"]) for node in facts["nodes"]}
    return job.make_plan(int(facts["attempt"]), rendezvous["address"], int(rendezvous["port"]), slots, list(slots))


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

    def __call__(self, link: NodeLink, progress: Callable[[int], None]) -> dict[str, Any]:
        """Bring the tree to one node; what was done."""
        result = pushing.push(link, self.tree, shared=self._payloads, progress=progress)
        return {"path": result.path, "files": result.files_sent, "bytes": result.bytes_sent, "state": result.state}


def check_program_files(spec: Spec, tree: Tree) -> None:
    """Refuse a job whose script is not among the files that are pushed.

    Raises:
        PlanError: the script does not exist, or is left out of the push.
    """
    script = spec.job.script
    if script is None or Path(script).is_absolute():
        return
    script_path = os.path.normpath(script)
    if any(os.fsdecode(entry.path) == script_path for entry in tree.files):
        return
    path = Path(spec.base_dir) / spec.job.files.root / script
    if script_path.startswith(".."):
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
    cluster: ResolvedCluster,
    *,
    run: str,
    keep: bool,
    code: CodePush | None,
    token: str | None = None,
    snapshots: Mapping[str, str] | None = None,
) -> LaunchJob:
    """Everything that a launch needs, decided; `token` is that of a run that is under way already.

    `snapshots` are the folders, by node, of a run that is gone on from.

    Raises:
        DtctlError: of the class that says what is wrong; nothing was started.
    """
    plan = first.first_plan(spec, cluster, run=run)
    values = read_secrets(spec)
    fixed = spec.network.rendezvous_port
    source, share = first.source(spec), first.share(spec)

    known_nodes = {node.name: node for node in (*cluster.nodes, *cluster.spares)}

    def make_plan(attempt: int, address: str, port: int, gpus: Mapping[str, int], nodes: Sequence[str]) -> Plan:
        facts = PlanFacts(environ=os.environ, address=address, port=port, gpus=gpus, share=share, source=source)
        return build(spec, [known_nodes[name] for name in nodes], run=run, attempt=attempt, facts=facts)

    spare_facts = PlanFacts(environ=os.environ, share=share)
    spare_plans = build(spec, cluster.spares, run=run, facts=spare_facts).nodes if cluster.spares else ()

    def make_script(plan: Plan, node: NodePlan) -> str:
        from dtctl.render import node_script  # loaded while the nodes are being connected

        return node_script(plan, node, base_dir=spec.base_dir)

    return LaunchJob(
        run=run,
        token=token or secrets.token_hex(16),
        first_plan=plan,
        make_plan=make_plan,
        make_script=make_script,
        transport=cluster.make_transport(),
        targets=cluster.targets,
        spares={node.name: node for node in spare_plans},
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
