"""Every test ends, whatever it waits in: pytest-timeout's limit is completed where it does not reach.

pytest-timeout interrupts Python in the main thread. Three waits outlive that: one in C code that does not come back,
one of a test that takes over SIGALRM or its timer, and one in a teardown after a failure, when no limit is left. The
last gets a limit of its own; the others end with the process, after the stacks of all threads have been written. With
pytest-xdist that fails the test, and another process goes on with the next.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from typing import Final

import pytest
from pytest_timeout import Settings

_SETTINGS: Final = pytest.StashKey[Settings]()
_STDERR: Final = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "timeout_grace", "seconds between a test's time limit and the end of the whole process", default="300"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # while a test runs, its output is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> None:
    item.stash[_SETTINGS] = settings
    limit_s = settings.timeout + float(item.config.getini("timeout_grace"))
    faulthandler.dump_traceback_later(limit_s, file=item.config.stash[_STDERR], exit=True)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    if settings := item.stash.get(_SETTINGS, None):  # a failure has ended the first limits
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
    return (yield)
