"""The page `/metrics`: an HTTP server with one page, and nothing that can be changed through it."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_S: Final = 10.0
"""Seconds from the connection of a client to the end of its answer."""
MANY: Final = 16
"""Most clients at a time. A further client replaces the oldest, so that slow ones do not block others."""


class _ClientConnections:
    """The connections that are open, the oldest first."""

    def __init__(self) -> None:
        self._since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def add(self, client: socket.socket) -> None:
        """Add a new connection; if there are too many, it replaces the oldest."""
        with self._lock:
            while len(self._since) >= MANY:
                self._close_client(next(iter(self._since)))
            self._since[client] = time.monotonic()

    def remove(self, client: socket.socket) -> None:
        """Remove a connection that has ended."""
        with self._lock:
            self._since.pop(client, None)

    def close_expired_clients(self) -> None:
        """End the clients that have exceeded their time, however often they send a byte."""
        latest = time.monotonic() - CLIENT_S
        with self._lock:
            for client in [client for client, since in self._since.items() if since < latest]:
                self._close_client(client)

    def _close_client(self, client: socket.socket) -> None:
        del self._since[client]
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # its thread detects the end, and closes the socket


class MetricsServer:
    """Serves what `text` returns, in threads."""

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        """Listen.

        Args:
            address: to listen at, numeric or a name.
            port: to listen at; 0: any that is free.
            text: returns the page; called for each request.

        Raises:
            OSError: that is not possible.
        """
        clients = _ClientConnections()

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_S
            server_version, sys_version = "dtctl", ""

            def do_GET(self) -> None:
                """Answer with the page."""
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, explain="The figures are at /metrics.")
                    return
                data = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def do_HEAD(self) -> None:
                """Answer without the page."""
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                """Keep requests out of standard error."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

            def server_bind(self) -> None:
                """Bind, without the search for this machine's full name that HTTPServer makes."""
                socketserver.TCPServer.server_bind(self)
                self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

            def process_request(self, request: Any, client_address: Any) -> None:
                clients.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                clients.remove(request)
                super().shutdown_request(request)

            def service_actions(self) -> None:
                clients.close_expired_clients()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore clients that have disconnected."""

        self._server = Server((address, port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="page", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening, and end the thread of the page."""
        self._server.shutdown()
        self._server.server_close()
