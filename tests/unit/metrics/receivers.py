"""An HTTP server on loopback that keeps what it gets."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Received:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class HttpReceiver:
    """An HTTP server that answers with `codes` in turn, the last one from then on."""

    url: str = ""
    codes: list[int] = field(default_factory=lambda: [200])
    delay: threading.Event | None = None
    """Answers are held back until it is set."""
    requests: list[Received] = field(default_factory=list)


@contextmanager
def http_receiver(
    *codes: int, delay: threading.Event | None = None, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> Iterator[HttpReceiver]:
    receiver = HttpReceiver(codes=list(codes) or [200], delay=delay)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.delay is not None:
                receiver.delay.wait()
            code = receiver.codes.pop(0) if len(receiver.codes) > 1 else receiver.codes[0]
            receiver.requests.append(Received(self.command, self.path, dict(self.headers), body))
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver.url = f"http{'s' if tls else ''}://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        if delay is not None:
            delay.set()
        server.shutdown()
        server.server_close()


@contextmanager
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@dataclass(frozen=True)
class Certificate:
    """A certificate for 127.0.0.1 that has signed itself."""

    path: Path
    server: ssl.SSLContext


def certificate(folder: Path) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver")])
    now = dt.datetime.now(dt.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    return Certificate(cert, context)


def eventually(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    """Wait until `condition` is true; looks often."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)
