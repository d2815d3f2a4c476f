"""What all tests share: with CI=true nothing may be skipped quietly."""

import gc
import os
import random
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

pytest_plugins = ["tests.hosts", "tests.time_limits"]

# Shells start what runs in the background with SIGINT ignored; commands that a test interrupts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS: Final = Path(__file__).parent
LONGEST: Final = (
    "test_equality", "test_docs", "test_slurm_launch", "test_live", "test_hang", "test_left_behind", "test_unused",
    "test_slurm_control", "test_lost_node", "test_signals", "test_soak", "test_advise_measure", "test_slurm_live",
    "test_slurm_hang", "test_gpu_checks", "test_strategies", "test_doctor_links", "test_doctor_node",
    "test_doctor_network", "test_slurm_environment", "test_memory_snapshots", "test_urls", "test_continue",
    "test_doctor", "test_spares", "test_doctor_ports", "test_metrics", "test_doctor_torch", "test_doctor_grammar",
    "test_slurm_arrays", "test_damage", "test_advise_module", "test_back_ends",
)  # fmt: skip
"""The modules that take a minute or more, longest first: begun last, one of them would keep a single worker busy while
the others have nothing left to do. xdist hands modules out in this order with --no-loadscope-reorder."""


UNIT_LIMIT_S: Final = 600
"""For tests that take seconds; others have what pyproject.toml says."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # torch and thousands of tests are there to stay: searching them for garbage takes a third of the collection, and
    # of every search after it.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in ("integration", "fault"):
            item.add_marker(pytest.mark.integration)
        elif folder in ("unit", "golden", "cli") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_LIMIT_S))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers are those of every other run, whichever tests came before."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        # torch.manual_seed would format the stack for each kind of accelerator, and keep it.
        torch.default_generator.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


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
