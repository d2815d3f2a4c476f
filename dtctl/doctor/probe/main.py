"""Answers the doctor's questions until it has no more. Stdlib only, Python 3.8."""

from __future__ import annotations

import time

from dtctl.doctor.probe import child, facts, pairs, quality
from dtctl.supervisor import frames

IDLE_LIMIT_S = 60.0
"""Silence after which the doctor is taken for gone; then this process ends, and all it had opened with it."""


def main() -> int:
    """Serve one link; the exit status."""
    link = frames.FdLink(0, 1, IDLE_LIMIT_S)
    ears = worker = None
    try:
        while True:
            message = link.receive_json()
            if message is None or message["op"] == "quit":
                return 0
            op = message["op"]
            if op == "time":
                link.send_json({"op": "time", "time": time.time()})
            elif op == "facts":
                link.send_json(facts.gather(message))
            elif op == "listen":
                ears = ears or pairs.Ears(message["name"], message["token"])
                link.send_json({"op": "listening", "ports": [ears.open(port) for port in message["ports"]]})
            elif op == "call":
                said = pairs.call_all(message["targets"], message["token"], message["timeout_s"])
                link.send_json({"op": "called", "answers": said})
            elif op == "measure":
                found = quality.measure(message["address"], message["port"], message["token"], message["seconds"])
                link.send_json({"op": "measured", **found})
            elif op == "start":
                if worker is not None:
                    worker.kill()
                env = dict(message["env"])
                for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if message["interface"] else ():
                    env.setdefault(name, ("=" if name.startswith("NCCL") else "") + message["interface"])
                worker = child.Child([message["python"], "-c", message["text"]], env)
                link.send_json({"op": "started", **worker.ask({}, message["limit_s"])})
            elif op == "round" and worker is not None:
                link.send_json({"op": "rounded", **worker.ask(message["ask"], message["limit_s"])})
    except (OSError, frames.BrokenFrame):
        return 1
    finally:
        if worker is not None:
            worker.kill()
