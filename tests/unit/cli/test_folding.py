"""Which lines people see while a run goes on: causes in full, consequences in a line."""

from __future__ import annotations

import pytest

from dtctl.cli.common.traceback_filter import TracebackFilter

AGENT = -1
CAUSE = """[rank1]: Traceback (most recent call last):
[rank1]:   File "t.py", line 6, in <module>
[rank1]:     raise ValueError("bad sample")
[rank1]: ValueError: bad sample"""
CONSEQUENCE = """[rank0]: Traceback (most recent call last):
[rank0]:   File "t.py", line 4, in <module>
[rank0]:     dist.barrier()
[rank0]: RuntimeError: [/__w/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:9122"""
AGENT_REPORT = """W1122 14:43:27.561000 20 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 22
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/v/torch/distributed/run.py", line 1032, in <module>
    main()
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
t.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
============================================================
after"""


def shown(text: str, rank: int = 0, folding: TracebackFilter | None = None) -> list[str]:
    folding = folding or TracebackFilter()
    return [line for each in text.splitlines() for line in folding.feed("a", rank, each)]


def test_a_cause_is_shown_in_full() -> None:
    assert shown(CAUSE, 1) == CAUSE.splitlines()


def test_who_only_lost_a_peer_gets_one_line() -> None:
    (line,) = shown(f"{CONSEQUENCE}\nException raised from x at y:1 (most recent call first):\nframe #0: abc\n")
    assert "Connection closed by peer" in line
    assert "--node a --rank 0" in line
    assert shown(f"{CONSEQUENCE}\nnext line")[1:] == ["next line"]


@pytest.mark.parametrize("name", ["SignalException: Process 5 got signal: 15", "DistNetworkError: failed to recv"])
def test_torchruns_own_tracebacks_are_one_line_for_all_nodes(name: str) -> None:
    text = AGENT_REPORT.replace("ChildFailedError:", name).partition("====")[0]
    folding = TracebackFilter()
    assert len(shown(text, AGENT, folding)) == 1
    assert shown(text, AGENT, folding) == []


def test_torchruns_report_ends_where_it_ends() -> None:
    lines = shown(AGENT_REPORT, AGENT)
    assert len(lines) == 2
    assert lines[1] == "after"


def test_what_the_agent_cannot_do_is_shown() -> None:
    text = 'Traceback (most recent call last):\n  File "/x/other.py", line 1\nOSError: no space'
    assert shown(text, AGENT) == text.splitlines()
    assert shown("python: No module named torch", AGENT) == ["python: No module named torch"]


def test_processes_do_not_mix_and_nothing_is_lost() -> None:
    folding = TracebackFilter()
    for line in CAUSE.splitlines()[:2]:
        assert folding.feed("a", 1, line) == []
    assert folding.feed("b", 2, "hello") == ["hello"]
    assert folding.flush() == [("a", 1, line) for line in CAUSE.splitlines()[:2]]
    assert folding.flush() == []


def test_a_traceback_without_end_is_shown_as_it_comes() -> None:
    text = "Traceback (most recent call last):\n" + "  x\n" * 1000
    assert len(shown(text)) == 1001


EXIT_BARRIER = """worker 1
[W1122 19:22:16.246501573 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3, \
addr=[::ffff:127.0.0.1]:38372, remote=[::ffff:127.0.0.1]:23032): Failed to recv, got 0 bytes. Connection was likely \
closed. Did the remote server shutdown or crash?
Exception raised from recvBytes at /__w/pytorch/torch/csrc/distributed/c10d/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f8c43947b8d in /v/torch/lib/libc10.so)
frame #5: c10d::TCPStore::doWait(c10::ArrayRef<std::string>) + 0xc5 (0x7f8c33b42d35 in /v/torch/lib/libtorch_cpu.so)
<omitting python frames>
frame #34: _start + 0x21 (0x55bd14f08081 in /v/bin/python)

E1122 19:22:16.661000 5107 torch/distributed/elastic/agent/server/api.py:1008] Error waiting on exit barrier. Elapsed: 9
E1122 19:22:16.661000 5107 torch/distributed/elastic/agent/server/api.py:1008] Traceback (most recent call last):
E1122 19:22:16.661000 5107 torch/distributed/elastic/agent/server/api.py:1008]     store.wait([last_member_key])
E1122 19:22:16.661000 5107 torch/distributed/elastic/agent/server/api.py:1008] torch.distributed.DistNetworkError: F
after"""
"""Of torch 2.13: the agent that hosts the store was killed while this one, whose worker had succeeded, waited."""


EARLY = """\
[W1122 21:38:36.628352996 socket.cpp:469] [c10d] waitForInput: poll for socket SocketImpl(fd=12, addr=[node1]:51782, \
remote=[node1]:22972) returned 0, likely a timeout
[W1122 21:38:36.629073901 socket.cpp:494] [c10d] waitForInput: socket SocketImpl(fd=12, addr=[node1]:51782, \
remote=[node1]:22972) timed out after 300000ms
E1122 21:38:36.011000 8 torch/distributed/elastic/agent/server/api.py:1008] Error waiting on exit barrier. Elapsed: 300
E1122 21:38:36.011000 8 torch/distributed/elastic/agent/server/api.py:1008] Traceback (most recent call last):
E1122 21:38:36.011000 8 torch/distributed/elastic/agent/server/api.py:1008] torch.distributed.DistStoreError: wait time
after"""
"""Of torch 2.13: the workers of one of two nodes were done 330 s before those of the other, and all succeeded."""


def test_an_agent_that_has_waited_long_enough_for_the_others_says_nothing() -> None:
    assert shown(EARLY, AGENT) == ["after"]


def test_a_store_that_is_gone_at_the_exit_barrier_says_nothing() -> None:
    assert shown(EXIT_BARRIER, AGENT) == ["worker 1", "after"]
    kept = shown(EXIT_BARRIER, 0)
    assert len(kept) == len(EXIT_BARRIER.splitlines()), "a worker that says so may have lost what it needs"
    refused = "[W1122 19:22:16.2 socket.cpp:767] [c10d] The client socket has failed to connect to [a]:29500"
    assert shown(refused, AGENT) == [refused]
