"""Every exception that paramiko or a socket can raise is told as one of ours."""

from __future__ import annotations

import base64
import contextlib
import errno
import importlib
import inspect
import os
import pkgutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from dtctl.errors import AuthError, ConnectError, HostKeyError, TransportError
from dtctl.transport import hostkeys, ssh
from dtctl.transport.base import Target
from dtctl.transport.ssh import SshTransport, translate_ssh_errors
from tests.facts import raises


def exceptions_of_paramiko() -> set[type[BaseException]]:
    """All exception classes of all modules of paramiko, public by name."""
    elsewhere = ("_winapi", "win_openssh", "win_pageant")  # cannot be imported on Linux
    inside = [info.name for info in pkgutil.iter_modules(paramiko.__path__) if info.name not in elsewhere]
    modules = [paramiko, *(importlib.import_module(f"paramiko.{name}") for name in inside)]
    return {
        cls
        for module in modules
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, BaseException) and cls.__module__.startswith("paramiko")
        if not name.startswith("_")
    }


KEY = paramiko.ECDSAKey.generate()

# Name -> the arguments it is made with, and what becomes of it. A class that a new paramiko brings along is not here,
# and `test_every_exception_of_paramiko_is_listed` fails until somebody has decided what to tell the user.
PARAMIKO: dict[str, tuple[tuple[object, ...], type[TransportError]]] = {
    "AuthFailure": (([],), AuthError),
    "AuthenticationException": (("no",), AuthError),
    "BadAuthenticationType": (("no", ["publickey"]), AuthError),
    "PartialAuthentication": ((["password"],), AuthError),
    "PasswordRequiredException": (("locked",), AuthError),
    "UnableToAuthenticate": (("no",), AuthError),
    "BadHostKeyException": (("node", KEY, KEY), HostKeyError),
    "BERException": (("bad encoding",), ConnectError),
    "ChannelException": ((1, "administratively prohibited"), ConnectError),
    "ConfigParseError": (("bad",), ConnectError),
    "CouldNotCanonicalize": (("name",), ConnectError),
    "IncompatiblePeer": (("no common cipher",), ConnectError),
    "InvalidHostKey": (("line", ValueError("bad")), ConnectError),
    "MessageOrderError": (("order",), ConnectError),
    "NeedRekeyException": ((), ConnectError),
    "NoValidConnectionsError": (({("10.0.0.1", 22): OSError(errno.ECONNREFUSED, "refused")},), ConnectError),
    "PipeTimeout": ((), ConnectError),
    "ProxyCommandFailure": (("nc", "not found"), ConnectError),
    "SFTPError": ((4, "failure"), ConnectError),
    "SSHException": (("broken",), ConnectError),
    "UnknownKeyType": (("ssh-new", b""), ConnectError),
}

SYSTEM: list[tuple[BaseException, str]] = [
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "its name cannot be resolved"),
    (TimeoutError(), "no answer while connecting"),
    (socket.timeout(), "no answer while connecting"),  # noqa: UP041 - the same class since 3.10, and what old code raises
    (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "its SSH port refuses connections"),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "connecting failed"),
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), "connecting failed"),
    (OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)), "No route to host"),
    (OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)), "Network is unreachable"),
    (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files"),
    (ssl.SSLError("odd"), "odd"),
    (EOFError(), "connecting failed: EOFError"),
    (ValueError("not from paramiko, but from its thread"), "not from paramiko"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "connecting failed"),
]


def told(exc: BaseException) -> TransportError:
    with pytest.raises(TransportError) as caught:
        with translate_ssh_errors("gpu7", doing="connecting"):
            raise exc
    return caught.value


def test_every_exception_of_paramiko_is_listed() -> None:
    found = {cls.__name__ for cls in exceptions_of_paramiko()}
    assert found <= set(PARAMIKO), (
        "a new class: decide what dtctl says of it in PARAMIKO, and see `ssh.translate_ssh_errors`"
    )
    assert len(found) > 12, "the search finds too few; has paramiko moved its exceptions?"


@pytest.mark.parametrize("cls", sorted(exceptions_of_paramiko(), key=lambda cls: cls.__name__))
def test_each_exception_of_paramiko_has_a_fact_a_place_and_a_hint(cls: type[BaseException]) -> None:
    arguments, expected = PARAMIKO[cls.__name__]
    error = told(cls(*arguments))
    assert type(error) is expected
    assert (error.node, error.where) == ("gpu7", "node gpu7")
    assert error.message
    assert "\n" not in error.message
    assert error.hint
    assert isinstance(error.__cause__, cls)


@pytest.mark.parametrize(("exc", "text"), SYSTEM, ids=lambda value: type(value).__name__)
def test_each_error_of_a_socket_has_a_fact_a_place_and_a_hint(exc: BaseException, text: str) -> None:
    error = told(exc)
    assert type(error) is ConnectError
    assert text in error.message
    assert error.where == "node gpu7"
    assert error.hint


def test_our_own_errors_and_an_interrupt_pass_unchanged() -> None:
    ours = HostKeyError("changed", node="other", fingerprint="SHA256:x")
    assert told(ours) is ours
    with pytest.raises(KeyboardInterrupt), translate_ssh_errors("gpu7", doing="connecting"):
        raise KeyboardInterrupt


