"""Requests to the machine with Slurm's commands; dtctl/supervisor/slurm_commands.py answers them there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dtctl.errors import ConnectError, LaunchError
from dtctl.launch.control.link import HINTS, SilenceLimit, open_program
from dtctl.launch.control.node_sessions import WORK_LIMIT_S
from dtctl.launch.job_builder import CodePush
from dtctl.schema import InvalidMessage
from dtctl.slurm.answers import A, SlurmRequestRefused, parse_login_answer
from dtctl.slurm.site import CommandHost, LoginCommandHost
from dtctl.supervisor import bootstrap, frames
from dtctl.supervisor.messages.base import Refusal
from dtctl.supervisor.messages.setup import EnvironmentOrder, Hello, NodeDescription
from dtctl.supervisor.messages.slurm import SlurmRequest
from dtctl.supervisor.requests import find_module
from dtctl.transport.base import Connection

if TYPE_CHECKING:
    from dtctl.launch.control.launch_job import Push
    from dtctl.launch.files.environment import EnvironmentPush


def send_login_request(site: CommandHost, python: str, kind: type[A], **request: object) -> A:
    """Send one request and return its answer; the request's `op` is that of the answer's class.

    Raises:
        LaunchError: the machine cannot fulfil the request: it lacks Slurm, Python or space.
        ConnectError: the machine cannot be reached.
    """
    asked = json.dumps({"op": kind.op, **request}).encode()
    first = SlurmRequest(bytes=len(asked))
    stdin = [
        bootstrap.build_opening_bytes("", find_module(first.op)[0], has_texts=True),
        frames.pack_json(first),
        *frames.pack_bytes(asked),
    ]
    done = site.run(bootstrap.build_bootstrap_argv(python), stdin=b"".join(stdin))
    try:
        return parse_login_answer(kind, request, _decode_answer(done.data, site.name), node=site.name)
    except SlurmRequestRefused as exc:
        if str(exc).startswith(("sbatch:", "scontrol:")):
            raise build_no_slurm_error(site) from None
        hint = "`sinfo` must work there: check SLURM_CONF, or set `cluster.login` to a login node of the cluster"
        is_silent = str(exc).startswith("Slurm does not answer")
        raise LaunchError(str(exc), where=site.name, hint=hint if is_silent else None) from None
    except InvalidMessage:
        errors = done.err.strip().splitlines()
        if any("sbatch" in line or "scontrol" in line for line in errors[-1:]):
            raise build_no_slurm_error(site) from None
        raise LaunchError(
            f"{python} there exited with status {done.code}: {errors[-1] if errors else 'no message'}",
            where=site.name,
            hint="`cluster.python` names the Python to use; 3.8 or newer",
        ) from None


def _decode_answer(data: bytes, name: str) -> str:
    """Return the JSON in the frames that the program has sent; empty if it has sent none.

    Raises:
        LaunchError: the program reports that it cannot answer.
    """
    try:
        received = frames.FrameParser().feed(data)
        refusal = next(
            (Refusal.parse(frames.decode_message(payload)) for kind, _, payload in received if kind == frames.JSON),
            None,
        )
    except (frames.BrokenFrame, InvalidMessage):
        return ""
    if refusal is not None:
        raise LaunchError(refusal.message, where=name, hint=HINTS.get(refusal.code))
    return b"".join(payload for kind, _, payload in received if kind == frames.BYTES).decode(errors="replace")


def build_no_slurm_error(site: CommandHost) -> LaunchError:
    """Return the error for a machine without Slurm."""
    hint = "set `cluster.login` to a login node of the cluster" if site.name == "this machine" else None
    return LaunchError(f"there is no sbatch on {site.name}", where="cluster.login", hint=hint)


def push_code_to_login(site: LoginCommandHost, code: CodePush, *, python: str, workdir: str) -> str:
    """Copy the code to a login node, as a launch over SSH copies it to each node; return the folder there.

    Raises:
        TransportError: the copy fails; the class names the problem.
    """
    return _push_over(site.connection(), code, site=site, python=python, workdir=workdir)[0]


def push_environment_to_site(
    site: CommandHost, environment: EnvironmentPush, *, python: str, workdir: str
) -> EnvironmentOrder:
    """Copy lock, wheels and uv of an environment to the disk that all nodes share; return the order for the nodes.

    The files are copied even if the environment exists, since it may be removed while the job waits.

    Raises:
        TransportError: the copy fails; the class names the problem.
    """
    connection = site.connection() if isinstance(site, LoginCommandHost) else site.transport.connect(site.target)
    try:
        _, top = _push_over(connection, environment, site=site, python=python, workdir=workdir)
    finally:
        if not isinstance(site, LoginCommandHost):
            connection.close()
    return environment.make_order(top)


def _push_over(connection: Connection, push: Push, *, site: CommandHost, python: str, workdir: str) -> tuple[str, str]:
    """Copy files over a connection; return their folder, and the absolute path of the workdir."""
    link = open_program(connection, Hello(), node=site.name, python=python, workdir=workdir)
    clock = SilenceLimit(connection, WORK_LIMIT_S)
    try:
        link.description = link.expect(NodeDescription)
        clock.reset()
        pushed = push(link, lambda _sent, _of, _note="": clock.reset())
        clock.check(site.name)
        return pushed.path or "", link.description.workdir
    except ConnectError as exc:
        raise ConnectError("the link was lost in the push", node=site.name) from exc
    finally:
        clock.cancel()
        link.stream.close()
