"""Progress of this worker for other processes: numbers in a mapped file, which the node's supervisor reads.

An update costs half a microsecond and no system call, and the supervisor can read it while this process is blocked.
Without a supervisor the numbers go to memory that no other process reads. When a run makes no progress, the supervisor
requests stacks. A signal makes faulthandler write the stack of the main thread, which needs no lock of the interpreter.
A byte in a pipe wakes a thread that writes the other stacks and torch's record of the last collectives. A signal
handler cannot read the other stacks: the frames of a running thread change meanwhile, and the process may end with
SIGSEGV.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from dtctl import names

MAGIC: Final = b"dtctl-p3"
FIELDS: Final = (
    "pid", "signal", "phase", "step", "place", "noted_ns", "first", "begun_ns", "slowest_ns", "stall_ns",
    "evaluation_ns", "saved", "until", "committed",
)  # fmt: skip
"""Fields after the magic, 8 bytes each in the machine's byte order; the supervisor, which is sent to nodes without this
package, defines the same."""
RESUME_SUFFIX: Final = ".resume"
"""Suffix of a JSON file next to it, which the supervisor forwards."""
SIZE: Final = 8 + 8 * len(FIELDS)
_OFFSET: Final = {name: 8 + 8 * index for index, name in enumerate(FIELDS)}
_HOT: Final = struct.Struct("@4Q")  # phase, step, place, noted_ns
_ONE: Final = struct.Struct("@Q")
FIRST_STEPS: Final = 2
"""Number of first steps in an attempt whose times are not typical: compilation, warm-up, caches."""


class WorkerPhase(IntEnum):
    """Phase of a worker."""

    STARTING = 0
    STEPPING = 1
    EVALUATION = 2
    SNAPSHOT = 3
    COMPILING = 4
    ENDING = 5


class StepPosition(IntEnum):
    """Position of a worker in a step; eight times the number of the micro batch is added."""

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 7
    """Phase after all micro batches of a step."""


class ProgressFile:
    """Progress of this worker, in a mapped file."""

    def __init__(self, rank: int, *, folder: str | None = None, collectives: bool = False) -> None:
        """Start in phase STARTING.

        Args:
            rank: rank of this worker.
            folder: folder for the file. None: the one that the supervisor has set, if there is one.
            collectives: True if there are collectives to record.
        """
        folder = os.environ.get(names.PROGRESS) if folder is None else folder
        self._memory: Any = bytearray(SIZE)
        number = 0
        self._path: Path | None = None
        self._resume: dict[str, Any] = {}
        if folder:
            self._path = Path(folder) / f"rank-{rank}"
            with contextlib.suppress(OSError):  # the disk may be full, which must not end the run
                number = _register_stack_requests(Path(folder), rank, collectives=collectives)
                self._memory = _create_mapped_file(Path(folder) / f"rank-{rank}")
        self._phase, self._step, self._micro, self._began_ns, self._slowest_ns = WorkerPhase.STARTING, 0, 0, 0, 0
        self._spent_ns = dict.fromkeys(("stall_ns", "evaluation_ns"), 0)
        self._first, self._away_ns = 0, 0
        self._compiler_told = False
        self._write_progress_field("signal", number)
        self._write_current_place(StepPosition.DATA)
        self._write_progress_field("pid", os.getpid())
        self._memory[:8] = MAGIC  # written last, since a reader may use the file from now on

    def _write_progress_field(self, name: str, value: int) -> None:
        _ONE.pack_into(self._memory, _OFFSET[name], value)

    def _write_current_place(self, place: int) -> int:
        now_ns = time.monotonic_ns()
        _HOT.pack_into(self._memory, _OFFSET["phase"], self._phase, self._step, place, now_ns)
        return now_ns

    def begin(self, step: int, *, until: int = 0) -> None:
        """Report that steps begin after this one; `until` is the last one, if it is known."""
        self._write_progress_field("until", until)
        self._phase, self._step, self._first, self._micro = WorkerPhase.STEPPING, step, step, 0
        self._write_progress_field("first", step)
        self._write_progress_field("saved", step)
        self._began_ns = self._write_current_place(StepPosition.DATA)
        self._write_progress_field("begun_ns", self._began_ns)

    def set_length(self, until: int) -> None:
        """Report the last step, which was unknown when steps began."""
        self._write_progress_field("until", until)

    def report_resume(self, **told: Mapping[str, Any] | None) -> None:
        """Report the facts of a resume.

        Args:
            told: `resumed`, before steps are repeated, and `confirmed`, after that; JSON.
        """
        self._resume |= told
        if self._path is not None:
            draft = self._path.with_suffix(f"{RESUME_SUFFIX}.part")
            with contextlib.suppress(OSError):  # an error here must not end the run
                draft.touch(mode=0o600)
                draft.write_text(json.dumps(self._resume))
                draft.replace(self._path.with_suffix(RESUME_SUFFIX))

    @property
    def slowest_s(self) -> float:
        """Return the seconds of the slowest step; 0 until the first few steps are done."""
        return self._slowest_ns / 1e9

    def committed(self, step: int) -> None:
        """Report a committed snapshot of this step; called on the worker that has committed it, from any thread."""
        self._write_progress_field("committed", step)

    def forward(self) -> None:
        """Report that a forward pass begins."""
        self._write_current_place(8 * self._micro + StepPosition.FORWARD)

    def backward(self) -> None:
        """Report that the forward pass of a micro batch is done."""
        self._write_current_place(8 * self._micro + StepPosition.BACKWARD)
        self._micro += 1

    def step(self, step: int) -> None:
        """Report that an optimizer step is done."""
        self._step, self._micro = step, 0
        now_ns = self._write_current_place(StepPosition.DATA)
        if step > self._first + FIRST_STEPS:
            took_ns = now_ns - self._began_ns - self._away_ns
            if took_ns > self._slowest_ns:
                self._slowest_ns = took_ns
                self._write_progress_field("slowest_ns", took_ns)
        elif not self._compiler_told and "torch._dynamo" in sys.modules:
            self._hear_of_compilation()
        self._began_ns, self._away_ns = now_ns, 0

    @contextmanager
    def timing_phase(self, phase: WorkerPhase) -> Iterator[None]:
        """Return the context of work outside of steps, whose time is not counted for a step."""
        before, self._phase = self._phase, phase
        began_ns = self._write_current_place(StepPosition.UPDATE)
        try:
            yield
        finally:
            self._phase = before
            took_ns = self._write_current_place(StepPosition.UPDATE) - began_ns
            self._away_ns += took_ns
            name = {WorkerPhase.EVALUATION: "evaluation_ns", WorkerPhase.SNAPSHOT: "stall_ns"}.get(phase)
            if name is not None:
                self._spent_ns[name] += took_ns
                self._write_progress_field(name, self._spent_ns[name])
            if phase is WorkerPhase.SNAPSHOT:
                self._write_progress_field("saved", self._step)

    def end(self) -> None:
        """Report that no more steps follow."""
        self._phase = WorkerPhase.ENDING
        self._write_current_place(StepPosition.UPDATE)

    def _hear_of_compilation(self) -> None:
        """Report compilations from now on, so that compilation for a new shape does not look like a hang."""
        from torch._dynamo.callback import callback_handler

        self._compiler_told = True
        open_: MutableSequence[contextlib.AbstractContextManager[None]] = []

        def begin(_: object) -> None:
            if self._phase is WorkerPhase.STEPPING:
                open_.append(self.timing_phase(WorkerPhase.COMPILING))
                open_[-1].__enter__()

        def end(_: object) -> None:
            if open_:
                open_.pop().__exit__(None, None, None)

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)


def _create_mapped_file(path: Path) -> mmap.mmap:
    """Return a new file that is mapped into memory."""
    path.unlink(missing_ok=True)  # not truncated, since SIGBUS would kill a process that has mapped the old file
    with path.open("xb") as file:
        file.write(bytes(SIZE))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)


def _register_stack_requests(folder: Path, rank: int, *, collectives: bool) -> int:
    """Prepare for requests of this worker's stacks; return the number of the signal for them."""
    number = signal.SIGRTMIN + 6
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_IGN)  # faulthandler restores this handler when the interpreter exits
    stack = os.open(folder / f"rank-{rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(number, file=stack, all_threads=False)  # faulthandler keeps the descriptor as a number
    ask = folder / f"rank-{rank}.ask"
    ask.unlink(missing_ok=True)
    os.mkfifo(ask, 0o600)
    flight = folder / f"rank-{rank}.flight" if collectives else None
    threading.Thread(
        target=_serve_stack_requests, args=(ask, folder / f"rank-{rank}.threads", flight), daemon=True
    ).start()
    return int(number)


def _serve_stack_requests(ask: Path, threads: Path, flight: Path | None) -> None:
    """Write the stacks of threads and the last collectives at each request.

    This runs in a thread that sleeps until a request arrives.
    """
    pipe = os.open(ask, os.O_RDWR)  # open for writing too, so that reads never return the end
    while os.read(pipe, 1):
        _write_file_atomically(threads, _stacks_of_threads().encode())
        if flight is not None:
            from dtctl.runtime.telemetry.flight import dump_flight_recorder

            _write_file_atomically(flight, dump_flight_recorder())


def _write_file_atomically(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.part")
    draft.write_bytes(content)
    draft.replace(path)


def _stacks_of_threads() -> str:
    """Return the stacks of all threads except the main one and this one, in faulthandler's form."""
    left_out = {threading.main_thread().ident, threading.get_ident()}
    lines = []
    for ident, innermost in sys._current_frames().items():
        if ident not in left_out:
            lines.append(f"Thread 0x{ident:016x} (most recent call first):")
            frame: types.FrameType | None = innermost
            while frame is not None:
                code = frame.f_code
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
                frame = frame.f_back
            lines.append("")
    return "".join(f"{line}\n" for line in lines)
