"""What a node says about itself, compared with what the system says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dtctl.supervisor import facts
from dtctl.supervisor.messages.setup import Hello
from dtctl.supervisor.setup import describe_node


def test_hello_is_about_this_machine() -> None:
    description = describe_node("/work", Hello())
    assert (description.workdir, description.port) == ("/work", 0)
    assert description.gpus == sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))


@pytest.mark.parametrize(
    ("value", "address"),
    [("10.0.0.9 50000 10.0.0.1 22", "10.0.0.1"), ("fe80::9 5 fe80::1 22", "fe80::1"), ("", ""), ("odd", "")],
)
def test_the_own_address_is_the_one_that_was_connected_to(
    monkeypatch: pytest.MonkeyPatch, value: str, address: str
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", value)
    assert facts.find_server_address() == address


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "disk-full"), (errno.EDQUOT, "disk-full"), (errno.EACCES, "permission"),
        (errno.EPERM, "permission"), (errno.EROFS, "permission"), (errno.EIO, "os"),
    ],
)  # fmt: skip
def test_errors_of_the_system_have_a_word_and_a_place(number: int, code: str) -> None:
    exc = OSError(number, os.strerror(number), "/work/x")
    assert facts.choose_hint_code(exc) == code
    assert facts.describe_os_error(exc) == f"{os.strerror(number)}: /work/x"
    assert facts.describe_os_error(OSError(number, os.strerror(number))) == os.strerror(number)
