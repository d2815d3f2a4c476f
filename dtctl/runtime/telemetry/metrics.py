"""Metrics that rank 0 writes: metrics.jsonl, a line on stdout, and the configured sinks."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from dtctl import folders, names
from dtctl.runtime.console import say
from dtctl.runtime.telemetry.sinks import MetricsSink

WORTH_SAYING = 0.1
"""Smallest share of time waiting for data that the line of a step shows."""
NOTICED_S = 0.005
"""Smallest waiting time per step that the line shows, since on a busy machine even a step of a millisecond waits."""


def remove_later_lines(path: Path, step: int) -> None:
    """Remove the lines of later steps atomically, so that each step has one line after a resume."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _parse_line_step(line) <= step]
    if kept == lines:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with _open_metrics_file(draft, "w") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folders.sync_folder_entries(str(path.parent))


def _open_metrics_file(path: Path, mode: str) -> TextIO:
    """Open a file of metrics.

    In the folder of a run, which belongs to dtctl, only the user can read it; elsewhere the umask applies.
    """
    access = 0o600 if os.environ.get(names.METRICS) else 0o666
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if mode == "w" else os.O_APPEND), access)
    file: TextIO = os.fdopen(descriptor, mode, encoding="utf-8")  # type: ignore[assignment]
    return file


def _parse_line_step(line: str) -> float:
    """Return the step of a line; infinity for a line that was cut off by a kill."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


class MetricsWriter:
    """Writer of the metrics of one attempt; only on rank 0.

    Attributes:
        steps: number of steps of the run; 0 if unknown.
    """

    def __init__(
        self, path: Path, *, step: int, steps: int, sinks: Sequence[MetricsSink] = (), hold: bool = False
    ) -> None:
        """Open the file of metrics.

        Args:
            path: path of metrics.jsonl; lines after `step` are removed from it.
            step: number of steps done before this attempt.
            steps: number of steps of the run.
            sinks: other places that receive the numbers.
            hold: True if nothing is removed or written until `release`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._held: list[tuple[int, Callable[[], None]]] | None = [] if hold else None
        self._began = step
        if not hold:
            remove_later_lines(path, step)
        self._path = path
        self._file: TextIO = _open_metrics_file(path, "a")
        self.steps = steps
        self._sinks = sinks
        self._since_s = time.perf_counter()
        self._since_step = step

    def log(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        grad_norm: float | None,
        samples: int | None,
        tokens: int | None,
        extra: Mapping[str, float],
        measured: Callable[[float], Mapping[str, float]] = lambda _: {},
    ) -> None:
        """Write the line of one step.

        Args:
            step: number of steps done.
            loss: mean loss over the step's global batch.
            lr: learning rate of the step.
            grad_norm: 2-norm of the whole gradient before clipping; None if it is not known.
            samples: number of samples in a global batch; None if it is not known.
            tokens: number of tokens in a global batch; None if samples have none.
            extra: further values, such as those of an evaluation.
            measured: returns values that do not appear on stdout, given the number of samples per second.
        """
        now_s = time.perf_counter()
        step_s = (now_s - self._since_s) / max(1, step - self._since_step)
        self._since_s, self._since_step = now_s, step
        row: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "lr": lr,
            **({} if grad_norm is None else {"grad_norm": grad_norm}),
            "step_s": round(step_s, 6),
            **({} if samples is None else {"samples_per_s": round(samples / step_s, 3)}),
            "tokens_per_s": None if tokens is None else round(tokens / step_s, 1),
            "time": round(time.time(), 3),
            **measured((samples or 0) / step_s),
            **extra,
        }
        # JSON has no NaN and no infinity, so a diverged loss is null there, and written out on stdout.
        known = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        numbers = {name: value for name, value in row.items() if isinstance(value, float) and name != "time"}

        def write() -> None:
            self._file.write(json.dumps(known) + "\n")
            self._file.flush()
            say(self._format_metrics_line(row, extra))
            for sink in self._sinks:
                sink.log(step, numbers)

        if self._held is not None:
            self._held.append((step, write))
        else:
            write()

    def release(self) -> None:
        """Write the lines held back, in place of lines that an earlier attempt has written for these steps."""
        held, self._held = self._held, None
        if held is not None:
            self._file.close()
            remove_later_lines(self._path, self._began)
            self._file = _open_metrics_file(self._path, "a")
        for _, write in held or ():
            write()

    def _format_metrics_line(self, row: Mapping[str, Any], extra: Mapping[str, float]) -> str:
        tokens, samples = row["tokens_per_s"], row.get("samples_per_s")
        speed = f"  {tokens:,.0f} tokens/s" if tokens else "" if samples is None else f"  {samples:,.0f} samples/s"
        norm = f"grad {row['grad_norm']:.2f}  " if "grad_norm" in row else ""
        width = len(str(self.steps))
        of = f"/{self.steps}" if self.steps else ""
        line = (
            f"step {row['step']:>{width}}{of}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"{norm}{row['step_s'] * 1e3:.1f} ms/step{speed}"
        )
        waited = row.get("data_wait", 0.0)
        if waited > WORTH_SAYING and waited * row["step_s"] > NOTICED_S:
            line += f"  {row['data_wait']:.0%} waiting for data"
        return line + "".join(f"  {name} {value:.4f}" for name, value in extra.items())

    def rewind(self, step: int) -> None:
        """Remove the lines after a step to which training went back."""
        if self._held is not None:
            self._held = [(held, write) for held, write in self._held if held <= step]
        else:
            self._file.close()
            remove_later_lines(self._path, step)
            self._file = _open_metrics_file(self._path, "a")
        self._since_s, self._since_step = time.perf_counter(), step

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on steps (evaluation, a snapshot) from the next `step_s`."""
        self._since_s += seconds

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        for sink in self._sinks:
            sink.close()
