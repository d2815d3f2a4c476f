"""Logs of failed jobs: right cause, right rank, and no guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.diagnose import diagnose_log_files
from dtctl.doctor.explain.diagnosis import Diagnosis
from dtctl.doctor.explain.lines import parse_log_line

LOGS = Path(__file__).parent / "logs"
QUOTED: list[dict[str, Any]] = yaml.safe_load((LOGS / "quoted.yaml").read_text())
OWN: dict[str, dict[str, Any]] = yaml.safe_load((LOGS / "expected.yaml").read_text())


def check(found: list[Diagnosis], expected: dict[str, Any]) -> None:
    if expected["id"] is None:
        assert not any(diagnosis.primary for diagnosis in found)
        return
    first = found[0]
    said = f"{first.id} {first.cause}\nalso: {[other.id for other in found[1:]]}"
    assert first.id == expected["id"], said
    assert [diagnosis.primary for diagnosis in found] == [True] + [False] * (len(found) - 1)
    if "ranks" in expected:
        assert list(first.ranks) == expected["ranks"], said
    if "nodes" in expected:
        assert list(first.nodes) == expected["nodes"], said
    if "confidence" in expected:
        assert first.confidence == expected["confidence"], said
    assert first.fix
    assert "{" not in first.cause
    assert first.evidence or first.id == "unknown"


@pytest.mark.parametrize("case", QUOTED, ids=[case["name"] for case in QUOTED])
def test_a_text_from_an_issue_is_explained(tmp_path: Path, case: dict[str, Any]) -> None:
    (tmp_path / "job.log").write_text(case["text"])
    check(diagnose_log_files([tmp_path / "job.log"]), case)


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_real_run_of_torch_is_explained(name: str) -> None:
    check(diagnose_log_files([LOGS / f"own-{name}.log"]), OWN[name])


def test_every_kept_run_has_an_expectation() -> None:
    assert {path.stem.removeprefix("own-") for path in LOGS.glob("own-*.log")} == set(OWN)


def test_every_signature_is_found_in_its_own_example() -> None:
    for signature in signatures.load_signatures():
        line = parse_log_line(signature.example, file="", number=1, rank=None, node=None)
        found = signatures.find_best(line.text)
        assert found is not None, signature.id
        assert found[0].id == signature.id


def test_signatures_have_what_a_reader_needs_and_ids_are_unique() -> None:
    every = signatures.load_signatures()
    assert len({signature.id for signature in every}) == len(every) >= 87
    for signature in every:
        assert signature.source.startswith("https://"), signature.id
        assert signature.cause, signature.id
        assert signature.fix, signature.id


@pytest.mark.parametrize(
    ("raw", "rank", "node", "text"),
    [
        ("[rank3]: boom", 3, None, "boom"),
        ("[node1:3] boom", 3, "node1", "boom"),
        ("[node1:agent] boom", None, "node1", "boom"),
        ("[1,13]<stderr>:boom", 13, None, "boom"),
        ("7: boom", 7, None, "boom"),
        ("[default5]:boom", 5, None, "boom"),
        ("[default3]:[rank11]: boom", 11, None, "boom"),
        ("(Worker pid=12, ip=10.0.0.3) boom", None, "10.0.0.3", "boom"),
        ("2026-11-21T10:00:00.1Z stderr F [rank3]: boom", 3, None, "boom"),
        ("gpu-1: [rank2]: boom", 2, "gpu-1", "boom"),
        ("[2026-04-22 21:34:20] n1:10:20 [0] NCCL WARN boom", None, "n1", "NCCL WARN boom"),
        ("[rank0]:[E1206 18:44:12.7 ProcessGroupNCCL.cpp:607] [Rank 0] boom", 0, None, "boom"),
        ("\x1b[31m 10%\r[rank1]: boom\x1b[0m", 1, None, "boom"),
        ("ValueError: 3: not a rank", None, None, "ValueError: 3: not a rank"),
        ("3: 12:00:00 boom", 3, None, "boom"),
        ("2026-11-21T10:00:00.1Z 3: boom", 3, None, "boom"),
    ],
)
def test_prefixes_of_launchers_are_taken_off_and_understood(
    raw: str, rank: int | None, node: str | None, text: str
) -> None:
    line = parse_log_line(raw, file="f", number=1, rank=None, node=None)
    assert (line.rank, line.node, line.text) == (rank, node, text)


@pytest.mark.parametrize(
    ("raw", "pid", "text"),
    [
        ("E1124 03:35:36.260000 182 torch/distributed/elastic/multiprocessing/tail_log.py:154] boom", "182", "boom"),
        ("E1124 12:00:00.123456     182 file.py:12] boom", "182", "boom"),
        ("E20261124 12:00:00.123456 182 file.cc:12] boom", "182", "boom"),
        ("[E1124 12:00:00.123456 182 file.py:12] boom", "182", "boom"),
        ("[E321 12:00:00.123456 file.cpp:12] boom", None, "boom"),
        ("E1124 12:00:00.123456 182 file.py:12] 7: boom", "182", "boom"),
        ("2026-11-24 12:00:00,123 182: boom", None, "boom"),
        ("[2026-11-24 12:00:00] [182] Traceback (most recent call last):", None, "Traceback (most recent call last):"),
        ("12:00:00 boom", None, "boom"),
        ("12:34 boom", None, "12:34 boom"),
        ("[train.py:182] boom", None, "boom"),
        ("[ERROR:182] boom", None, "boom"),
        ("[2026-11-24 12:00:00] [trainer:182] boom", None, "boom"),
        ("[pid182]: boom", None, "[pid182]: boom"),
    ],
)
def test_a_process_a_line_of_a_file_and_a_time_of_day_in_a_prefix_are_no_rank(
    raw: str, pid: str | None, text: str
) -> None:
    line = parse_log_line(raw, file="f", number=1, rank=None, node=None)
    assert (line.rank, line.node, line.pid, line.text) == (None, None, pid, text)


def test_nccl_names_a_process_and_a_gpu_and_no_rank() -> None:
    line = parse_log_line("node1:182:190 [0] NCCL WARN boom", file="f", number=1, rank=None, node=None)
    assert (line.rank, line.node, line.pid, line.text) == (None, "node1", "182", "NCCL WARN boom")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("world_size=4\nProcess 3 exited with code 1\n", (3,)),
        ("world_size=4\nProcess 182 exited with code 1\n", ()),
        ("Process 3 exited with code 1\n", ()),
        ("world_size=4\nE1124 12:00:00.1 3 torch/run.py:12] Process 3 exited with code 1\n", ()),
        (
            "world_size=999\ntorch.distributed.elastic.multiprocessing.api.SignalException: "
            "Process 182 got signal: 15\n",
            (),
        ),
        ("DataLoader worker 991 exited with code 1\n", ()),
        ("Worker 3 exited with code 1\n", (3,)),
    ],
)
def test_the_number_of_a_process_is_a_rank_only_if_the_job_has_that_rank(
    tmp_path: Path, text: str, ranks: tuple[int, ...]
) -> None:
    (tmp_path / "job.log").write_text(text)
    assert diagnose_log_files([tmp_path / "job.log"])[0].ranks == ranks


def test_of_two_causes_the_earlier_one_is_the_first_although_it_stands_later(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("2026-01-05 10:00:09 OSError: [Errno 28] No space left on device\n")
    (tmp_path / "b.log").write_text("2026-01-05 10:00:02 torch.OutOfMemoryError: CUDA out of memory. Tried\n")
    assert [diagnosis.id for diagnosis in diagnose_log_files([tmp_path])] == ["cuda-oom", "disk-full"]


def test_the_folder_of_a_run_tells_nodes_and_the_rank_that_died_without_a_word(tmp_path: Path) -> None:
    nodes = [{"name": f"node{i + 1}", "address": f"10.0.0.{i + 1}", "first_rank": i, "slots": 1} for i in range(3)]
    (tmp_path / "plan.json").write_text(json.dumps({"nodes": nodes}))
    for rank in (0, 2):
        folder = tmp_path / "logs" / f"node{rank + 1}"
        folder.mkdir(parents=True)
        (folder / f"rank-{rank}.log").write_text("RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:5\n")
    first = diagnose_log_files([tmp_path])[0]
    assert (first.ranks, first.nodes, first.confidence) == ((1,), ("node2",), "medium")


def test_a_cause_calls_nodes_as_the_spec_does(tmp_path: Path) -> None:
    """What a program and torchrun print has the names that hosts have themselves."""
    hosts = ("ip-10-0-0-6.internal", "ip-10-0-0-7.internal")
    nodes = [
        {"name": f"gpu{i + 1}", "address": f"10.0.0.{6 + i}", "first_rank": i, "slots": 1, "host": host}
        for i, host in enumerate(hosts)
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"nodes": nodes}))
    text = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\n    main()\n'
        '  File "/job/train.py", line 2, in main\n    raise ValueError()\n'
        "ValueError: no samples came from ip-10-0-0-7 or [ip-10-0-0-7.internal]:4000\n"
    )
    log = tmp_path / "logs" / "gpu1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text(text)
    first = diagnose_log_files([tmp_path / "logs"])[0]
    assert "no samples came from gpu2 or [gpu2]:4000" in first.cause
    assert first.nodes == ("gpu1",)
    log.write_text("socket.gaierror: [Errno -2] Name or service not known: ip-10-0-0-7.internal\n")
    first = diagnose_log_files([tmp_path / "logs"])[0]
    assert "ip-10" not in f"{first.cause} {first.fix} {first.nodes}"
    log.write_text("step 1 with ip-10-0-0-7\nFATAL: the frobnicator of ip-10-0-0-7 has failed\nexited with code 3\n")
    first = diagnose_log_files([tmp_path / "logs"])[0]
    assert "gpu2" in first.cause
    assert "ip-10" not in f"{first.cause} {first.fix} {first.nodes}"


def test_a_hosts_own_name_does_not_stand_beside_that_of_the_spec(tmp_path: Path) -> None:
    table = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        "Root Cause (first observed failure):\n[0]:\n"
        "  time      : 2026-11-25_10:00:00\n  host      : ip-10-0-0-7.internal\n  rank      : 1 (local_rank: 0)\n"
        "  exitcode  : -9 (pid: 4242)\n  traceback : Signal 9 (SIGKILL) received by PID 4242\n"
        "============================================================\n"
    )
    for name, text in (("gpu1/rank-0", "step 1\n"), ("gpu2/rank-1", "step 1\n"), ("gpu2/agent", table)):
        path = tmp_path / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    first = diagnose_log_files([tmp_path / "logs"])[0]
    assert (first.ranks, first.nodes) == ((1,), ("gpu2",))


@pytest.mark.parametrize(
    "line",
    ["You set `devices=1` and `num_nodes=1` in Lightning, but the product (1 * 1) does not match the world size (2).",
     "You set `num_nodes=1` in Lightning, but the number of nodes configured in SLURM `--nodes=2` does not match.",
     "You set `devices=4` in Lightning, but the number of tasks per node configured in SLURM `--ntasks-per-node=1`"],
)  # fmt: skip
def test_lightning_is_told_which_arguments_it_lacks(tmp_path: Path, line: str) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/job/train.py", line 11, in <module>\n    main()\n'
        '  File "/venv/lib/python3.11/site-packages/lightning/fabric/plugins/environments/torchelastic.py", line 82, '
        f"in validate_settings\n    raise ValueError(\nValueError: {line}\n"
    )
    first = diagnose_log_files([log])[0]
    assert first.id == "lightning-nodes"
    assert "num_nodes=" in first.fix
    assert "devices=" in first.fix
