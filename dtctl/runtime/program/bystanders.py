"""Objects that a program reaches and that have no say in its training, and such as somebody else has a hand in."""

from __future__ import annotations

import queue
import subprocess
import threading
from typing import Any, Final

from dtctl.runtime.program.code import is_own_code

NO_SAY: Final = (
    *("logging", "io", "_io", "threading", "_thread", "socket", "ssl", "subprocess", "concurrent", "asyncio"),
    *("selectors", "_csv.writer", "multiprocessing.context", "multiprocessing.synchronize", "multiprocessing.pool"),
    *("multiprocessing.process", "multiprocessing.queues", "tensorboard", "wandb", "mlflow", "tqdm", "rich"),
    *("pathlib", "re", "typing", "abc", "warnings", "contextlib", "inspect", "dtctl"),
    *("torch.cuda", "torch.distributed"),
    *("torch.profiler", "torch._C", "torch._dynamo", "torch.autograd", "torch.amp", "torch.utils.tensorboard"),
    *("torch.utils.hooks", "torch.nn.parallel", "unittest", "_pytest", "pytest", "tempfile", "signal", "argparse._"),
    *("importlib", "zipimport", "weakref", "torch._ops"),
)
"""Modules, or classes of them, whose objects do not change what is trained."""


def shared_with(value: Any) -> str | None:
    """What another process or thread has a hand in; None of anything else."""
    if isinstance(value, subprocess.Popen) and (value.stdout is not None or value.stdin is not None):
        return "a process that is talked to"
    if type(value).__module__ in ("multiprocessing.connection", "multiprocessing.managers"):
        return "another process's"
    if isinstance(value, queue.Queue | queue.SimpleQueue) and any(_is_own_thread(t) for t in threading.enumerate()):
        return "a queue between threads"
    return None


def _is_own_thread(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None) or type(thread).run
    return is_own_code(getattr(target, "__module__", None) or "")
