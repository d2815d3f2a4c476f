"""Test of connections to the hosts of package indexes from the machine on which uv has failed. Stdlib, Python 3.8.

uv prints the address that it could not read and a library's text as the reason, but the same text may also mean a wrong
name in a file of requirements. So the connection is tried here, and a host is named only if it cannot be reached.
"""

from __future__ import annotations

import re
import socket
import threading
from urllib import parse

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_INDEX = "https://pypi.org/simple"
CONNECT_S = 3.0
"""Seconds for the look-up of a name, and for a connection; a host on another continent answers in 0.3 s."""
MAX_HOSTS = 4
"""Most hosts that are tried; uv ends at the first host that fails, and names it."""
_URL = r"https?://[^\s`)'\"<>]+"
_ASKED = re.compile(r"(?:url|fetch|download)\W{1,4}(" + _URL + ")", re.IGNORECASE)
"""Address in uv's messages to which it sent a request; other addresses belong to its manual."""
_INDEX = re.compile(r"^--(?:index-url|extra-index-url)[ =](" + _URL + ")", re.MULTILINE)


def describe_unreachable_host(said: str, lock: str, environ: Mapping[str, str]) -> str:
    """Return the host that uv could not reach from this machine, with the reason; empty if uv failed otherwise.

    Args:
        said: output of uv.
        lock: lines with the options `--index-url` and `--extra-index-url`, among others.
        environ: uv's variables.
    """
    variables = (environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"))
    named = _INDEX.findall(lock)
    default = next(filter(None, variables), None) or next(iter(named), DEFAULT_INDEX)
    # Without an address in uv's message, the default index is tried, since uv always needs it.
    asked = _ASKED.findall(said) or ([] if re.search("^--no-index", lock, re.MULTILINE) else [default])
    indexes = {_find_host(url) for url in (*named, default)}
    for url in list({_find_host(url): url for url in asked}.values())[:MAX_HOSTS]:
        host, port = _find_host(url)
        if host and (reason := _try_connection(url)):
            kind = "the package index %s:%d" if (host, port) in indexes else "%s:%d, from which uv fetches files"
            return "%s: %s" % (kind % (host, port), reason)
    return ""


def _find_host(url: str) -> tuple[str, int]:
    try:
        parts = parse.urlsplit(url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # The port is not a number.
        return "", 0


def _try_connection(url: str) -> str:
    """Return the reason why the host of an address cannot be reached, by the environment's proxy if there is one."""
    from urllib import request

    host, port = _find_host(url)
    proxies = request.getproxies_environment()
    proxy = proxies.get(parse.urlsplit(url).scheme) or proxies.get("all") or ""
    if not proxy or request.proxy_bypass(host):
        return _connect(host, port, "")
    proxy_host, proxy_port = _find_host(proxy if "://" in proxy else "http://" + proxy)
    tunnel = "%s:%d" % (host, port) if url.startswith("https:") and not proxy.startswith(("socks", "https:")) else ""
    reason = _connect(proxy_host, proxy_port, tunnel)
    return "the proxy %s:%d: %s" % (proxy_host, proxy_port, reason) if reason else ""


def _connect(host: str, port: int, tunnel: str) -> str:
    """Return the reason why no connection, or with `tunnel` none through a proxy, can be made; empty: it can."""
    found: list[str] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.append("")
        except OSError as exc:
            found.append("its name is not known here (%s)" % (exc.strerror or exc))
        except UnicodeError:
            found.append("its name is not valid")

    # The look-up runs in a thread, since it has no time limit.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    if not found:
        return "its name is not known here (no answer within %g s)" % CONNECT_S
    if found[0]:
        return found[0]
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as sock:
            return _ask_for_tunnel(sock, tunnel) if tunnel else ""
    except socket.timeout:
        return "no answer within %g s" % CONNECT_S
    except OSError as exc:
        return (exc.strerror or str(exc)).lower()


def _ask_for_tunnel(sock: socket.socket, to: str) -> str:
    """Return the refusal of a proxy; empty if it connects, or requires a password, which uv may have."""
    sock.sendall(b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (to.encode(), to.encode()))
    answer = sock.recv(1 << 12).split(b"\r\n")[0].decode("latin-1")
    words = answer.split(None, 2)
    if len(words) < 2 or not words[1].isdigit():
        return "it closed the connection" if not answer else "it is no proxy"
    return "" if words[1] in ("200", "407") else "it answers %s" % " ".join(words[1:])
