"""When a run hangs and who is to blame, from what its workers have noted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.launch.control import hang
from dtctl.launch.control.hang import StackTrace, compute_hang_duration, find_blocking_workers
from dtctl.launch.control.progress import RankProgress, ReportedPhase, build_worker_standings
from dtctl.runtime.telemetry import progress as noted
from dtctl.supervisor import progress as read

WORKER = RankProgress(
    node="a", rank=0, pid=1, phase=ReportedPhase.STEPPING, step=50, place=2, first=0, saved=40, until=99, begun_s=90.0,
    stale_s=40.0, slowest_s=2.0, stall_s=0.0, evaluation_s=0.0, state="S",
)  # fmt: skip
WAITS = StackTrace(
    state="S", tool="faulthandler", flight="",
    text='Thread 0x01 (most recent call first):\n  File "/x/threading.py", line 3 in run\n\n'
    'Stack (most recent call first):\n'
    '  File "/lib/torch/autograd/graph.py", line 979 in _engine_run_backward\n  File "/me/train.py", line 8 in train\n',
)  # fmt: skip
SLEEPS = StackTrace(
    state="S", tool="py-spy", flight="",
    text='Process 1: python train.py\n\nThread 1 (idle): "MainThread"\n'
    '    mine (/me/train.py:5)\n    run (/me/train.py:9)\n'
    'Thread 2 (idle): "data"\n    wait (threading.py:3)\n',
)  # fmt: skip


def gang(*changes: dict[str, object]) -> list[RankProgress]:
    return [replace(WORKER, rank=rank, node=f"n{rank}", **change) for rank, change in enumerate(changes)]


@pytest.mark.parametrize(
    ("limit", "changes", "expected"),
    [
        ("auto", [{}, {}], 40.0),
        ("auto", [{}, {"stale_s": 29.0}], None),  # one has noted something
        ("auto", [{"slowest_s": 5.0}, {}], None),  # steps may take ten times as long as the slowest
        (35.0, [{"slowest_s": 5.0}, {}], 40.0),  # but for those who know better
        ("off", [{}, {}], None),
        ("auto", [{}], None),  # one worker tells nothing, or not yet
        ("auto", [{}, {"phase": ReportedPhase.COMPILING}], None),
        ("auto", [{}, {"phase": ReportedPhase.EVALUATION}], None),
        ("auto", [{}, {"phase": ReportedPhase.SNAPSHOT}], None),
        ("auto", [{}, {"phase": ReportedPhase.STARTING}], None),
        ("auto", [{}, {"first": 47}], None),  # not measured yet
        (35.0, [{}, {"first": 50}], None),  # the first step is never judged
        (35.0, [{}, {"first": 49}], 40.0),
        ("auto", [{"stale_s": 1.0}, {"state": "T", "phase": ReportedPhase.EVALUATION}], 40.0),  # nobody stops itself
        ("auto", [{}, {"state": "T", "phase": ReportedPhase.STARTING}], None),
        (
            "auto",
            [{"stale_s": 1801.0}] * 2 + [{"stale_s": 1801.0, "phase": ReportedPhase.STARTING}],
            1801.0,
        ),  # first batches
        ("auto", [{"stale_s": 1801.0, "first": 50}] * 2, 1801.0),
        ("auto", [{"stale_s": 1801.0}], 1801.0),  # the other one has told nothing yet
        ("auto", [{"stale_s": 1801.0}, {"stale_s": 1801.0, "phase": ReportedPhase.COMPILING}], 1801.0),
        ("auto", [{"stale_s": 1801.0}, {"stale_s": 1801.0, "phase": ReportedPhase.SNAPSHOT}], None),
        ("auto", [{}, {"state": "", "phase": ReportedPhase.ENDING}], 40.0),  # it had steps left
        ("auto", [{"first": 50}, {"phase": ReportedPhase.ENDING}], 40.0),  # also in the first step
        (
            "auto",
            [{"first": 50, "phase": ReportedPhase.STARTING}, {"state": ""}],
            None,
        ),  # which may have to be loaded first
        (
            "auto",
            [{"first": 50}, {"state": "", "phase": ReportedPhase.STARTING, "until": 0}],
            None,
        ),  # may be no part of it
        ("auto", [{"step": 99, "stale_s": 29.0}, {"state": "", "step": 99, "phase": ReportedPhase.ENDING}], None),
        (
            "auto",
            [{"step": 99, "phase": ReportedPhase.ENDING}, {"state": "", "step": 99, "phase": ReportedPhase.ENDING}],
            None,
        ),
        ("auto", [{"state": "", "phase": ReportedPhase.ENDING}] * 2, None),
    ],
)
def test_a_run_hangs_when_nobody_has_moved_for_longer_than_steps_take(
    limit: hang.HangLimit, changes: list[dict[str, object]], expected: float | None
) -> None:
    assert compute_hang_duration(gang(*changes), world_size=2, limit=limit) == expected


@pytest.mark.parametrize(
    ("changes", "stacks", "blamed"),
    [
        ([{}, {"place": 1}, {}], {}, [1]),
        ([{}, {}, {"step": 49, "place": 7}], {}, [2]),
        ([{}, {"state": "T"}, {"step": 49}], {}, [1]),
        ([{}, {}, {}], {0: WAITS, 1: WAITS, 2: SLEEPS}, [2]),
        ([{}, {}, {}], {0: WAITS, 1: WAITS, 2: WAITS}, []),
        ([{}, {}, {}], {}, []),
        ([{"place": 1}, {"place": 1}, {}], {0: WAITS, 1: WAITS, 2: SLEEPS}, [2]),  # it went past their collective
        ([{"place": 1}, {"place": 1}, {}], {0: SLEEPS, 1: SLEEPS, 2: WAITS}, [0, 1]),
        ([{"place": 1}, {"state": "", "phase": ReportedPhase.ENDING}, {}], {0: WAITS, 2: SLEEPS}, [1]),
        ([{}, {"state": "", "phase": ReportedPhase.ENDING, "step": 99}, {"place": 1}], {}, [2]),
        ([{"first": 50}, {"state": "", "phase": ReportedPhase.STARTING, "until": 0}, {"first": 50}], {}, [1]),
        ([{}, {"state": "", "phase": ReportedPhase.STARTING, "until": 0}, {"place": 1}], {}, [2]),
    ],
    ids=[
        "forward",
        "a step behind",
        "stopped",
        "awake",
        "all wait",
        "no stacks",
        "ahead",
        "two behind",
        "ended early",
        "ended in time",
        "never began",
        "not needed",
    ],
)
def test_who_is_behind_is_to_blame_and_not_who_waits(
    changes: list[dict[str, object]], stacks: dict[int, StackTrace], blamed: list[int]
) -> None:
    assert [worker.rank for worker in find_blocking_workers(gang(*changes), stacks)] == blamed


def test_what_is_said() -> None:
    found = hang.build_hang_failure(gang({}, {"place": 1}, {}), {1: SLEEPS}, silent_s=40.2, now=5.0)
    assert found.summary == (
        "no progress for 40 s in step 51: rank 1 on n1 is stuck in a forward pass at /me/train.py:5 in mine; "
        "the 2 others wait for it"
    )
    assert (found.node, found.rank, found.hang, found.tail[0]) == ("n1", 1, True, "/me/train.py:5 in mine")
    left = hang.build_hang_failure(
        gang({}, {"state": "", "phase": ReportedPhase.ENDING}, {}), {}, silent_s=31.0, now=5.0
    )
    assert left.summary == (
        "no progress for 31 s in step 51: rank 1 on n1 left the training after step 50 of 99, before the others; "
        "the 2 others wait for it"
    )
    starts = gang({"first": 50, "phase": ReportedPhase.STARTING}, {"first": 50, "phase": ReportedPhase.STARTING})
    absent = hang.build_hang_failure(starts, {}, silent_s=1800.0, now=5.0, silent={2: "n2"})
    assert absent.summary == (
        "no progress for 1800 s before the first step: rank 2 on n2 has not reached the training; "
        "the 2 others wait for it"
    )
    nobody = hang.build_hang_failure(gang({}, {}), {}, silent_s=40.2, now=5.0)
    assert (nobody.rank, "the network between them may be broken" in nobody.summary) == (None, True)


def test_stacks_of_both_tools_are_read() -> None:
    assert WAITS.frames[0] == ("/lib/torch/autograd/graph.py", 979, "_engine_run_backward")
    assert (WAITS.is_waiting, SLEEPS.is_waiting, replace(WAITS, text="").is_waiting) == (True, False, None)


def test_what_workers_note_is_what_their_node_reads(tmp_path: Path) -> None:
    assert (read.FIELDS, read.RECORD.size, read.MAGIC) == (noted.FIELDS, noted.SIZE, noted.MAGIC)
    assert {phase.name: phase.value for phase in noted.WorkerPhase} == {
        phase.name: phase.value for phase in ReportedPhase
    }
    began = time.monotonic()
    mine = noted.ProgressFile(3, folder=str(tmp_path))
    (begun,) = build_worker_standings("n", read.read_worker_progress(str(tmp_path)))
    assert (begun.phase, begun.state) == (ReportedPhase.STARTING, "R")
    mine.begin(7)
    for step in (8, 9, 10):
        mine.forward()
        mine.backward()
        mine.step(step)
    with mine.timing_phase(noted.WorkerPhase.SNAPSHOT):
        (saving,) = build_worker_standings("n", read.read_worker_progress(str(tmp_path)))
    mine.forward()
    mine.backward()
    mine.forward()
    (last,) = build_worker_standings("n", read.read_worker_progress(str(tmp_path)))
    assert saving.phase == ReportedPhase.SNAPSHOT
    assert (last.rank, last.phase, last.step, last.place, last.first, last.saved) == (3, 1, 10, 9, 7, 10)
    assert last.place_text == "in a forward pass"
    took_s = time.monotonic() - began
    assert 0 < last.slowest_s < took_s
    assert 0 < last.stall_s < took_s
    assert 0 <= last.stale_s < last.begun_s < took_s


def test_half_a_file_and_others_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "rank-1").write_bytes(b"short")
    (tmp_path / "rank-2").write_bytes(bytes(read.RECORD.size))
    (tmp_path / "rank-3.stack").write_bytes(bytes(read.RECORD.size))
    assert read.read_worker_progress(str(tmp_path)) == []
    assert read.read_worker_progress(str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    "file",
    ["guards/oom.py", "guards/nonfinite.py", "telemetry/report.py", "strategies/gradients.py", "strategies/elastic.py"],
)
def test_who_fetches_a_number_from_a_gpu_waits_for_the_exchange_before_it(file: str) -> None:
    text = WAITS.text.replace("/lib/torch/autograd/graph.py", f"/x/dtctl/runtime/{file}")
    fetches = replace(WAITS, text=text)
    assert (Path(__file__).parents[3] / "dtctl" / "runtime" / file).is_file(), (
        "it was renamed, and hang.py has to follow"
    )
    assert fetches.is_waiting
    (blamed,) = find_blocking_workers(gang({}, {}, {}), {0: fetches, 1: SLEEPS, 2: fetches})
    assert blamed.rank == 1


def test_a_program_without_progress_hangs_by_its_output_alone(tmp_path: Path) -> None:
    def monitor(**limits: float) -> hang.HangMonitor:
        return hang.HangMonitor(
            node_of_rank={0: "a", 1: "b"}, limit=1.0, start_limit=1.0, folder=tmp_path, on_progress=None, **limits
        )

    now = time.monotonic()
    assert not monitor().hangs(now + 1e6)
    limited = monitor(output_limit_s=5.0)
    assert not limited.hangs(now + 4)
    limited.printed_at = now + 4
    assert not limited.hangs(now + 8)
    limited.record_worker_end(1)
    assert limited.hangs(now + 10)
    failure = limited.verdict(now + 10)
    assert failure is not None
    assert (failure.node, failure.rank, failure.hang) == ("a", None, True)
    assert failure.summary.startswith("no worker has printed anything for 6 s (job.hang_output_s)")
    training = monitor(output_limit_s=5.0)
    training.update(gang({"stale_s": 0.0}), node="n0")
    assert not training.hangs(now + 3), "a training that tells its steps may print nothing"
