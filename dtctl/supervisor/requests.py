"""A program on a node that answers requests, of `clean`, `fetch` or `runs --nodes`. Stdlib only, Python 3.8."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtctl.schema import InvalidMessage
from dtctl.supervisor import frames
from dtctl.supervisor.messages import Message, Quit, Refusal, parse


def serve(
    kinds: Mapping[str, type[Message]], answer: Callable[[frames.FdLink, Message], None], idle_limit_s: float
) -> int:
    """Answer what comes over standard input until it ends; the exit status of the remote command.

    Args:
        kinds: the requests that there are.
        answer: answers one of them.
        idle_limit_s: for how long nothing may come.
    """
    link = frames.FdLink(0, 1, idle_limit_s)
    try:
        while True:
            document = link.receive_json()
            request = Quit() if document is None else parse(document, kinds)
            if isinstance(request, Quit):
                return 0
            answer(link, request)
    except OSError as exc:
        link.send_json(Refusal(code="os", message="%s: %s" % (exc.filename or "", exc.strerror)))
    except (frames.BrokenFrame, InvalidMessage):
        pass  # nobody is there to be told
    return 1
