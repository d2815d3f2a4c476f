"""Requests to the program at the machine that Slurm's commands run on; login_agent.py is the other end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from dtctl.errors import ConnectError, LaunchError
from dtctl.launch.assemble import CodePush
from dtctl.launch.control.gang import WORK_LIMIT_S
from dtctl.launch.control.link import SilenceLimit, open_program
from dtctl.schema import InvalidMessage
from dtctl.slurm.answers import A, AgentRefused, parse
from dtctl.slurm.site import LoginSite, Site
from dtctl.supervisor.messages.setup import Hello, NodeDescription

_AGENT: Final = Path(__file__).with_name("login_agent.py")


def ask(site: Site, python: str, kind: type[A], **request: object) -> A:
    """The answer to one request, whose `op` is that of the answer.

    Raises:
        LaunchError: it cannot be done there: no Slurm, no Python, no place.
        ConnectError: the machine cannot be reached.
    """
    program = _AGENT.read_text(encoding="utf-8")
    done = site.run([python, "-I", "-S", "-c", program], stdin=json.dumps({"op": kind.op, **request}).encode())
    try:
        return parse(kind, request, done.out, node=site.name)
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


def missing(site: Site) -> LaunchError:
    """The error of a machine without Slurm."""
    hint = "set `cluster.login` to a login node of the cluster" if site.name == "this machine" else None
    return LaunchError(f"there is no sbatch on {site.name}", where="cluster.login", hint=hint)


def push(site: LoginSite, code: CodePush, *, python: str, workdir: str) -> str:
    """Bring the code to a login node, as a launch over SSH brings it to each node; the folder there.

    Raises:
        TransportError: of the class that says what went wrong.
    """
    link = open_program(site.connection(), Hello(), node=site.name, python=python, workdir=workdir)
    clock = SilenceLimit(site.connection(), WORK_LIMIT_S)
    try:
        link.expect(NodeDescription)
        clock.reset()
        pushed = code(link, lambda _sent: clock.reset())
        clock.check(site.name)
        return pushed.path or ""
    except ConnectError as exc:
        raise ConnectError("the link was lost in the push", node=site.name) from exc
    finally:
        clock.cancel()
        link.stream.close()
