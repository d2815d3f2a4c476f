"""What both ends of the link between a node's monitor and the job's judge agree on."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from dtctl.schema import file_name, text, value
from dtctl.supervisor.messages import Message, Stacks

LINE_BYTES: Final = 4 << 20
"""Of one message, a line of JSON."""


def proof(token: str, speaker: str, nonce: str) -> str:
    """What only a process of this start of the job can say; the token itself is not sent."""
    return hmac.new(token.encode(), f"{speaker} {nonce}".encode(), hashlib.sha256).hexdigest()


class Greeting(Message):
    """The first message of a monitor; what it sends after that are a supervisor's messages."""

    op = "hello"
    node: str = value(file_name)
    nonce: str = value(text(64))
    proof: str = value(text(64))


class Welcome(Message):
    """The judge's answer to a greeting that it believes."""

    op = "welcome"
    proof: str = value(text(64))


class Kill(Message):
    """End the workers of the node."""

    op = "kill"


FROM_JUDGE: Final = {kind.op: kind for kind in (Welcome, Stacks, Kill)}
