"""The program on nodes, which answers requests until the control machine has no more. Stdlib only, Python 3.8.

The loader of bootstrap.py starts it; requests.py has the table of the requests.
"""

from __future__ import annotations

import errno
import sys

from dtctl import folders
from dtctl.schema import InvalidMessage
from dtctl.supervisor import facts, frames
from dtctl.supervisor.messages.base import Quit, Refusal, parse_message_document
from dtctl.supervisor.requests import NodeRequests, RequestFailed, find_module


def main(workdir: str, early: bytes) -> int:
    """Serve one link, of which the loader has read some frames; return the exit status of the remote command."""
    link = frames.FdLink(0, 1)
    try:
        link.ready += link.parser.feed(early)
        return serve_node_requests(link, workdir)
    except (RequestFailed, folders.NotPrivateError, OSError, frames.BrokenFrame, InvalidMessage) as exc:
        if getattr(exc, "errno", None) != errno.EPIPE:  # With EPIPE, the control machine is gone.
            link.send_json(build_refusal(exc))
    return 1


def serve_node_requests(link: frames.FdLink, workdir: str) -> int:
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
            status = requests.answer(parse_message_document(document, requests.KINDS))
            if status is not None:
                return status
    finally:
        if requests is not None:
            requests.close()


def build_refusal(exc: Exception) -> Refusal:
    """Return the message that reports an error to the control machine."""
    if isinstance(exc, RequestFailed):
        return Refusal(code=exc.code, message=str(exc))
    if isinstance(exc, folders.NotPrivateError):
        return Refusal(code="foreign", message=str(exc))
    if isinstance(exc, OSError):
        return Refusal(code=facts.choose_hint_code(exc), message=facts.describe_os_error(exc))
    return Refusal(code="protocol", message=str(exc))
