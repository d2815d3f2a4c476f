"""Requests to the machine that Slurm's commands run on; dtctl/supervisor/slurm_commands.py is the other end."""

from __future__ import annotations

import json

from dtctl.errors import ConnectError, LaunchError
from dtctl.launch.assemble import CodePush
from dtctl.launch.control.gang import WORK_LIMIT_S
from dtctl.launch.control.link import HINTS, SilenceLimit, open_program
from dtctl.schema import InvalidMessage
from dtctl.slurm.answers import A, AgentRefused, parse
from dtctl.slurm.site import LoginSite, Site
from dtctl.supervisor import bootstrap, frames
from dtctl.supervisor.messages.base import Refusal
from dtctl.supervisor.messages.setup import Hello, NodeDescription
from dtctl.supervisor.messages.slurm import AskSlurm
from dtctl.supervisor.requests import find_module


def ask(site: Site, python: str, kind: type[A], **request: object) -> A:
    """Return the answer to one request; its `op` is that of the answer.

    Raises:
        LaunchError: it cannot be done there: no Slurm, no Python, no place.
        ConnectError: the machine cannot be reached.
    """
    asked = json.dumps({"op": kind.op, **request}).encode()
    first = AskSlurm(bytes=len(asked))
    stdin = [bootstrap.opening("", find_module(first.op)[0]), frames.pack_json(first), *frames.pack_bytes(asked)]
    done = site.run(bootstrap.arguments(python), stdin=b"".join(stdin))
    try:
        return parse(kind, request, _answer(done.data, site.name), node=site.name)
    except AgentRefused as exc:
        if str(exc).startswith(("sbatch:", "scontrol:")):
            raise missing(site) from None
        raise LaunchError(str(exc), where=site.name) from None
    except InvalidMessage:
        errors = done.err.strip().splitlines()
        if any("sbatch" in line or "scontrol" in line for line in errors[-1:]):
            raise missing(site) from None
        raise LaunchError(
            f"{python} there exited with status {done.code}: {errors[-1] if errors else 'no message'}",
            where=site.name,
            hint="`cluster.python` names the Python to use; 3.8 or newer",
        ) from None


def _answer(data: bytes, name: str) -> str:
    """Return the JSON in the frames that the program has sent; empty when it has sent none.

    Raises:
        LaunchError: the program reports that it cannot answer.
    """
    try:
        received = frames.Parser().feed(data)
        refusal = next(
            (Refusal.parse(frames.decode(payload)) for kind, _, payload in received if kind == frames.JSON), None
        )
    except (frames.BrokenFrame, InvalidMessage):
        return ""
    if refusal is not None:
        raise LaunchError(refusal.message, where=name, hint=HINTS.get(refusal.code))
    return b"".join(payload for kind, _, payload in received if kind == frames.BYTES).decode(errors="replace")


def missing(site: Site) -> LaunchError:
    """Return the error of a machine without Slurm."""
    hint = "set `cluster.login` to a login node of the cluster" if site.name == "this machine" else None
    return LaunchError(f"there is no sbatch on {site.name}", where="cluster.login", hint=hint)


def push(site: LoginSite, code: CodePush, *, python: str, workdir: str) -> str:
    """Bring the code to a login node, as a launch over SSH brings it to each node; return the folder there.

    Raises:
        TransportError: of the class for the problem.
    """
    link = open_program(site.connection(), Hello(), node=site.name, python=python, workdir=workdir)
    clock = SilenceLimit(site.connection(), WORK_LIMIT_S)
    try:
        link.expect(NodeDescription)
        clock.reset()
        pushed = code(link, lambda _sent, _note="": clock.reset())
        clock.check(site.name)
        return pushed.path or ""
    except ConnectError as exc:
        raise ConnectError("the link was lost in the push", node=site.name) from exc
    finally:
        clock.cancel()
        link.stream.close()
