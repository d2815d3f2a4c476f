"""Numbers that pages state and the code knows: limits, defaults and counts are those of the code.

docs/security.md has its own test (tests/security/test_docs.py).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.gpu import PROGRAMME
from dtctl.advise import search
from dtctl.advise.hardware import read_gpu_table
from dtctl.cli import report as report_command
from dtctl.doctor.checks import gpu_speed
from dtctl.estimate import choice, memory
from dtctl.launch import job_builder
from dtctl.launch.control import hang, node_pool, restart_policy, spare_pool, worker_replacement
from dtctl.launch.files import checkpoint_sets, shared, shared_copies
from dtctl.metrics import follow, metrics_process, page, send
from dtctl.report import metrics as report_metrics
from dtctl.spec.model import Alerts, Cluster, Job, Slurm
from dtctl.supervisor import receive, run_workdir
from dtctl.train.config import DdpConfig, SnapshotConfig
from tests.fault.grammar import FAULTS, HARMLESS, PAIRS, SECOND

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
H100, A100 = read_gpu_table()["H100"], read_gpu_table()["A100"]
TRAININGS = json.loads((ROOT / "benchmarks/data/advise_published.json").read_text())


def default(section: type, key: str) -> object:
    """Return the default of a key of the spec."""
    if dataclasses.is_dataclass(section):
        return next(field.default for field in dataclasses.fields(section) if field.name == key)
    return section.model_fields[key].default  # type: ignore[attr-defined]


STATED = {
    "docs/launch.md": {
        "(10 s with spares, 30 s without)": (job_builder.SPARED_S, job_builder.UNSPARED_S) == (10, 30),
        "`cluster.return_s` (default: 60 seconds)": default(Cluster, "return_s") == 60,
        "ten times the slowest step, at least 30 s": (hang.FACTOR, hang.FLOOR_S) == (10, 30),
        "`job.hang_start_s` (auto: half an hour)": hang.START_S == 1800,
        "the run ends after the second failure": restart_policy.SURE_LIMIT == 2,
        "it ends after the third": restart_policy.SAME_LIMIT == 3,
    },
    "docs/recovery.md": {
        "At most two spares stand by": spare_pool.STANDBYS == 2,
        "does not answer within 2 s": node_pool.LIVE.spare_after_s == 2,
        "tries to reconnect for 15 s": node_pool.LIVE.limit_s == 15,
        "not completed after four replacements": worker_replacement.IN_PLACE + 1 == 4,
    },
    "docs/files.md": {
        "(up to some 80 files and 16 MiB)": (80, 16 * MIB) == (run_workdir.MANY_FILES, run_workdir.MANY_BYTES),
        "A folder of more than 1 GiB": run_workdir.MOST_COPIED_BYTES == 1 << 30,
        "a push keeps the three newest trees": receive.KEPT_TREES == 3,
        "`job.log_mib` (1 GiB)": default(Job, "log_mib") == 1024,
        "nodes look for new files every 5 s": shared_copies.ROUND_S == 5,
        "a quarter of the speed of their links": shared.SHARE_BESIDE == 0.25,
        "none of its files was written to for 10 s": checkpoint_sets.QUIET_S == 10,
    },
    "docs/strategies.md": {
        "The memory is 90% of a GPU's memory": memory.BUDGET == 0.9,
        "states may fill only 60% of the memory": choice.UNSEEN == 0.6,
        "less than a fifth of the memory": choice.SMALL == 0.2,
    },
    "docs/accuracy-doctor.md": {
        "255 single faults and 56 pairs of them": (len(FAULTS), len(PAIRS)) == (255, 56),
        "15 conditions that only look like faults": len(HARMLESS) == 15,
        "`SECOND`, has 58 faults": len(SECOND) == 58,
    },
    "docs/accuracy-advise.md": {
        "holds 375 published trainings": len(TRAININGS) == 375,
        "The first 299 come from": sum(row.get("round", 1) == 1 for row in TRAININGS) == 299,
        "50 trainings of eight further sources": sum(row.get("round") == 2 for row in TRAININGS) == 50,
        "The last 25 trainings": sum(row.get("round") == 3 for row in TRAININGS) == 25,
    },
    "docs/guides/advise.md": {
        "of which 80% may be used": search.HOST_BUDGET == 0.8,
        "cp from 8192 tokens a sample on": search.LONG == 8192,
        "whose speed is within 2%": search.SIMPLER == 0.02,
        "no more than a fifth of the usable memory": search.COPIES == 0.2,
        "up to 90% of the usable memory": search.ROOM == 0.9,
    },
    "docs/guides/distributed.md": {
        "buckets, 25 MiB each": default(DdpConfig, "bucket_mb") == 25,
    },
    "docs/guides/process-groups.md": {
        "in buckets of 25 MiB (`train.ddp.bucket_mb`)": default(DdpConfig, "bucket_mb") == 25,
    },
    "docs/guides/gpu.md": {
        "This runs 16 checks": len(PROGRAMME) == 16,
        "(H100: 641 TFLOPS)": round(gpu_speed.PRODUCTS * H100.products * H100.half) == 641,
        "33 GB/s with PCIe 5, 15 GB/s with PCIe 4": (
            (round(gpu_speed.COPIES * H100.host), round(gpu_speed.COPIES * A100.host)) == (33, 15)
        ),
        "225 GB/s on H100, 150 GB/s on A100": (
            (round(gpu_speed.SUMS * H100.link), round(gpu_speed.SUMS * A100.link)) == (225, 150)
        ),
    },
    "docs/guides/metrics.md": {
        "at most 100 alerts wait": send.WAITING == 100,
        "after 1, 2, 4, 8, 15, 30 and then every 60 s": send.RETRY_S == (1, 2, 4, 8, 15, 30, 60),
        "a receiver has 5 s to answer": send.ANSWER_S == 5,
        "remaining alerts, 8 s at most": metrics_process.FINISH_S == 8,
        "`no_step_s: 600`": default(Alerts, "no_step_s") == 600,
        "the median of five logged steps": follow.RECENT_ROWS == 5,
        "the highest median of twenty": follow.REFERENCE_ROWS == 20,
        "`throughput_drop: 0.2`": default(Alerts, "throughput_drop") == 0.2,
    },
    "docs/guides/report.md": {
        "about 1,500 points": report_metrics.POINTS == 1500,
        "a file above 24 MiB": report_metrics.SHORT_BYTES == 24 * MIB,
        "up to six runs": report_command.MOST == 6,
    },
    "docs/guides/slurm.md": {
        "`slurm.requeues` times (10 by default)": default(Slurm, "requeues") == 10,
    },
    "docs/guides/snapshots.md": {
        "keep: 2": default(SnapshotConfig, "keep") == 2,
    },
}


@pytest.mark.parametrize("name", STATED)
def test_numbers_of_a_page_are_those_of_the_code(name: str) -> None:
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    for words, is_right in STATED[name].items():
        assert words.lower() in text.lower(), words
        assert is_right, words


def test_numbers_of_the_runtime_are_those_of_the_code() -> None:
    pytest.importorskip("torch")
    from dtctl.runtime import memory_snapshots
    from dtctl.runtime.exactness import resume_check
    from dtctl.runtime.guards import other_optimizers
    from dtctl.runtime.snapshot.storage import lease, place
    from dtctl.runtime.strategies import comparison
    from dtctl.runtime.telemetry import meter

    snapshots = " ".join((ROOT / "docs/guides/snapshots.md").read_text(encoding="utf-8").split())
    stated = {
        "not renewed for 30 seconds (90 in an object store)": (lease.STALE_S, lease.STALE_REMOTE_S) == (30, 90),
        "at most 2% of the time": memory_snapshots.COST == 0.02,
        "after three failures in a row": memory_snapshots.MOST_FAILED == 3,
        "a block (64 MiB) in 300 seconds": (64 * MIB, 300) == (place.BLOCK_BYTES, place.PATIENCE_S),
        "less than 30% of `job.grace_s` together (3 seconds by default)": (
            (resume_check.AHEAD, default(Job, "grace_s")) == (0.3, 10)
        ),
        "After steps 1, 2 and 10": other_optimizers.STEPS == (1, 2, 10),
    }
    for words, is_right in stated.items():
        assert words in snapshots, words
        assert is_right, words
    import torch

    tolerance = comparison.TOLERANCE
    assert (tolerance[torch.float64], tolerance[torch.float32]) == (1e-9, 2e-4), "docs/strategies.md states both"
    assert meter.AHEAD == 8, "docs/guides/gpu.md: 8 steps ahead"
    assert page.MANY == 16, "docs/security.md: 16 clients"
