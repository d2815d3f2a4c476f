"""Answers the doctor's questions until it has no more. Stdlib only, Python 3.8."""

from __future__ import annotations

import json
import os
import threading
import time

from dtctl import node_facts
from dtctl.doctor.probe import child, facts, limits, pairs, python, shared
from dtctl.supervisor import frames

IDLE_LIMIT_S = 60.0
"""Silence after which the doctor is taken for gone; then this process ends, and all it had opened with it."""


class Probe:
    """What there is from one question to the next; `on_X` answers the question whose `op` is X."""

    _ears = None  # type: pairs.Listeners | None
    _workers = ()  # type: tuple[child.Child, ...]
    _marks = None  # type: shared.Marks | None

    def on_time(self, _: dict) -> dict:  # type: ignore[type-arg]
        """The clock, and whether there are GPUs, which take their time to be asked."""
        return {"time": time.time(), "gpus": len(node_facts.nvidia_devices()) or len(node_facts.amd_devices())}

    def on_facts(self, message: dict) -> dict:  # type: ignore[type-arg]
        """What this node says of itself."""
        return facts.gather(message)

    def on_job_python(self, message: dict) -> dict:  # type: ignore[type-arg]
        """What the job's Python says of itself, or why it does not start."""
        env = {**os.environ, **message["env"]}
        return {"job": python.job_python(message["python"], env, message["code"], message["beside"])}

    def on_listen(self, message: dict) -> dict:  # type: ignore[type-arg]
        """Open ports for the others' calls."""
        ears = self._ears = self._ears or pairs.Listeners(message["name"], message["token"])
        return {"ports": [ears.open(port) for port in message["ports"]]}

    def on_spread(self, message: dict) -> dict:  # type: ignore[type-arg]
        """Open one port of each stretch of the range from which the kernel gives them out, and of `meeting`."""
        ears, given = self._ears, limits.given_out()
        if ears is None:
            return {"spread": [], "meeting": []}
        return {
            "spread": ears.spread(given[0], given[1], message["count"]) if given else [],
            "meeting": ears.spread(message["meeting"][0], message["meeting"][1], message["count"]),
        }

    def on_call(self, message: dict) -> dict:  # type: ignore[type-arg]
        """Call the others."""
        return {"answers": pairs.call_all(message["targets"], message["token"], message["timeout_s"])}

    def on_measure(self, message: dict) -> dict:  # type: ignore[type-arg]
        """Measure the way to one other."""
        return pairs.measure(message["address"], message["port"], message["token"], message["seconds"])

    def on_mark(self, message: dict) -> dict:  # type: ignore[type-arg]
        """Leave marks in folders."""
        marks = self._marks = self._marks or shared.Marks(message["token"])
        return {"folders": marks.leave(message["folders"], message["node"])}

    def on_look(self, message: dict) -> dict:  # type: ignore[type-arg]
        """Look for the others' marks."""
        return {"seen": self._marks.look(message["wanted"]) if self._marks else []}

    def on_unmark(self, _: dict) -> dict:  # type: ignore[type-arg]
        """Take the marks away."""
        if self._marks:
            self._marks.remove()
        return {}

    def on_start(self, message: dict) -> dict:  # type: ignore[type-arg]
        """Start the job's Python beside this, `count` times; `each` has the answers of several."""
        for worker in self._workers:
            worker.kill()
        env = {**os.environ, **message["env"]}
        if message["interface"]:
            # As the supervisor does: what a login sets does not count, what the spec sets does.
            env["GLOO_SOCKET_IFNAME"] = message["env"].get("GLOO_SOCKET_IFNAME", message["interface"])
            env["NCCL_SOCKET_IFNAME"] = message["env"].get("NCCL_SOCKET_IFNAME", "=" + message["interface"])
        for name in message.get("unset", ()):
            env.pop(name, None)
        argv = [message["python"], "-c", message["text"], json.dumps(message.get("hidden", []))]
        count = message.get("count", 1)
        self._workers = tuple(child.Child(argv, env) for _ in range(count))
        return self._asked([{}] * count, message["limit_s"])

    def on_round(self, message: dict) -> dict:  # type: ignore[type-arg]
        """Ask each Python something."""
        return self._asked(message["asks"], message["limit_s"])

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


def main() -> int:
    """Serve one link; the exit status."""
    link = frames.FdLink(0, 1, IDLE_LIMIT_S)
    probe = Probe()
    try:
        while True:
            message = link.receive_json()
            if message is None or message["op"] == "quit":
                return 0
            answer = getattr(probe, "on_" + message["op"])(message)
            link.send_json({**answer, "op": message["op"]})
    except (OSError, frames.BrokenFrame):
        return 1
    finally:
        probe.close()
