"""What all tests share: with CI=true nothing may be skipped quietly."""

import os
import signal

import pytest
from hypothesis import settings

pytest_plugins = ["tests.hosts"]

# Shells start what runs in the background with SIGINT ignored; commands that a test interrupts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent.name
        if folder in ("integration", "fault"):
            item.add_marker(pytest.mark.integration)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):  # type: ignore[no-untyped-def]
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") == "true" and item.get_closest_marker("integration"):
        report.outcome = "failed"
        report.longrepr = f"skipped with CI=true: {report.longrepr}"


# A busy machine is not a slow program: examples have no time limit of their own, tests do.
settings.register_profile("dtctl", deadline=None)
settings.load_profile("dtctl")
