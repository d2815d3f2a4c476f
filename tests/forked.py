"""Workers of a training, each forked from one process that has imported torch already: no import per worker.

    ended = forked.launch([script, "--train.steps=3"], 2, cwd=folder, environ={...})

What a worker sees is what `torchrun --standalone` gives it: the same variables, and a store that its agent holds. When
one fails, the others are ended after a moment. Who tests the start itself uses torchrun. Run as a script, this file is
the process that is forked; one lives as long as the tests do, and its end is the end of all it started.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

IMPORTED: Final = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel"),
    *("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torch.distributed.elastic.multiprocessing.errors"),
    *("dtctl.runtime.loop", "dtctl.runtime.main", "dtctl.runtime.strategies.pipeline"),
)
LIMIT_S: Final = 400.0
"""Ends what would wait for ever, on however busy a machine; below the limit of a test, so that the stacks are seen."""
STACKS_S: Final = 2.0
"""How long workers may take to print theirs."""
LAST_WORDS_S: Final = 3.0
"""How long the peers of a worker that failed may take to end by themselves."""

_served: list[subprocess.Popen[str]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What workers left behind."""

    code: int
    """0 if all ended with 0; else 1."""
    output: str
    """Of all workers, and a line for each that failed: `rank 1 ended with exit code 75`, `rank 0 ended by SIGKILL`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A worker that gets SIGKILL, and the others a moment later."""

    rank: int
    progress: str
    """A file that grows by a byte for each thing done; none of it when the workers start."""
    after: int
    """Bytes that it must have."""
    drafts: str | None = None
    """A folder: kill while it has something unfinished. None: at once."""
    delay_s: float = 0.0
    """And wait this long."""
    stop: bool = False
    """SIGTERM to all instead, which asks for an end with a snapshot."""


def launch(
    argv: Sequence[str | Path],
    workers: int,
    *,
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
    kill: Kill | None = None,
) -> Ended:
    """Run a script in some workers of one node, and wait for their end.

    Args:
        argv: script and arguments.
        workers: how many; one has no peers and no process group.
        cwd: folder that they run in.
        environ: variables beside this process's own; those of dtctl are not handed on.
        limit_s: after which everything is ended.
        kill: what is killed when. None: nothing.
    """
    if not _served or _served[0].poll() is not None:
        _served[:] = [_start()]
    server = _served[0]
    assert server.stdin
    assert server.stdout
    own = {name: value for name, value in os.environ.items() if not name.startswith("DTCTL_")}
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        asked = {
            "argv": [str(word) for word in argv],
            "workers": workers,
            "cwd": str(cwd),
            "environ": {**own, "OMP_NUM_THREADS": "1", **(environ or {})},
            "output": output.name,
            "limit_s": limit_s,
            "kill": asdict(kill) if kill else None,
        }
        try:
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        except BaseException:  # a time limit of pytest: what it answers later would be taken for the next answer
            _served.clear()
            server.kill()
            server.wait()
            raise
        text = Path(output.name).read_text(errors="replace")
    assert answer, f"the process that is forked has ended\n{text}"
    return Ended(code=int(answer), output=text)


def _start() -> subprocess.Popen[str]:
    here = Path(__file__).resolve()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parents[1])}
    started = subprocess.Popen(
        [sys.executable, str(here)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    atexit.register(_stop, started)
    return started


def _stop(server: subprocess.Popen[str]) -> None:
    assert server.stdin
    assert server.stdout
    server.stdin.close()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:  # one who was interrupted has left workers that still run
        server.kill()
        server.wait()
    server.stdout.close()


def _serve() -> None:
    _die_with_parent()
    sys.path[0] = ""  # not the folder of this file
    gc.disable()  # a third of the time of such imports is a search for garbage that is not there
    for name in IMPORTED:
        __import__(name)
    gc.enable()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not be forked"
    for line in sys.stdin:
        asked = json.loads(line)
        agent = os.fork()
        if not agent:
            os._exit(_agent(asked))
        _, status = os.waitpid(agent, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _agent(asked: dict[str, Any]) -> int:
    """Start the workers, give them a store, and wait for them."""
    _die_with_parent()
    os.setsid()
    output = os.open(asked["output"], os.O_WRONLY | os.O_APPEND)
    count = asked["workers"]
    gate, opened = os.pipe()
    pids: dict[int, int] = {}
    for rank in range(count):
        pid = os.fork()
        if not pid:
            os.close(opened)
            _worker(asked, rank, output, gate)
        pids[pid] = rank
    os.close(gate)
    from torch.distributed import TCPStore  # has threads: after the forks

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(opened, f"{store.port:8}".encode() * count)
    os.close(opened)
    kill = Kill(**asked["kill"]) if asked["kill"] else None
    failed = _wait(pids, output, asked["limit_s"], kill)
    return int(failed)


def _wait(pids: dict[int, int], output: int, limit_s: float, kill: Kill | None) -> bool:
    """Until all workers have ended; those that outlive one that failed are helped. Returns whether one failed."""
    failed, deadline = False, time.monotonic() + limit_s
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            rank = pids.pop(pid)
            if code:
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                os.write(output, f"rank {rank} ended {how}\n".encode())
            if code and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + LAST_WORDS_S)
            continue
        if kill is not None and not failed and is_due(kill):
            time.sleep(kill.delay_s)
            os.write(output, b"killed\n")
            for pid, rank in pids.items():
                if kill.stop or rank == kill.rank:
                    os.kill(pid, signal.SIGTERM if kill.stop else signal.SIGKILL)
            failed, deadline, kill = True, deadline if kill.stop else time.monotonic() + 0.02, None
        if time.monotonic() > deadline:
            os.write(output, f"ended after waiting: ranks {sorted(pids.values())}\n".encode())
            if not failed:  # where a worker hangs is seen in its stacks alone
                for left in pids:
                    os.kill(left, signal.SIGUSR2)
                time.sleep(STACKS_S)
            failed, deadline = True, deadline + LAST_WORDS_S
            for left in pids:
                os.kill(left, signal.SIGKILL)
        time.sleep(0.005 if kill is None else 0.0005)
    return failed


def is_due(kill: Kill) -> bool:
    """Whether it is time; to be asked often."""
    done = os.stat(kill.progress).st_size if os.path.exists(kill.progress) else 0  # noqa: PTH110, PTH116
    if done < kill.after or kill.drafts is None:
        return done >= kill.after
    # What is unfinished has a name that begins with a dot; if none comes in a while, it is as good now.
    drafts = os.listdir(kill.drafts) if os.path.isdir(kill.drafts) else []  # noqa: PTH112, PTH208
    return any(name.endswith(".draft") for name in drafts) or done > kill.after + 8


def _worker(asked: dict[str, Any], rank: int, output: int, gate: int) -> None:
    """Become a worker; does not return."""
    _die_with_parent()
    count = asked["workers"]
    null = os.open(os.devnull, os.O_RDONLY)
    for source, fd in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, fd)
    port = os.read(gate, 8)
    os.environ.clear()
    os.environ.update(asked["environ"])
    if count > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port.decode().strip(),
            TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_RUN_ID="forked",
        )  # fmt: skip
    os.chdir(asked["cwd"])
    sys.argv = asked["argv"]
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    faulthandler.register(signal.SIGUSR2, file=output, all_threads=True)
    code = 1
    try:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # noqa: PTH100, PTH120 - as Python itself does it
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    _serve()
