"""Requests to the program at the machine that Slurm's commands run on; login_agent.py is the other end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from dtctl.errors import ConnectError, LaunchError
from dtctl.launch.assemble import CodePush
from dtctl.launch.control.gang import PUSH_SILENCE_S
from dtctl.launch.control.link import SilenceLimit, open_supervisor
from dtctl.launch.control.messages import InvalidMessage
from dtctl.slurm import answers
from dtctl.slurm.site import LoginSite, Site

_AGENT: Final = Path(__file__).with_name("login_agent.py")


def ask(site: Site, python: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request.

    Raises:
        LaunchError: it cannot be done there: no Slurm, no Python, no place.
        ConnectError: the machine cannot be reached.
    """
    program = _AGENT.read_text(encoding="utf-8")
    done = site.run([python, "-I", "-c", program], stdin=json.dumps(request).encode())
    try:
        answer = answers.answer(request, done.out, node=site.name)
    except InvalidMessage:
        errors = done.err.strip().splitlines()
        if any("sbatch" in line or "scontrol" in line for line in errors[-1:]):
            raise missing(site) from None
        raise LaunchError(
            f"{python} there exited with status {done.code}: {errors[-1] if errors else 'no message'}",
            where=site.name,
            hint="`cluster.python` names the Python to use; 3.8 or newer",
        ) from None
    if "error" in answer:
        if answer["error"].startswith(("sbatch:", "scontrol:")):
            raise missing(site)
        raise LaunchError(str(answer["error"]), where=site.name)
    return answer


def missing(site: Site) -> LaunchError:
    """The error of a machine without Slurm."""
    hint = "set `cluster.login` to a login node of the cluster" if site.name == "this machine" else None
    return LaunchError(f"there is no sbatch on {site.name}", where="cluster.login", hint=hint)


def push(site: LoginSite, code: CodePush, *, python: str, workdir: str) -> str:
    """Bring the code to a login node, as a launch over SSH brings it to each node; the folder there.

    Raises:
        TransportError: of the class that says what went wrong.
    """
    hello = {"op": "hello", "ports": []}
    link = open_supervisor(site.connection(), hello, node=site.name, python=python, workdir=workdir)
    clock = SilenceLimit(site.connection(), PUSH_SILENCE_S)
    try:
        link.expect("hello")
        clock.reset()
        pushed = str(code(link, lambda _sent: clock.reset())["path"])
        clock.check(site.name)
        return pushed
    except ConnectError as exc:
        raise ConnectError("the link was lost in the push", node=site.name) from exc
    finally:
        clock.cancel()
        link.stream.close()
