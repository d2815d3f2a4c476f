"""Which record of the last collectives is kept, and that it can be read whatever its length."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from dtctl import names
from dtctl.doctor.explain.dumps import is_dump, judge_dumps, read_dump
from dtctl.launch.control.hang import StackTrace, write_stack
from dtctl.runtime.distributed import network
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.telemetry import flight
from dtctl.supervisor import stacks


def entry(number: int, op: str, *, state: str = "completed") -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"],
        "profiling_name": op,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "state": state,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "time_created_ns": 1_700_000_000_000_000_000 + number,
    }


def recorder(op: str, count: int) -> Any:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    record = {"version": "2.10", "pg_config": config, "entries": [entry(n, op) for n in range(1, count + 1)]}
    return lambda _collectives, _active: json.dumps(record).encode()


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(nccl: int | None, other: int | None) -> None:
        names = {"_dump_nccl_trace_json": ("nccl:all_reduce", nccl), "_dump_fr_trace_json": ("gloo:all_reduce", other)}
        for name, (op, count) in names.items():
            if count is None:
                monkeypatch.delattr(c10d, name, raising=False)
            else:
                monkeypatch.setattr(c10d, name, recorder(op, count), raising=False)

    return put


def ops(record: dict[str, Any]) -> set[str]:
    return {one["profiling_name"] for one in record["entries"]}


def test_on_gpus_the_record_is_nccl_s_with_gloo_s_beside_it(recorders: Any) -> None:
    recorders(8, 5)
    found = json.loads(flight.dump_flight_recorder())
    assert ops(found) == {"nccl:all_reduce"}
    assert ops(found["gloo"]) == {"gloo:all_reduce"}


@pytest.mark.parametrize(("nccl", "other"), [(None, 5), (0, 5)])
def test_elsewhere_it_is_gloo_s(recorders: Any, nccl: int | None, other: int) -> None:
    recorders(nccl, other)
    assert ops(json.loads(flight.dump_flight_recorder())) == {"gloo:all_reduce"}


def test_a_torch_without_recorders_says_nothing(recorders: Any) -> None:
    recorders(None, None)
    assert flight.dump_flight_recorder() == b""


def test_a_long_record_keeps_its_end_and_can_be_read_on_the_control_machine(recorders: Any, tmp_path: Path) -> None:
    recorders(2000, 2000)
    answer = tmp_path / "rank-0.flight"
    answer.write_bytes(flight.dump_flight_recorder())
    told = stacks._read_flight_record(str(answer))
    assert json.loads(told)["entries"][-1]["collective_seq_id"] == 2000
    for rank in (0, 1):
        write_stack(tmp_path / "hangs", "a", rank, StackTrace(state="S", tool="none", text="", flight=told))
    kept = sorted(path for path in (tmp_path / "hangs" / "a").iterdir() if is_dump(path))
    assert len(kept) == 2, "doctor --log reads them"
    dumps = [read_dump(path) for path in kept]
    assert all(dump is not None for dump in dumps)
    assert judge_dumps(dump for dump in dumps if dump) is None


def test_what_is_too_long_is_left_out_and_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.flight"
    path.write_text('{"entries": ["' + "x" * stacks.FLIGHT_BYTES + '"]}')
    assert stacks._read_flight_record(str(path)) == ""


def test_records_of_a_failure_have_names_that_the_doctor_knows(
    recorders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Worker
) -> None:
    recorders(3, 3)
    monkeypatch.setenv(names.RUN_DIR, str(tmp_path))
    path = network.write_flight_record(dataclasses.replace(worker, rank=5, world_size=8, backend="gloo"))
    assert path is not None
    assert is_dump(path)
    found = read_dump(path)
    assert found is not None
    assert found.rank == 5
    assert is_dump(Path(f"{tmp_path}/flight/nccl_trace_rank_5")), "the prefix that NCCL adds the rank to"
    assert path.parent == tmp_path / "flight"
