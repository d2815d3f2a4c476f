"""Flight-recorder dumps: of real runs of torch 2.13 (gloo, 3 ranks; dumps/), and of those who mean harm."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from dtctl.doctor.explain.diagnose import diagnose_log_files
from dtctl.doctor.explain.dumps import judge_dumps, read_dump
from dtctl.errors import UsageError
from tests.facts import raises

DUMPS = Path(__file__).parent / "dumps"


@pytest.mark.parametrize(
    ("case", "id_", "ranks", "said"),
    [
        ("behind", "rank-behind", (1,), "it had entered 3 collectives when others were in number 4, all_reduce"),
        ("behind-json", "rank-behind", (1,), "in number 4, all_reduce"),
        ("mismatch", "collective-mismatch", (1,), "rank 1 called broadcast of [[8]]"),
        ("missing", "rank-silent", (2,), "no dump"),
    ],
)
def test_the_rank_to_blame_is_named_by_the_dumps_of_a_real_run(
    case: str, id_: str, ranks: tuple[int, ...], said: str
) -> None:
    first, *rest = diagnose_log_files([DUMPS / case])
    assert (first.id, first.ranks, first.primary, rest) == (id_, ranks, True, [])
    assert said in first.cause
    assert first.fix
    assert first.source.startswith("https://")
    assert all("rank_" in evidence.file and evidence.text for evidence in first.evidence)


def test_a_dump_without_the_others_says_nothing() -> None:
    found = read_dump(DUMPS / "behind" / "nccl_trace_rank_0")
    assert found is not None
    assert found.members == {"": (0, 1, 2)}
    assert judge_dumps([found]) is None


def test_a_pickle_that_would_run_a_program_is_passed_over_and_nothing_runs(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was-run"),)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = tmp_path / f"nccl_trace_rank_{protocol}"
        path.write_bytes(pickle.dumps({"entries": [], "pg_config": {}, "x": Harm()}, protocol))
        assert read_dump(path) is None
    assert not (tmp_path / "was-run").exists()
    assert diagnose_log_files([tmp_path]) == []


@pytest.mark.parametrize("data", [b"", b"\x80", b"{", b"{}", b"[]", b"\x80\x02N.", b"hello\n", b'{"entries": [7]}'])
def test_what_is_no_dump_is_passed_over(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "nccl_trace_rank_3"
    path.write_bytes(data)
    found = read_dump(path)
    assert found is None


def entry(
    number: int, op: str = "nccl:all_reduce", *, size: int = 4, done: bool = True, group: str = "0"
) -> dict[str, Any]:
    return {
        "process_group": (group, "default_pg"), "collective_seq_id": number, "profiling_name": op, "is_p2p": False,
        "input_sizes": ((size,),), "state": "completed" if done else "started", "retired": done,
        "frames": [{"name": "step", "filename": "/job/train.py", "line": 17}],
    }  # fmt: skip


def write(folder: Path, rank: int, *entries: dict[str, Any]) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    data = {"version": "2.10", "pg_config": config, "entries": list(entries)}
    (folder / f"comm_lib_trace_rank_{rank}").write_bytes(pickle.dumps(data, protocol=2))


def test_an_all_reduce_of_another_size_is_a_mismatch_and_the_line_is_told(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, entry(1), entry(2, size=5 if rank == 3 else 4, done=False))
    first = diagnose_log_files([tmp_path])[0]
    assert (first.id, first.ranks) == ("collective-mismatch", (3,))
    assert "/job/train.py:17" in first.cause


def test_parts_of_different_size_are_no_mismatch(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, entry(1, "nccl:all_to_all", size=rank + 1, done=False))
    assert diagnose_log_files([tmp_path]) == [], "all are in the same collective: nobody is to blame by these"


def test_the_lowest_count_is_the_culprit_and_a_cause_from_the_logs_comes_first(tmp_path: Path) -> None:
    for rank in range(4):
        write(
            tmp_path,
            rank,
            *[entry(i) for i in range(1, 3 if rank == 2 else 6)],
            *([] if rank == 2 else [entry(6, done=False)]),
        )
    assert diagnose_log_files([tmp_path])[0].ranks == (2,)
    log = tmp_path / "rank-2.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n")
    first, second, *_ = diagnose_log_files([tmp_path])
    assert (first.ranks, second.id, second.primary) == ((2,), "rank-behind", False)
    assert "memory" in first.cause


def test_dumps_beside_the_watchdogs_texts_win(tmp_path: Path) -> None:
    shutil.copytree(DUMPS / "behind", tmp_path / "dumps")
    work = "WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000)"
    said = f"Watchdog caught collective operation timeout: {work} ran for 600029 milliseconds before timing out."
    (tmp_path / "rank-0.log").write_text(f"[rank0]:[E321 10:00:00 ProcessGroupNCCL.cpp:607] [Rank 0] {said}\n")
    first = diagnose_log_files([tmp_path])[0]
    assert (first.id, first.ranks, first.primary) == ("rank-behind", (1,), True)


def test_a_folder_without_logs_and_dumps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({}))
    with raises(UsageError, "logs"):
        diagnose_log_files([tmp_path])
