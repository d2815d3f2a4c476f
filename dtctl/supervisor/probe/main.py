"""Answers to the doctor's requests until it has no more. Stdlib only, Python 3.8."""

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
    CallNodes,
    FindMarks,
    MeasureLink,
    OpenPorts,
    OpenSampledPorts,
    QueryFacts,
    QueryJobPython,
    QueryNetworkSettings,
    QueryPython,
    QueryTime,
    RemoveMarks,
    StartPython,
    WriteMarks,
)
from dtctl.supervisor.probe import child, facts, limits, pairs, python, settings, shared
from dtctl.supervisor.requests import NodeRequests

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class ProbeRequests(NodeRequests):
    """Answers to `dtctl doctor`, and the state between its requests."""

    KINDS = PROBE_REQUESTS
    IDLE_LIMIT_S = 60.0
    """Seconds of silence after which the doctor counts as gone, and this process ends and closes everything."""

    def __init__(self, link: frames.FdLink, workdir: str) -> None:
        """Prepare to answer, see `NodeRequests`."""
        super().__init__(link, workdir)
        self._ears: pairs.ProbeListeners | None = None
        self._workers: tuple[child.JobPythonProcess, ...] = ()
        self._marks: shared.FolderMarks | None = None

    def answer(self, request: Message) -> None:
        """Answer one request, with its `op`."""
        answers: dict[type[Message], Callable[[Any], dict[str, Any]]] = {
            QueryTime: self.report_time,
            QueryFacts: facts.gather_probe_facts,
            QueryJobPython: self.describe_job_python,
            OpenPorts: self.open_ports,
            OpenSampledPorts: self.open_spread,
            CallNodes: self.call_nodes,
            MeasureLink: self.measure_way,
            QueryNetworkSettings: lambda _: settings.read_network_settings(),
            WriteMarks: self.write_folder_marks,
            FindMarks: self.find_folder_marks,
            RemoveMarks: self.remove_marks,
            StartPython: self.start_python,
            QueryPython: self.ask_python,
        }
        self.link.send_json({**answers[type(request)](request), "op": request.op})

    def report_time(self, _: QueryTime) -> dict:  # type: ignore[type-arg]
        """Return the time, and whether there are GPUs, whose queries take longer."""
        return {
            "time": time.time(),
            "gpus": len(node_facts.list_nvidia_devices()) or len(node_facts.list_amd_devices()),
        }

    def describe_job_python(self, request: QueryJobPython) -> dict:  # type: ignore[type-arg]
        """Return the facts about the job's Python, or the reason why it does not start."""
        env = {**os.environ, **request.env}
        return {"job": python.examine_job_python(request.python, env, request.code, request.beside)}

    def open_ports(self, request: OpenPorts) -> dict:  # type: ignore[type-arg]
        """Open ports for the calls of other nodes."""
        ears = self._ears = self._ears or pairs.ProbeListeners(request.name, request.token)
        return {"ports": [ears.open(port) for port in request.ports]}

    def open_spread(self, request: OpenSampledPorts) -> dict:  # type: ignore[type-arg]
        """Open one port in each part of the range from which the kernel assigns ports, and of the range `meeting`."""
        ears, given = self._ears, limits.read_ephemeral_ports()
        if ears is None:
            return {"spread": [], "meeting": []}
        return {
            "spread": ears.spread(given[0], given[1], request.count) if given else [],
            "meeting": ears.spread(request.meeting[0], request.meeting[1], request.count),
        }

    def call_nodes(self, request: CallNodes) -> dict:  # type: ignore[type-arg]
        """Call other nodes; return the result of each call."""
        return {"answers": pairs.call_all(request.targets, request.token, request.timeout_s)}

    def measure_way(self, request: MeasureLink) -> dict:  # type: ignore[type-arg]
        """Measure the connection to one other node."""
        return pairs.measure_peer_link(request.address, request.port, request.token, request.seconds)

    def write_folder_marks(self, request: WriteMarks) -> dict:  # type: ignore[type-arg]
        """Write marks into folders."""
        marks = self._marks = self._marks or shared.FolderMarks(request.token)
        return {"folders": marks.write_marks(request.folders, request.node)}

    def find_folder_marks(self, request: FindMarks) -> dict:  # type: ignore[type-arg]
        """Look for the marks of other nodes."""
        return {"seen": self._marks.wait_for_marks(request.wanted) if self._marks else []}

    def remove_marks(self, _: RemoveMarks) -> dict:  # type: ignore[type-arg]
        """Remove the marks of this node."""
        if self._marks:
            self._marks.remove()
        return {}

    def start_python(self, request: StartPython) -> dict:  # type: ignore[type-arg]
        """Start `count` processes of the job's Python next to this one; `each` has the answers of several."""
        for worker in self._workers:
            worker.kill()
        env = {**os.environ, **request.env}
        if request.interface:
            # As in the supervisor, the value of the spec counts, but not that of the login.
            env["GLOO_SOCKET_IFNAME"] = request.env.get("GLOO_SOCKET_IFNAME", request.interface)
            env["NCCL_SOCKET_IFNAME"] = request.env.get("NCCL_SOCKET_IFNAME", "=" + request.interface)
        for name in request.unset:
            env.pop(name, None)
        argv = [request.python, "-c", request.text, json.dumps(request.hidden)]
        self._workers = tuple(child.JobPythonProcess(argv, env) for _ in range(request.count))
        return self._collect_worker_answers([{}] * request.count, request.limit_s)

    def ask_python(self, request: QueryPython) -> dict:  # type: ignore[type-arg]
        """Send a request to each process of the job's Python."""
        return self._collect_worker_answers(request.asks, request.limit_s)

    def _collect_worker_answers(self, asks: list, limit_s: float) -> dict:  # type: ignore[type-arg]
        answers = [{"silent": True} for _ in asks]

        def ask(at: int) -> None:
            answers[at] = self._workers[at].exchange_message(asks[at], limit_s)

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(min(len(asks), len(self._workers)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers[0] if len(answers) == 1 else {"each": answers}

    def close(self) -> None:
        """Remove the marks, end the processes of the job's Python, and stop listening."""
        if self._marks:
            self._marks.remove()
        for worker in self._workers:
            worker.kill()
