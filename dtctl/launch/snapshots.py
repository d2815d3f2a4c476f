"""Queries of snapshots where they are stored, by `python -m dtctl.runtime.snapshot` here or on the nodes of a run."""

from __future__ import annotations

import posixpath
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from dtctl import children, names, shell
from dtctl.errors import DtctlError, LaunchError, NodeError, SnapshotError
from dtctl.launch.cluster import build_run_cluster
from dtctl.launch.control.link import SilenceLimit
from dtctl.launch.records.record import RunRecord, describe_removal
from dtctl.launch.run_spec import load_run_spec
from dtctl.launch.snapshot_answers import ANSWER_BYTES, A, parse_answer
from dtctl.schema import InvalidMessage, check_prose
from dtctl.supervisor import run_workdir
from dtctl.transport.base import ByteStream, Connection, Target, Transport
from dtctl.transport.fanout import fan_out

MODULE = "dtctl.runtime.snapshot"
END_S = 10.0
"""Seconds that a command may take to exit after its last output."""
SILENCE_S = 60.0
"""Seconds that a node may be silent while it lists its folders."""
READING_S = 3600.0
"""Seconds that a node may be silent while it reads all of its snapshots."""
_QUICK = ("ls", "remove")


def run_here(kind: type[A], arguments: Sequence[str]) -> A:
    """Run `dtctl.runtime.snapshot` on this machine, in a process of its own.

    Raises:
        SnapshotError: the command reports that it has failed.
        NodeError: the command ended without an answer.
    """
    argv = children.build_module_argv(sys.executable, MODULE, kind.verb, *arguments)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return _parse_snapshot_answer(kind, done.returncode, done.stdout, done.stderr, where="this machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SnapshotCommand:
    target: Target
    command: str
    """Shell text up to the arguments of the module."""
    folder: str
    variables: str = ""
    """Shell text for the command's standard input, since it contains private values."""


class RunSnapshots:
    """Snapshots of one run: a folder on each of its nodes, or a URL that all nodes use."""

    def __init__(self, record: RunRecord) -> None:
        """Find the nodes of the run, without calling them.

        Raises:
            LaunchError: the run was never started, or no node of its plan is in its spec.
            SnapshotError: the run's files were removed from its nodes.
            SpecError: the copy of its spec is gone or broken.
        """
        plan = record.whole_plan()
        cluster, spec = build_run_cluster(record), load_run_spec(record)
        self._make_transport = cluster.make_transport
        folder = spec.snapshot_dir
        info = record.info()
        code, continued = record.read_code_folders(), info.snapshots
        removal = describe_removal(record.run, info.removed, [node["name"] for node in plan["nodes"]])
        if removal and not continued and lies_in_run_folder(folder):
            raise SnapshotError(removal, where=str(record.folder))
        unpushed = "" if spec.pushes else spec.code_folder
        self._places = {}
        # All nodes can read a URL, so only the first node is queried.
        at_url = folder is not None and is_shared_url(folder)
        for node in plan["nodes"][: 1 if at_url else None]:
            name = node["name"]
            run_dir = posixpath.join(node["workdir"], "runs", record.run)
            if name in cluster.targets:
                self._places[name] = _SnapshotCommand(
                    target=cluster.targets[name],
                    command=_build_setup_script(node, code.get(name, unpushed), asks=at_url),
                    folder=_resolve_snapshot_folder(folder, run_dir)
                    or continued.get(name)
                    or posixpath.join(run_dir, "snapshots"),
                    variables=_job_variables(node) if at_url else "",
                )
        if not self._places and cluster.targets:
            where = str(record.folder / names.PLAN_FILE)
            raise LaunchError("the plan of the run names none of the nodes of its spec", where=where)

    def query_nodes(
        self, kind: type[A], options: Sequence[str], nodes: Sequence[str] | None = None
    ) -> dict[str, A | DtctlError]:
        """Run a command on all nodes at once, or on some; return node -> answer or error."""
        transport = self._make_transport()
        places = {name: place for name, place in self._places.items() if nodes is None or name in nodes}
        return fan_out(places, partial(_request_snapshot_answer, transport=transport, kind=kind, options=options))

    def fetch(self, node: str, kind: type[A], options: Sequence[str], out: IO[bytes], *, limit_bytes: int) -> A:
        """Fetch the output of an export or a `send`, up to the requested size.

        Raises:
            TransportError: the node, or the connection to it, fails, or the node sends more.
            SnapshotError: there is no good snapshot.
        """
        place = self._places[node]
        connection = self._make_transport().connect(place.target)
        clock = SilenceLimit(connection, READING_S)
        try:
            stream = _open_snapshot_stream(connection, place, kind.verb, options)
            remaining = limit_bytes
            while data := stream.read(1 << 18):
                clock.reset()
                remaining -= len(data)
                if remaining < 0:
                    raise NodeError(f"the node sent more than the expected {limit_bytes} bytes", node=node)
                out.write(data)
            clock.check(node)
            code = stream.exit_status(END_S)
            return _parse_snapshot_answer(kind, code, stream.read_stderr().decode(errors="replace"), "", where=node)
        finally:
            clock.cancel()
            connection.close()


def _resolve_snapshot_folder(folder: str | None, run_dir: str) -> str | None:
    """Return the path of a folder that the job names; a relative path begins in the run's working folder."""
    if folder is None or not lies_in_run_folder(folder):
        return folder
    return posixpath.join(run_dir, run_workdir.FOLDER, folder)


def _request_snapshot_answer(
    place: _SnapshotCommand, *, transport: Transport, kind: type[A], options: Sequence[str]
) -> A:
    connection = transport.connect(place.target)
    name = place.target.name
    clock = SilenceLimit(connection, SILENCE_S if kind.verb in _QUICK else READING_S)
    try:
        stream = _open_snapshot_stream(connection, place, kind.verb, options)
        output = bytearray()
        while data := stream.read(1 << 18):
            output += data
            if len(output) > ANSWER_BYTES:
                raise NodeError(f"its answer is longer than {ANSWER_BYTES >> 20} MiB", node=name)
        clock.check(name)
        code = stream.exit_status(END_S)
        errors = stream.read_stderr().decode(errors="replace")
        return _parse_snapshot_answer(kind, code, output.decode(errors="replace"), errors, where=name)
    finally:
        clock.cancel()
        connection.close()


def _open_snapshot_stream(
    connection: Connection, place: _SnapshotCommand, verb: str, options: Sequence[str]
) -> ByteStream:
    stream = connection.open(
        shell.join_command(["bash", "-c", f"{place.command} {shell.join_command([verb, place.folder, *options])}"])
    )
    if place.variables:
        stream.write(place.variables.encode())
    stream.close_stdin()
    return stream


def _job_variables(node: Mapping[str, Any]) -> str:
    """Return the job's variables for the store: `job.env`, `job.env_from` and the node's own.

    Secrets are not stored, so they are missing.
    """
    origins = ("job.env", "cluster.nodes")
    variables = [variable for variable in node["env"] if variable["origin"].startswith(origins)]
    words = ((variable["name"], shell.quote_word(shell.expand_home(variable["value"]))) for variable in variables)
    return "".join(f"export {name}={word}\n" for name, word in words)


def _build_setup_script(node: Mapping[str, Any], code: str, *, asks: bool) -> str:
    """Return the shell text that prepares a call of the job's Python: its folder, and its set-up without output.

    Args:
        node: the node, as in the plan.
        code: folder of the job's code on the node.
        asks: whether variables come over standard input.
    """
    python = node["python"] or "python3"
    paths = [variable["value"] for variable in node["env"] if variable["name"] == "PYTHONPATH"]
    lines = ["exec 3>&1 1>&2", *(['eval "$(cat)"'] if asks else [])]
    lines += [f"cd {shell.quote_program(code)} || true"] if code else []
    lines += [f"export PYTHONPATH={shell.quote_word(path)}" for path in paths]
    return "\n".join(
        [*lines, *node["setup"], f"exec {shell.join_command(children.build_module_argv(python, MODULE, last=''))} 1>&3"]
    )


def _parse_snapshot_answer(kind: type[A], code: int | None, text: str, errors: str, *, where: str) -> A:
    try:
        return parse_answer(kind, text, node=where)
    except InvalidMessage:
        reason = (errors.strip().splitlines() or text.strip().splitlines() or [f"status {code}"])[-1]
        raise NodeError(
            f"the snapshots cannot be read: {check_prose(reason)}",
            node=where,
            hint="the job's Python needs dtctl and blake3 (`pip install '.[train]'` in a clone of dtctl)",
        ) from None


def is_folder(place: str | None) -> bool:
    """Return whether a command's argument is a folder or a URL rather than a run's name."""
    return place is not None and ("://" in place or Path(place).expanduser().is_dir())


def lies_in_run_folder(folder: str | None) -> bool:
    """Return whether snapshots are in the folder of their run; `folder` is the one that the job names."""
    return folder is None or not (is_shared_url(folder) or folder.startswith(("/", "~")))


def is_shared_url(place: str) -> bool:
    """Return whether a place of snapshots is a URL, which every node and this machine can read."""
    return "://" in place and not place.startswith(("file://", "local://"))
