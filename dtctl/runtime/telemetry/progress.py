"""Progress of this worker for other processes: numbers in a mapped file, which the node's supervisor reads.

An update costs half a microsecond and no system call, and the supervisor can read it while this process is blocked.
Without a supervisor the numbers go to memory that no other process reads. When a run makes no progress, the supervisor
requests its stacks: a signal makes faulthandler write the stack of the main thread, which needs no lock of the
interpreter, and a byte in a pipe wakes a thread that writes the other stacks and torch's record of the last
collectives. A signal handler cannot read the others: the frames of a thread that runs change meanwhile, and the process
may end with SIGSEGV.
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
"""Fields after the magic, 8 bytes each in the machine's order; the supervisor, which is sent to nodes alone, repeats
them."""
RESUME_SUFFIX: Final = ".resume"
"""Suffix of a JSON file next to it, which the supervisor forwards."""
SIZE: Final = 8 + 8 * len(FIELDS)
_OFFSET: Final = {name: 8 + 8 * index for index, name in enumerate(FIELDS)}
_HOT: Final = struct.Struct("@4Q")  # phase, step, place, noted_ns
_ONE: Final = struct.Struct("@Q")
FIRST_STEPS: Final = 2
"""Steps of an attempt with times that are not typical of the others: compilation, warm-up, caches."""


class WorkerPhase(IntEnum):
    """Phase of a worker."""

    STARTING = 0
    STEPPING = 1
    EVALUATION = 2
    SNAPSHOT = 3
    COMPILING = 4
    ENDING = 5


class Place(IntEnum):
    """Position of a worker in a step; eight times the number of the micro batch is added to it."""

    DATA = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 7
    """All micro batches are through."""


class Progress:
    """The numbers of this worker."""

    def __init__(self, rank: int, *, folder: str | None = None, collectives: bool = False) -> None:
        """Begin in phase STARTING.

        Args:
            rank: of this worker.
            folder: where the file is made. None: what the supervisor has set, if there is one.
            collectives: whether there are any to be recorded.
        """
        folder = os.environ.get(names.PROGRESS) if folder is None else folder
        self._memory: Any = bytearray(SIZE)
        number = 0
        self._path: Path | None = None
        self._resume: dict[str, Any] = {}
        if folder:
            self._path = Path(folder) / f"rank-{rank}"
            with contextlib.suppress(OSError):  # a full disk; training is worth more than being watched
                number = _listen(Path(folder), rank, collectives=collectives)
                self._memory = _mapped(Path(folder) / f"rank-{rank}")
        self._phase, self._step, self._micro, self._began_ns, self._slowest_ns = WorkerPhase.STARTING, 0, 0, 0, 0
        self._spent_ns = dict.fromkeys(("stall_ns", "evaluation_ns"), 0)
        self._first, self._away_ns = 0, 0
        self._compiler_told = False
        self._set("signal", number)
        self._note(Place.DATA)
        self._set("pid", os.getpid())
        self._memory[:8] = MAGIC  # last: from now on it may be read

    def _set(self, name: str, value: int) -> None:
        _ONE.pack_into(self._memory, _OFFSET[name], value)

    def _note(self, place: int) -> int:
        now_ns = time.monotonic_ns()
        _HOT.pack_into(self._memory, _OFFSET["phase"], self._phase, self._step, place, now_ns)
        return now_ns

    def begin(self, step: int, *, until: int = 0) -> None:
        """Steps begin, after this one; `until` is the last one, if that is known."""
        self._set("until", until)
        self._phase, self._step, self._first, self._micro = WorkerPhase.STEPPING, step, step, 0
        self._set("first", step)
        self._set("saved", step)
        self._began_ns = self._note(Place.DATA)
        self._set("begun_ns", self._began_ns)

    def tell_resume(self, **told: Mapping[str, Any] | None) -> None:
        """Report the facts of a resume.

        Args:
            told: `resumed`, before steps are repeated, and `confirmed`, after that; JSON.
        """
        self._resume |= told
        if self._path is not None:
            draft = self._path.with_suffix(f"{RESUME_SUFFIX}.part")
            with contextlib.suppress(OSError):  # training is worth more than being watched
                draft.touch(mode=0o600)
                draft.write_text(json.dumps(self._resume))
                draft.replace(self._path.with_suffix(RESUME_SUFFIX))

    @property
    def slowest_s(self) -> float:
        """Return how long the slowest step has taken; 0 while only the first ones were taken."""
        return self._slowest_ns / 1e9

    def committed(self, step: int) -> None:
        """Report a snapshot of this step; called on the worker that has committed it, from any thread."""
        self._set("committed", step)

    def forward(self) -> None:
        """A micro batch is there, and its forward pass begins."""
        self._note(8 * self._micro + Place.FORWARD)

    def backward(self) -> None:
        """The forward pass of a micro batch is done."""
        self._note(8 * self._micro + Place.BACKWARD)
        self._micro += 1

    def step(self, step: int) -> None:
        """An optimizer step is done."""
        self._step, self._micro = step, 0
        now_ns = self._note(Place.DATA)
        if step > self._first + FIRST_STEPS:
            took_ns = now_ns - self._began_ns - self._away_ns
            if took_ns > self._slowest_ns:
                self._slowest_ns = took_ns
                self._set("slowest_ns", took_ns)
        elif not self._compiler_told and "torch._dynamo" in sys.modules:
            self._hear_of_compilation()
        self._began_ns, self._away_ns = now_ns, 0

    @contextmanager
    def apart(self, phase: WorkerPhase) -> Iterator[None]:
        """The context of what is not a step; its time is not counted to one."""
        before, self._phase = self._phase, phase
        began_ns = self._note(Place.UPDATE)
        try:
            yield
        finally:
            self._phase = before
            took_ns = self._note(Place.UPDATE) - began_ns
            self._away_ns += took_ns
            name = {WorkerPhase.EVALUATION: "evaluation_ns", WorkerPhase.SNAPSHOT: "stall_ns"}.get(phase)
            if name is not None:
                self._spent_ns[name] += took_ns
                self._set(name, self._spent_ns[name])
            if phase is WorkerPhase.SNAPSHOT:
                self._set("saved", self._step)

    def end(self) -> None:
        """No more steps."""
        self._phase = WorkerPhase.ENDING
        self._note(Place.UPDATE)

    def _hear_of_compilation(self) -> None:
        """Whatever is compiled from now on, because a shape is new, is no step that hangs."""
        from torch._dynamo.callback import callback_handler

        self._compiler_told = True
        open_: MutableSequence[contextlib.AbstractContextManager[None]] = []

        def begin(_: object) -> None:
            if self._phase is WorkerPhase.STEPPING:
                open_.append(self.apart(WorkerPhase.COMPILING))
                open_[-1].__enter__()

        def end(_: object) -> None:
            if open_:
                open_.pop().__exit__(None, None, None)

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)


def _mapped(path: Path) -> mmap.mmap:
    """Return a new file, mapped into memory."""
    path.unlink(missing_ok=True)  # not truncated: a process that has mapped the old one would be killed by SIGBUS
    with path.open("xb") as file:
        file.write(bytes(SIZE))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)


def _listen(folder: Path, rank: int, *, collectives: bool) -> int:
    """Prepare for requests of this worker's stacks; return the number of the signal that requests them."""
    number = signal.SIGRTMIN + 6
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_IGN)  # which faulthandler puts back when the interpreter ends
    stack = os.open(folder / f"rank-{rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(number, file=stack, all_threads=False)  # which keeps the descriptor as a number
    ask = folder / f"rank-{rank}.ask"
    ask.unlink(missing_ok=True)
    os.mkfifo(ask, 0o600)
    flight = folder / f"rank-{rank}.flight" if collectives else None
    threading.Thread(target=_answer, args=(ask, folder / f"rank-{rank}.threads", flight), daemon=True).start()
    return int(number)


def _answer(ask: Path, threads: Path, flight: Path | None) -> None:
    """Write the stacks of threads and the last collectives whenever asked; a thread that sleeps until then."""
    pipe = os.open(ask, os.O_RDWR)  # to write as well, so that there is never an end
    while os.read(pipe, 1):
        _put(threads, _stacks_of_threads().encode())
        if flight is not None:
            from dtctl.runtime.telemetry.flight import dump

            _put(flight, dump())


def _put(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.part")
    draft.write_bytes(content)
    draft.replace(path)


def _stacks_of_threads() -> str:
    """Return the stacks of all threads but the main one and this one, in faulthandler's form."""
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
