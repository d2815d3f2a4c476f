"""Sending to receivers: one thread for each, so that one that is down or slow does not delay the others.

A failure is reported once per receiver. Addresses may be secrets, so no error text that could have one is passed on.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

ANSWER_S: Final = 5.0
"""Seconds for a receiver to answer; alerts have to arrive within 10 s."""
RETRY_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Seconds until a message that could not be delivered is sent again; the last number repeats."""
WAITING: Final = 100
"""Most messages that wait for one receiver; a further one replaces the oldest."""


class DeliveryFailed(Exception):
    """A receiver did not accept a message; the text is for the user and names no address."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        """`final`: the receiver would refuse it again."""
        super().__init__(text)
        self.final = final


class MessageSender:
    """Sender to one receiver, with the messages that wait."""

    def __init__(self, name: str, send: Callable[[Any], None], tell: Callable[[str], None]) -> None:
        """Begin to deliver.

        Args:
            name: human-readable: `metrics.alerts.webhook`.
            send: delivers one message; raises DeliveryFailed.
            tell: function that is called once with the error when that fails.
        """
        self.name = name
        self.failures = 0
        """Number of failed deliveries; a message that is sent again counts each time."""
        self._send, self._tell = send, tell
        self._waiting: deque[Any] = deque(maxlen=WAITING)
        self._changed = threading.Condition()
        self._busy = self._told = False
        threading.Thread(target=self._send_waiting_messages, name=name, daemon=True).start()

    def put(self, message: Any) -> None:
        """Queue a message for delivery."""
        with self._changed:
            self._waiting.append(message)
            self._changed.notify_all()

    def flush(self, deadline: float) -> bool:
        """Wait until all messages are delivered, or until `deadline` (monotonic clock); return True if they are."""
        with self._changed:
            while self._waiting or self._busy:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return True

    def _send_waiting_messages(self) -> None:
        tries = 0
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                message = self._waiting.popleft()
                self._busy = True
            try:
                self._send(message)
                tries = 0
            except DeliveryFailed as exc:
                self.failures += 1
                if not self._told:
                    self._told = True
                    self._tell(f"{self.name}: {exc}")
                if not exc.final:
                    with self._changed:
                        if len(self._waiting) < (self._waiting.maxlen or 0):
                            self._waiting.appendleft(message)
                    time.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                    tries += 1
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects: the content was meant for one server alone."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post_json(url: str, body: Mapping[str, Any]) -> None:
    """POST a JSON object.

    Raises:
        DeliveryFailed: it was not answered with a code from 200 to 299.
    """
    try:
        made = urllib.request.Request(url, data=json.dumps(body).encode(), method="POST")  # noqa: S310 - checked below
        if made.type not in ("http", "https"):
            raise DeliveryFailed("its URL does not begin with http:// or https://", final=True)
        for name, value in {"Content-Type": "application/json", "User-Agent": "dtctl"}.items():
            made.add_header(name, value)
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(made, timeout=ANSWER_S) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as exc:
        exc.close()
        final = 300 <= exc.code < 500 and exc.code not in (408, 429)
        raise DeliveryFailed(f"it answered with HTTP status {exc.code}", final=final) from None
    except (OSError, http.client.HTTPException) as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        final = isinstance(exc, http.client.InvalidURL)
        raise DeliveryFailed(_describe_connection_error(reason), final=final) from None
    except ValueError:
        raise DeliveryFailed("its URL or a header is not valid", final=True) from None


def _describe_connection_error(error: object) -> str:
    """Return the error of a connection in words without an address."""
    if isinstance(error, ssl.SSLError):
        text = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        return f"TLS: {text or 'the handshake failed'}"
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_S:g} s"
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the connection failed ({type(error).__name__})"
