"""A benchmark as a job over the spec's nodes: launched as any other; rank 0's output has the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from dtctl.bench.figures import build_result_row, build_training_row
from dtctl.launch.cluster import resolve_cluster
from dtctl.launch.control.controller import Result
from dtctl.launch.control.run import run_launch_job
from dtctl.launch.job_builder import CodePush, build_launch_job
from dtctl.launch.records.events import Event, OutputLine
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.record import RunInfo, make_run_id
from dtctl.launch.records.run_writer import RunWriter
from dtctl.spec.model import Files, Spec

MARK = "DTCTL-BENCH "
SCRIPT = "worker.py"
WORKER = "dtctl.bench.worker"
CODE = (WORKER, "dtctl.__init__", "dtctl.doctor.__init__", "dtctl.doctor.rounds", "dtctl.doctor.worker")
TRAINING = {"width": 512, "depth": 4, "batch": 256, "steps": 7}
"""Four layers of 512 x 512: 4 MiB of gradients, and enough work that a step is not only communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest:
    """Measurements that the user asked for."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str = "auto"
    repeats: int = 20
    seconds: float = 1.0
    """Seconds for one operation of one size, all repeats together, approximately."""
    training: bool = False


@dataclass(slots=True, kw_only=True)
class BenchmarkResults:
    """Measurements of a benchmark so far."""

    backend: str = ""
    world: int = 0
    torch: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)
    """Rows as `figures.build_result_row` makes them."""
    pairs: dict[str, Any] = field(default_factory=dict)
    """Rates of the largest size: `size`, and `gb_s` from rank (row) to rank (column), None on the diagonal."""
    training: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    def add_worker_line(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Add one of the worker's lines; return its rows."""
        if "backend" in message:
            self.backend, self.world, self.torch = message["backend"], message["world"], message["torch"]
        elif "training" in message:
            one_s = self.training[0]["step_s"] if self.training else message["step_s"]
            self.training.append(
                build_training_row(message["training"], message["step_s"], one_s, loss_ok=message["ok"])
            )
        elif "finished" in message:
            self.finished = True
        elif message["op"] == "p2p":
            return [self._record_pair_rates(message)]
        else:
            row = build_result_row(
                message["op"], message["size"], message["seconds"], ranks=self.world, wrong=message["wrong"]
            )
            self.results.append(row)
            return [row]
        return []

    def _record_pair_rates(self, message: Mapping[str, Any]) -> dict[str, Any]:
        size = message["size"]
        rows: list[list[float | None]] = [[size / s / 1e9 if s > 0 else None for s in row] for row in message["matrix"]]
        self.pairs = {"size": size, "gb_s": [[r if r is None else round(r, 5) for r in row] for row in rows]}
        typical = median(s for row in message["matrix"] for s in row if s > 0)
        row = build_result_row("p2p", size, typical, ranks=2, wrong=message["wrong"])
        self.results.append(row)
        return row

    @property
    def wrong(self) -> int:
        """Number of wrong elements, and of training steps after which the workers differed."""
        return sum(int(row["wrong"]) for row in self.results) + sum(not row["ok"] for row in self.training)


def build_bench_spec(spec: Spec, folder: Path, request: BenchmarkRequest) -> Spec:
    """Return the user's spec with the benchmark as its job: same nodes, network, variables and set-up lines.

    Args:
        spec: the user's.
        folder: folder that is sent to the nodes.
        request: what to measure.
    """
    argument = {
        "ops": request.ops,
        "sizes": request.sizes,
        "repeats": request.repeats,
        "warm_up": 1,
        "seconds": request.seconds,
        "backend": request.backend,
        "training": TRAINING if request.training else None,
    }
    kind = spec.job.kind if spec.job.kind in ("torchrun", "direct") else None
    changes: dict[str, object] = {
        "name": "bench",
        "script": SCRIPT,
        "module": None,
        "command": None,
        "args": (json.dumps(argument),),
        "add_args": (),
        "deepspeed": {},
        "files": Files(root=str(folder)),
        "env_from": (),
        "secrets": (),
        "max_restarts": 0,
        "kind": kind,
        "preload": (),
    }
    return spec.model_copy(update={"job": spec.job.model_copy(update=changes), "train": None})


def write_code(folder: Path) -> None:
    """Write the files that the workers need; dtctl need not be installed on the nodes."""
    for name in CODE:
        package, _, leaf = name.rpartition(".")
        text = resources.files(package).joinpath(f"{leaf}.py").read_text(encoding="utf-8")
        path = folder / SCRIPT if name == WORKER else folder / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run_benchmark(
    spec: Spec, request: BenchmarkRequest, folder: Path, *, on_row: Callable[[dict[str, Any]], None], signals: list[int]
) -> tuple[BenchmarkResults, Result, tuple[str, ...]]:
    """Run the benchmark; return the figures, the result of the job, and the node of each rank.

    Args:
        spec: the user's.
        request: what to measure.
        folder: an empty folder of this machine, for the job's files and logs.
        on_row: function that gets each row of the table when it is known.
        signals: as `run_launch_job` takes them.

    Raises:
        DtctlError: a node could not be made ready.
    """
    code = folder / "code"
    write_code(code)
    cluster = resolve_cluster(spec, start=True)
    job_spec = build_bench_spec(spec, code, request)
    run = make_run_id("bench", now=time.time())
    # The cache of digests for the next push is stored there.
    pushed = CodePush(job_spec.model_copy(update={"base_dir": folder}))
    job = build_launch_job(job_spec, cluster, run=run, keep=False, code=pushed)
    record = RunWriter.create(
        folder, RunInfo(run=run, token=job.token, pid=0, started=time.time(), spec="", command=[], detached=False)
    )
    figures = BenchmarkResults()

    def emit(event: Event) -> None:
        if isinstance(event, OutputLine) and (at := event.text.find(MARK)) >= 0:
            for row in figures.add_worker_line(json.loads(event.text[at + len(MARK) :])):
                on_row(row)

    with record.launcher_lock():
        ended = run_launch_job(job, record, emit=emit, signals=signals, ledger=Ledger(time.monotonic))
    return figures, ended, _list_rank_nodes(record.plan())


def _list_rank_nodes(plan: Mapping[str, Any]) -> tuple[str, ...]:
    nodes: Sequence[Mapping[str, Any]] = plan.get("nodes", ())
    return tuple(str(node["name"]) for node in nodes for _ in range(int(node["slots"])))
