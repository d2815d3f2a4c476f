"""The program on nodes: answers requests until the control machine has no more. Stdlib only, Python 3.8.

It is started by bootstrap.py; requests.py has the table of what it answers.
"""

from __future__ import annotations

import errno
import sys

from dtctl import folders
from dtctl.schema import InvalidMessage
from dtctl.supervisor import facts, frames
from dtctl.supervisor.messages.base import Quit, Refusal, parse
from dtctl.supervisor.requests import CannotDo, NodeRequests, find_module


def main(workdir: str) -> int:
    """Serve one link; the exit status of the remote command."""
    link = frames.FdLink(0, 1)
    try:
        return serve(link, workdir)
    except (CannotDo, folders.Foreign, OSError, frames.BrokenFrame, InvalidMessage) as exc:
        if getattr(exc, "errno", None) != errno.EPIPE:  # else the control machine is gone
            link.send_json(refuse(exc))
    return 1


def serve(link: frames.FdLink, workdir: str) -> int:
    """Answer requests until the last one, or until the control machine closes the link."""
    requests: NodeRequests | None = None
    try:
        while True:
            document = link.receive_json()
            if document is None or document.get("op") == Quit.op:
                return 0
            if requests is None:
                module, kind = find_module(document.get("op"))
                __import__(module)
                requests = getattr(sys.modules[module], kind)(link, workdir)
                link.idle_limit_s = requests.IDLE_LIMIT_S
            status = requests.answer(parse(document, requests.KINDS))
            if status is not None:
                return status
    finally:
        if requests is not None:
            requests.close()


def refuse(exc: Exception) -> Refusal:
    """Return the message that reports an error to the control machine."""
    if isinstance(exc, CannotDo):
        return Refusal(code=exc.code, message=str(exc))
    if isinstance(exc, folders.Foreign):
        return Refusal(code="foreign", message=str(exc))
    if isinstance(exc, OSError):
        return Refusal(code=facts.code_of(exc), message=facts.describe(exc))
    return Refusal(code="protocol", message=str(exc))
