"""What both ends of the link between a node's monitor and the job's judge agree on."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

LINE_BYTES: Final = 4 << 20
"""Of one message, a line of JSON."""


def proof(token: str, speaker: str, nonce: str) -> str:
    """What only a process of this start of the job can say; the token itself is not sent."""
    return hmac.new(token.encode(), f"{speaker} {nonce}".encode(), hashlib.sha256).hexdigest()
