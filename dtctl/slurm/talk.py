"""Requests to the program at the machine that Slurm's commands run on; desk.py is the other end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from dtctl.errors import ConnectError, LaunchError, NodeError, TransferError
from dtctl.launch.assemble import CodePush
from dtctl.launch.gang import PUSH_SILENCE_S
from dtctl.launch.link import Link, Patience
from dtctl.launch.messages import Wrong, before_start
from dtctl.launch.session import error_of
from dtctl.slurm import answers
from dtctl.slurm.site import Site, There
from dtctl.supervisor import bootstrap, frames

_DESK: Final = Path(__file__).with_name("desk.py")


def ask(site: Site, python: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request.

    Raises:
        LaunchError: it cannot be done there: no Slurm, no Python, no place.
        ConnectError: the machine cannot be reached.
    """
    program = _DESK.read_text(encoding="utf-8")
    done = site.run([python, "-I", "-c", program], stdin=json.dumps(request).encode())
    try:
        answer = answers.answer(request, done.out, where=site.name)
    except Wrong:
        said = done.err.strip().splitlines()
        if any("sbatch" in line or "scontrol" in line for line in said[-1:]):
            raise missing(site) from None
        raise LaunchError(
            f"{python} there has ended with status {done.code}: {said[-1] if said else 'without a word'}",
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


def push(site: There, code: CodePush, *, python: str, workdir: str) -> str:
    """Bring the code to a login node, as a launch over SSH brings it to each node; the folder there.

    Raises:
        TransportError: of the class that says what went wrong.
    """
    stream = site.connection().open(bootstrap.command(python))
    link, clock = Link(stream, node=site.name), Patience(site.connection(), PUSH_SILENCE_S)
    try:
        stream.write(bootstrap.opening(workdir) + frames.pack_json({"op": "hello", "ports": []}))
        said = link.receive_json()
        if said is None:
            status, words = link.last_words()
            raise NodeError(f"the node's part of dtctl ended with status {status}: {words}", node=site.name)
        message = before_start(said, node=site.name)
        if message["op"] == "error":
            raise error_of(message, site.name)
        if message["op"] != "hello":
            raise TransferError(f"expected 'hello' and got {message['op']!r}", node=site.name)
        clock.heard()
        pushed = str(code(link, lambda _sent: clock.heard())["path"])
        clock.check(site.name)
        return pushed
    except ConnectError as exc:
        raise ConnectError("the link was lost in the push", node=site.name) from exc
    finally:
        clock.end()
        stream.close()
