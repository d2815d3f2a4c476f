import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.launch.control import first_failure
from dtctl.launch.control.failure import (
    Failure,
    describe_failure,
    find_early_exit_failure,
    find_error_line,
    find_root_failure,
    find_torchrun_failure,
    is_consequence,
    is_stop,
    take_last_lines,
)

AGENT_LOG = """\
E1121 07:51:33.855000 8019 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
tr.py FAILED
------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_07:51:33
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 8021)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 8021
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_07:51:33
  host      : localhost
  rank      : 5 (local_rank: 1)
  exitcode  : {code} (pid: 8022)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 8022
======================================================
"""


def failed(rank: int, *, at: float, code: int | None = 1, number: int | None = None, tail: str = "") -> Failure:
    return Failure(node=f"n{rank}", rank=rank, exit_code=code, signal=number, time=at, tail=tuple(tail.splitlines()))


@pytest.mark.parametrize(("code", "exit_code", "number"), [("-9", 137, 9), ("3", 3, None)])
def test_torchrun_names_its_worker(code: str, exit_code: int, number: int | None) -> None:
    agent = Failure(node="n", rank=None, exit_code=1, signal=None, time=1.0)
    found = find_torchrun_failure(agent, AGENT_LOG.replace("{code}", code))
    assert (found.rank, found.exit_code, found.signal) == (5, exit_code, number)


def test_an_agent_that_names_nobody_is_left_as_it_is() -> None:
    agent = Failure(node="n", rank=None, exit_code=1, signal=None, time=1.0)
    assert find_torchrun_failure(agent, "Traceback ...\nValueError: bad option\n") is agent


def test_the_one_ended_by_a_signal_comes_first() -> None:
    lost = failed(0, at=1.0, tail="RuntimeError: Connection closed by peer [10.0.0.2]:1")
    killed = failed(1, at=1.2, code=137, number=9)
    assert find_root_failure([lost, killed]) is killed


def test_an_exception_comes_before_what_follows_from_it() -> None:
    follows = failed(0, at=1.0, tail="RuntimeError: [pair.cc] Connection reset by peer")
    cause = failed(1, at=1.5, tail="ValueError: bad data")
    assert find_root_failure([follows, cause]) is cause
    assert is_consequence(follows)
    assert not is_consequence(cause)


def test_between_equals_the_earlier_one() -> None:
    assert find_root_failure([failed(0, at=2.0), failed(1, at=1.0)]) == failed(1, at=1.0)
    assert find_root_failure([]) is None


def test_sigterm_is_what_dtctl_sends_itself() -> None:
    assert find_root_failure([failed(0, at=1.0, code=143, number=signal.SIGTERM), failed(1, at=3.0)]) == failed(
        1, at=3.0
    )


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (failed(0, at=0, code=137, number=9), "was ended by signal 9 (SIGKILL)"),
        (failed(0, at=0, code=3), "ended with exit code 3"),
        (failed(0, at=0, code=None), "was lost"),
        (failed(0, at=0, code=128 + 77, number=77), "was ended by signal 77 (unknown)"),
    ],
)
def test_words_for_people(failure: Failure, text: str) -> None:
    assert describe_failure(failure) == text


def test_the_summary_is_the_exception_and_not_the_advice_after_it() -> None:
    tail = take_last_lines("Traceback\n  File x\n[rank1]: torch.OutOfMemoryError: CUDA out of memory\n\nsee the docs\n")
    assert find_error_line(tail) == "torch.OutOfMemoryError: CUDA out of memory"
    assert find_error_line(["just text"]) == "just text"
    boxed = ["╭─ Parsing error ─╮", "│ Unrecognized options: --x │", "╰─────────────────╯"]
    assert find_error_line(boxed) == "Unrecognized options: --x"
    assert find_error_line([]) == ""


def test_a_hang_and_a_lack_of_memory_are_named() -> None:
    hung = Failure(node="a", rank=1, exit_code=None, signal=None, time=0.0, hang=True)
    assert describe_failure(hung) == "made no progress"
    starved = Failure(
        node="a", rank=1, exit_code=137, signal=9, time=0.0, node_reason="the kernel killed it for lack of memory"
    )
    assert describe_failure(starved) == "was ended by signal 9 (SIGKILL): the kernel killed it for lack of memory"


def test_who_was_told_to_stop_has_not_failed() -> None:
    saved = failed(0, at=1.0, code=75)
    assert is_stop(saved, trains=False)
    assert not is_stop(failed(0, at=1.0, code=1), trains=True)
    ended = replace(failed(1, at=2.0, code=143, number=signal.SIGTERM), asked_to_stop=True)
    follows = failed(0, at=1.9, tail="RuntimeError: Connection closed by peer")
    assert find_root_failure([follows, ended]) is ended
    assert is_stop(ended, trains=True)
    assert not is_stop(ended, trains=False), "a program without dtctl.runtime, which is started again"
    assert not is_stop(replace(ended, asked_to_stop=False), trains=True), "the supervisor's own SIGTERM"
    agent = Failure(node="n", rank=None, exit_code=1, signal=None, time=1.0)
    assert is_stop(find_torchrun_failure(agent, AGENT_LOG.replace("{code}", "-10")), trains=True)


def test_who_left_without_an_error_is_the_cause_of_lost_connections() -> None:
    lost = Failure(
        node="a", rank=0, exit_code=1, signal=None, time=5.0, tail=("RuntimeError: Connection closed by peer",)
    )
    said = find_early_exit_failure(
        lost, node="b", rank=1, early_exit="left the training after step 3 of 12, before the others", tail=("loss 0.3",)
    )
    assert said is not None
    assert (said.node, said.rank, said.exit_code, said.time) == ("b", 1, None, 5.0)
    assert said.summary == (
        "rank 1 left the training after step 3 of 12, before the others, without an error, "
        "and rank 0 on a lost the connection to it"
    )
    assert describe_failure(said) == "left the training after step 3 of 12, before the others"
    for line in ("ValueError: x", "Traceback (most recent call last):", "dtctl: error: x", "Broken pipe"):
        assert find_early_exit_failure(lost, node="b", rank=1, early_exit="ended", tail=(line, "end")) is None


class Printed:
    """Output of one worker."""

    def __init__(self, text: str) -> None:
        self.text = text

    def tail(self, node: str, rank: int) -> str:
        return self.text

    def path(self, node: str, rank: int) -> Path:
        return Path(node, str(rank))


@pytest.mark.parametrize(
    ("printed", "summary"),
    [
        ("step 3\nseen: 16", "was ended by signal 11 (SIGSEGV); its last line: seen: 16"),
        ("", "was ended by signal 11 (SIGSEGV)"),
        ("ValueError: no\nseen: 16", "ValueError: no"),
    ],
)
def test_what_a_worker_printed_last_is_not_why_a_signal_ended_it(printed: str, summary: str) -> None:
    failed = Failure(node="a", rank=0, exit_code=139, signal=11, time=1.0)
    found = first_failure.find_first_failure([failed], [], Printed(printed))
    assert found is not None
    assert found.summary == summary
