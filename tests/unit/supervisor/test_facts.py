"""What a node says about itself, compared with what the system says."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import pytest

from dtctl.supervisor import facts


def test_hello_is_about_this_machine() -> None:
    begun = time.time()
    told = facts.hello("/work", [])
    assert told["op"] == "hello"
    assert (told["hostname"], told["pid"], told["cpus"]) == (socket.gethostname(), os.getpid(), os.cpu_count())
    assert (told["workdir"], told["port"]) == ("/work", 0)
    assert begun <= told["time"] <= time.time()
    assert told["gpus"] == sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))


def test_the_first_port_that_is_free_is_chosen_and_left_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as two:
        taken = [one.getsockname()[1], two.getsockname()[1]]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        assert facts.first_free([*taken, free]) == free
        assert facts.first_free([free]) == free, "it is not held"
        assert facts.first_free(taken) == 0
    assert facts.first_free([]) == 0


def test_a_port_that_a_client_has_just_left_counts_as_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        peer, _ = server.accept()
        peer.close()  # this end waits in TIME_WAIT
        client.close()
    assert facts.first_free([port]) == port


@pytest.mark.parametrize(
    ("value", "address"),
    [("10.0.0.9 50000 10.0.0.1 22", "10.0.0.1"), ("fe80::9 5 fe80::1 22", "fe80::1"), ("", ""), ("odd", "")],
)
def test_the_own_address_is_the_one_that_was_connected_to(
    monkeypatch: pytest.MonkeyPatch, value: str, address: str
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", value)
    assert facts.server_address() == address


def test_the_interface_towards_an_address() -> None:
    assert facts.interface_towards("127.0.0.1") == "lo"
    assert facts.interface_towards("not-a-number.invalid") == ""
    table = Path("/proc/net/if_inet6")
    if table.exists() and " lo\n" in table.read_text():
        assert facts.interface_towards("::1") == "lo"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "disk-full"), (errno.EDQUOT, "disk-full"), (errno.EACCES, "permission"),
        (errno.EPERM, "permission"), (errno.EROFS, "permission"), (errno.EIO, "os"),
    ],
)  # fmt: skip
def test_errors_of_the_system_have_a_word_and_a_place(number: int, code: str) -> None:
    exc = OSError(number, os.strerror(number), "/work/x")
    assert facts.code_of(exc) == code
    assert facts.describe(exc) == f"{os.strerror(number)}: /work/x"
    assert facts.describe(OSError(number, os.strerror(number))) == os.strerror(number)