def test_a_key_that_has_changed_is_named_by_its_fingerprint() -> None:
    error = told(paramiko.BadHostKeyException("node", KEY, KEY))
    assert isinstance(error, HostKeyError)
    assert error.fingerprint == hostkeys.compute_key_fingerprint(KEY.asbytes()) == KEY.fingerprint


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A listening socket that is no SSH server yet."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def target_of(server: socket.socket) -> Target:
    port = server.getsockname()[1]
    return Target(name="gpu7", address="127.0.0.1", port=port, ssh_config="none", connect_timeout_s=1.0)


def serve(server: socket.socket, answer: bytes, times: int) -> threading.Thread:
    def work() -> None:
        with contextlib.suppress(OSError):  # the client resets, or the test is over
            for _ in range(times):
                with server.accept()[0] as peer:
                    peer.sendall(answer)
                    while answer and peer.recv(4096):
                        pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"SSH-1.5-old\r\n",
        b"SSH-2.0-broken\r\n\x00\x00\x00\x0c\x0a\x14" + b"\xff" * 64,
        b"SSH-2.0-large\r\n\x7f\xff\xff\xff" + b"\x00" * 64,
    ],
    ids=["closes", "web server", "old protocol", "damaged packet", "huge packet"],
)
def test_whatever_answers_instead_of_ssh_is_a_connect_error(server: socket.socket, answer: bytes) -> None:
    thread = serve(server, answer, ssh.TRIES)
    with pytest.raises(ConnectError) as caught:
        SshTransport().connect(target_of(server))
    assert caught.value.node == "gpu7"
    assert caught.value.hint
    server.shutdown(socket.SHUT_RDWR)  # wakes the thread if it waits for a try that is not made
    thread.join(60)
    assert not thread.is_alive()


def test_silence_and_refusal_are_told_apart(server: socket.socket) -> None:
    silent = replace(target_of(server), connect_timeout_s=0.3)
    with raises(ConnectError, "accepts connections sends nothing"):
        SshTransport().connect(silent)
    server.close()
    with raises(ConnectError, "refuses connections"):
        SshTransport().connect(silent)
    unknown = Target(name="a", address="no-such-name.invalid", ssh_config="none")
    with raises(ConnectError, "name resolved"):
        SshTransport().connect(unknown)


def keygen(path: Path, *options: str) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-N", "", *options, "-f", path], check=True, capture_output=True)
    return path


def offered(file: Path) -> object:
    return SshTransport()._load_private_key(str(file))


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_keys_of_openssh_are_read(tmp_path: Path, kind: str) -> None:
    key = offered(keygen(tmp_path / "key", "-t", kind))
    assert isinstance(key, paramiko.PKey)
    assert key.get_base64() == (tmp_path / "key.pub").read_text().split()[1]


def test_a_key_that_others_can_read_is_not_used_as_ssh_does_not(tmp_path: Path) -> None:
    key = keygen(tmp_path / "key", "-t", "ed25519")
    key.chmod(0o640)
    assert offered(key) == f"others can read it; chmod 600 {key}"
    key.chmod(0o600)
    assert isinstance(offered(key), paramiko.PKey)


def test_a_key_that_cannot_be_used_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    assert offered(tmp_path / "missing") is None
    locked = keygen(tmp_path / "locked", "-t", "ed25519")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", locked], check=True, capture_output=True)
    assert "ssh-add" in str(offered(locked))
    for name, text in (("empty", ""), ("words", "not a key\n"), ("cut", locked.read_text()[:120])):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
        assert str(offered(tmp_path / name)).startswith("unreadable"), name
    (tmp_path / "folder").mkdir(mode=0o700)
    assert str(offered(tmp_path / "folder")).startswith("unreadable")


def test_a_key_of_a_kind_that_nobody_here_knows_is_passed_over(tmp_path: Path) -> None:
    """A hardware key (`id_ed25519_sk`, which `ssh -G` names to everybody) must not stop a login with another one."""
    new = keygen(tmp_path / "new", "-t", "ed25519")
    head, *body, tail = new.read_text().splitlines()
    blob = base64.b64decode("".join(body)).replace(b"ssh-ed25519", b"ssh-ed99999")
    new.write_text("\n".join([head, base64.b64encode(blob).decode(), tail]) + "\n")
    assert str(offered(new)).startswith("unreadable")


class Refusing(paramiko.ServerInterface):
    """A server that accepts nobody."""

    def __init__(self, methods: str) -> None:
        self.methods = methods

    def get_allowed_auths(self, _username: str) -> str:
        return self.methods


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("publickey", "BatchMode"),
        ("publickey,password", "never asks for passwords"),
        ("publickey,keyboard-interactive", "ssh-copy-id -p"),
    ],
)
def test_a_node_that_takes_passwords_needs_a_key(
    server: socket.socket, tmp_path: Path, methods: str, words: str
) -> None:
    transports = []

    def work() -> None:
        peer = server.accept()[0]
        transports.append(paramiko.Transport(peer))
        transports[0].add_server_key(KEY)
        with contextlib.suppress(paramiko.SSHException, EOFError):
            transports[0].start_server(server=Refusing(methods))

    threading.Thread(target=work, daemon=True).start()
    port = server.getsockname()[1]
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {KEY.get_name()} {KEY.get_base64()}\n")
    target = replace(
        target_of(server), user="ann", known_hosts=str(tmp_path / "known"), identity_file=str(keygen(tmp_path / "key")),
        connect_timeout_s=10.0,
    )  # fmt: skip
    with pytest.raises(AuthError) as caught:
        SshTransport().connect(target)
    for transport in transports:
        transport.close()
    assert words in str(caught.value.hint)
    assert "ann@127.0.0.1" in str(caught.value.hint)
