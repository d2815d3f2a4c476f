"""The last lines of a launch say why it failed, whatever is known of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtctl
from dtctl.cli import fetch
from dtctl.cli.common import followed_run
from dtctl.cli.common.doctor_view import show_cause
from dtctl.cli.common.followed_run import make_event_emitter, print_run_end
from dtctl.launch.control.controller import Result
from dtctl.launch.control.failure import Failure
from dtctl.launch.files.fetch import FetchResult
from dtctl.launch.records.events import Event, NodeOutputs, SnapshotBegun
from dtctl.launch.records.record import RunInfo, RunRecord
from dtctl.launch.records.run_writer import RunWriter
from dtctl.spec.load import dump_spec, parse_spec
from dtctl.transport.local import LocalTransport


@pytest.mark.parametrize("exit_code", [None, 181])
def test_a_failure_without_output_shows_its_summary(exit_code: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(
        node="node1", rank=None, exit_code=exit_code, signal=None, time=0.0, summary="do the nodes see it?"
    )
    print_run_end(
        Result(
            run="r", failure=failure, stopped_by=None, asked_to_stop=False, attempts=1, launch_s=None, duration_s=0.5,
            left_behind=0, nodes=1, goodput=None,
        )
    )  # fmt: skip
    assert "do the nodes see it?" in capsys.readouterr().err


FAILURE = Failure(node="gpu2", rank=1, exit_code=1, signal=None, time=0.0, summary="it failed")
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB"
TRACE = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    run()\n{OOM}\n'


@pytest.mark.parametrize(("rank", "node", "shown"), [(1, "gpu2", True), (0, "gpu1", False)])
def test_the_cause_beside_a_failure_is_that_of_its_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, node: str, shown: bool
) -> None:
    for number, name in enumerate(("gpu1", "gpu2")):
        (tmp_path / name).mkdir()
        text = TRACE if number == rank else "step 1\n"
        (tmp_path / name / f"rank-{number}.log").write_text(text)
    show_cause(tmp_path)
    assert f"(rank {rank}" in capsys.readouterr().err, "the logs alone have this cause"
    show_cause(tmp_path, FAILURE)
    assert ("cause: " in capsys.readouterr().err) is shown


@pytest.mark.parametrize("place", [str(Path(dtctl.__file__).parent), "/opt/venv/lib/python3.11/site-packages/dtctl"])
def test_nobody_is_told_to_correct_dtctls_own_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "gpu2").mkdir()
    (tmp_path / "gpu2" / "rank-1.log").write_text(
        'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\n    trainer.run()\n'
        f'  File "{place}/runtime/strategies/zero1.py", line 120, in step\n    assert part is not None\n'
        "AssertionError\n"
    )
    show_cause(tmp_path, FAILURE)
    cause, fix = capsys.readouterr().err.splitlines()
    assert cause.startswith("cause: dtctl itself failed: assert part is not None")
    assert "bug in dtctl" in fix
    assert "/job/train.py:3" in fix
    assert "zero1" not in fix


def recorded(folder: Path, *events: Event, job: str = "") -> RunRecord:
    """A run of a spec, with these events."""
    info = RunInfo(run="r", token="0" * 32, pid=0, started=0.0, spec="dtctl.yaml", command=["dtctl"], detached=False)
    record = RunWriter.create(folder, info)
    spec = parse_spec(
        f"cluster: {{transport: local}}\njob: {{script: t.py{job}}}\n", source="dtctl.yaml", base_dir=folder
    )
    record.write_spec(dump_spec(spec))
    emit = make_event_emitter(record)
    for event in events:
        emit(event)
    return record


@pytest.mark.parametrize(
    ("events", "job", "words"),
    [
        ((SnapshotBegun(step=4),), "", "newest good snapshot"),
        ((), "", "starts over"),
        ((), ", outputs: [out]", "`dtctl launch --resume r` starts with what its program has left in out"),
    ],
)
def test_what_continues_a_run_depends_on_what_it_has_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], events: tuple[Event, ...], job: str, words: str
) -> None:
    followed_run.show_continuation(recorded(tmp_path, *events, job=job))
    said = capsys.readouterr().err
    assert words in said
    assert ("newest good snapshot" in said) is bool(events)


def test_outputs_that_were_fetched_are_named_where_they_are(tmp_path: Path) -> None:
    outputs = {node: NodeOutputs(folder="/there", files=2, bytes=3) for node in ("a", "b")}
    assert "`dtctl fetch r`" in followed_run.format_outputs_line("r", outputs, is_local=False, fetched=tmp_path)
    (tmp_path / "a").mkdir()
    assert "`dtctl fetch r`" in followed_run.format_outputs_line("r", outputs, is_local=False, fetched=tmp_path), (
        "one is missing"
    )
    (tmp_path / "b").mkdir()
    line = followed_run.format_outputs_line("r", outputs, is_local=False, fetched=tmp_path)
    assert (str(tmp_path) in line, "dtctl fetch" in line) == (True, False)


@pytest.mark.parametrize("has_snapshots", [True, False])
def test_a_fetch_of_nothing_points_to_snapshots_only_if_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_snapshots: bool
) -> None:
    task = fetch._FetchTask(
        run="r", sources=[], transport=LocalTransport(), paths=[], into=tmp_path, has_snapshots=has_snapshots
    )
    fetch._print_fetch_summary({"a": FetchResult()}, task, None, tmp_path)
    assert ("snapshot export" in capsys.readouterr().err) is has_snapshots


@pytest.mark.parametrize(("lost", "words"), [({}, ": 7 bytes"), ({"a": 1}, "at least 7 bytes")])
def test_output_that_was_cut_is_not_called_lost(
    capsys: pytest.CaptureFixture[str], lost: dict[str, int], words: str
) -> None:
    print_run_end(
        Result(
            run="r", failure=None, stopped_by=None, asked_to_stop=False, attempts=1, launch_s=None, duration_s=0.5,
            left_behind=0, nodes=1, goodput=None, cut_output={"a": 7}, log_mib=3, lost_output=lost,
        )
    )  # fmt: skip
    said = capsys.readouterr().err
    assert f"cut to 3 MiB a rank (job.log_mib){words if not lost else ': ' + words}" in said.replace("\n", " ")
    assert ("could not be stored" in said) is bool(lost)
