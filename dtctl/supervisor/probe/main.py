"""Answers the doctor's questions until it has no more. Stdlib only, Python 3.8."""

from __future__ import annotations

import json
import os
import threading
import time

from dtctl import node_facts
from dtctl.supervisor import frames
from dtctl.supervisor.messages.base import Message
from dtctl.supervisor.messages.probe import (
    PROBE_REQUESTS,
    AskFacts,
    AskJobPython,
    AskPython,
    AskTime,
    CallNodes,
    LeaveMarks,
    LookForMarks,
    MeasureWay,
    OpenPorts,
    OpenSpread,
    RemoveMarks,
    StartPython,
)
from dtctl.supervisor.probe import child, facts, limits, pairs, python, shared
from dtctl.supervisor.requests import NodeRequests

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class ProbeRequests(NodeRequests):
    """Answers to `dtctl doctor`: what there is from one question to the next."""

    KINDS = PROBE_REQUESTS
    IDLE_LIMIT_S = 60.0
    """Then the doctor is taken for gone; this process ends, and all it had opened with it."""

    def __init__(self, link: frames.FdLink, workdir: str) -> None:
        """See `NodeRequests`."""
        super().__init__(link, workdir)
        self._ears: pairs.Listeners | None = None
        self._workers: tuple[child.Child, ...] = ()
        self._marks: shared.Marks | None = None

    def answer(self, request: Message) -> None:
        """Answer one question, with its `op`."""
        answers: dict[type[Message], Callable[[Any], dict[str, Any]]] = {
            AskTime: self.tell_time,
            AskFacts: facts.gather,
            AskJobPython: self.tell_python,
            OpenPorts: self.open_ports,
            OpenSpread: self.open_spread,
            CallNodes: self.call_nodes,
            MeasureWay: self.measure_way,
            LeaveMarks: self.leave_marks,
            LookForMarks: self.look_for_marks,
            RemoveMarks: self.remove_marks,
            StartPython: self.start_python,
            AskPython: self.ask_python,
        }
        self.link.send_json({**answers[type(request)](request), "op": request.op})

    def tell_time(self, _: AskTime) -> dict:  # type: ignore[type-arg]
        """Return the clock, and whether there are GPUs, which take their time to be asked."""
        return {"time": time.time(), "gpus": len(node_facts.nvidia_devices()) or len(node_facts.amd_devices())}

    def tell_python(self, request: AskJobPython) -> dict:  # type: ignore[type-arg]
        """Return the job's Python's description of itself, or why it does not start."""
        env = {**os.environ, **request.env}
        return {"job": python.job_python(request.python, env, request.code, request.beside)}

    def open_ports(self, request: OpenPorts) -> dict:  # type: ignore[type-arg]
        """Open ports for the others' calls."""
        ears = self._ears = self._ears or pairs.Listeners(request.name, request.token)
        return {"ports": [ears.open(port) for port in request.ports]}

    def open_spread(self, request: OpenSpread) -> dict:  # type: ignore[type-arg]
        """Open one port of each stretch of the range from which the kernel gives them out, and of `meeting`."""
        ears, given = self._ears, limits.given_out()
        if ears is None:
            return {"spread": [], "meeting": []}
        return {
            "spread": ears.spread(given[0], given[1], request.count) if given else [],
            "meeting": ears.spread(request.meeting[0], request.meeting[1], request.count),
        }

    def call_nodes(self, request: CallNodes) -> dict:  # type: ignore[type-arg]
        """Call the others."""
        return {"answers": pairs.call_all(request.targets, request.token, request.timeout_s)}

    def measure_way(self, request: MeasureWay) -> dict:  # type: ignore[type-arg]
        """Measure the way to one other."""
        return pairs.measure(request.address, request.port, request.token, request.seconds)

    def leave_marks(self, request: LeaveMarks) -> dict:  # type: ignore[type-arg]
        """Leave marks in folders."""
        marks = self._marks = self._marks or shared.Marks(request.token)
        return {"folders": marks.leave(request.folders, request.node)}

    def look_for_marks(self, request: LookForMarks) -> dict:  # type: ignore[type-arg]
        """Look for the others' marks."""
        return {"seen": self._marks.look(request.wanted) if self._marks else []}

    def remove_marks(self, _: RemoveMarks) -> dict:  # type: ignore[type-arg]
        """Take the marks away."""
        if self._marks:
            self._marks.remove()
        return {}

    def start_python(self, request: StartPython) -> dict:  # type: ignore[type-arg]
        """Start the job's Python next to this, `count` times; `each` has the answers of several."""
        for worker in self._workers:
            worker.kill()
        env = {**os.environ, **request.env}
        if request.interface:
            # As the supervisor does: what a login sets does not count, what the spec sets does.
            env["GLOO_SOCKET_IFNAME"] = request.env.get("GLOO_SOCKET_IFNAME", request.interface)
            env["NCCL_SOCKET_IFNAME"] = request.env.get("NCCL_SOCKET_IFNAME", "=" + request.interface)
        for name in request.unset:
            env.pop(name, None)
        argv = [request.python, "-c", request.text, json.dumps(request.hidden)]
        self._workers = tuple(child.Child(argv, env) for _ in range(request.count))
        return self._asked([{}] * request.count, request.limit_s)

    def ask_python(self, request: AskPython) -> dict:  # type: ignore[type-arg]
        """Ask each Python something."""
        return self._asked(request.asks, request.limit_s)

    def _asked(self, asks: list, limit_s: float) -> dict:  # type: ignore[type-arg]
        answers = [{"silent": True} for _ in asks]

        def ask(at: int) -> None:
            answers[at] = self._workers[at].ask(asks[at], limit_s)

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(min(len(asks), len(self._workers)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers[0] if len(answers) == 1 else {"each": answers}

    def close(self) -> None:
        """Leave nothing."""
        if self._marks:
            self._marks.remove()
        for worker in self._workers:
            worker.kill()
