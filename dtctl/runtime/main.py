"""Main function of a worker: configuration, start, and errors as three lines instead of a traceback.

if __name__ == "__main__":
    raise SystemExit(run(train))
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

import dtctl
from dtctl import names
from dtctl.errors import DtctlError
from dtctl.runtime import determinism
from dtctl.runtime.console import say, write_error_to_stderr
from dtctl.runtime.distributed.process_group import record_failure, start
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.stop import Outcome
from dtctl.train.config import TrainConfig, load


def run(train: Callable[[TrainConfig, Worker], Outcome], *, defaults: Mapping[str, Any] | None = None) -> int:
    """Set up this process as a worker, and train.

    Args:
        train: builds model and data, and runs a Trainer.
        defaults: default configuration of the script; keys as in the spec's `train:` section.

    Returns:
        Exit code of the process: 0 if the run has finished, 75 if it was stopped with a snapshot and must be started
        once more, else that of the error, which was written to stderr.
    """
    try:
        config = load(defaults)
        same_bits = determinism.is_wanted(config, "cuda" if torch.cuda.is_available() else "cpu")
        with start(
            seed=config.seed, timeout_s=config.timeout_s, deterministic=same_bits, bind_cores=config.bind_cores
        ) as worker:
            if worker.local_rank == 0 and (warning := describe_other_version()):
                say(warning)
            return train(config, worker).exit_code
    except DtctlError as exc:
        record_failure(exc)
        write_error_to_stderr(exc)
        return exc.exit_code


def describe_other_version() -> str:
    """Return a message if this node has another version of dtctl than the machine that launched the run; else ""."""
    launched_by = os.environ.get(names.VERSION, dtctl.__version__)
    if launched_by == dtctl.__version__:
        return ""
    return (
        f"warning: this node has dtctl {dtctl.__version__}, and dtctl {launched_by} launched the run: "
        f"{sys.executable} -m pip install dtctl=={launched_by}"
    )
