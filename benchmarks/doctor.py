"""How long `dtctl doctor` takes: on virtual hosts, and with simulated probes of 16 to 256 nodes.

    python benchmarks/doctor.py [--only hosts|simulated|soak] [--nodes 16] [--into FILE]

`hosts` examines real virtual hosts, all on this machine: the connections alone, the quick examination, and the full
one without torch (every ordered pair, and the measurements in rounds). `simulated` runs the doctor's own half against
probes that answer as real ones do, after the time that real ones take: what it costs where each node is a machine.
`soak` examines a healthy cluster of 3 hosts 50 times, and counts the times that anything was found; with --torch it
lets their torch add up numbers too. Parts that were measured apart are put into one file with --into.
"""

# ruff: noqa: ARG002, D102 - the protocols of dtctl/transport/base.py say what these methods are

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine

from dtctl.doctor.checks import links, network
from dtctl.doctor.examine import DATA_PORTS, MEASURE_S
from dtctl.doctor.node_probes import NodeProbes, NodeQuery
from dtctl.launch.cluster import resolve_cluster
from dtctl.sandbox import control
from dtctl.spec.load import parse_spec
from dtctl.supervisor import frames
from dtctl.supervisor.probe import pairs, quality
from dtctl.transport.base import Target

CALL_S = 0.002
"""A call between real nodes: a round trip or two, and 256 KiB at 1 Gbit/s."""
LINK_S = 0.0002
RUNS = 3
SOAK_RUNS = 50


class SimulatedStream:
    """A node's probe: takes questions, and answers each after the time that a real one needs."""

    def __init__(self, index: int, count: int) -> None:
        self._index, self._count = index, count
        self._parser = frames.FrameParser()
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._opening = True

    def write(self, data: bytes) -> None:
        if self._opening:  # the probe's own source
            self._opening = False
            return
        for _, _, payload in self._parser.feed(data):
            message = frames.decode_message(payload)
            if message["op"] == "quit":
                self._answers.put(b"")
                continue
            answer, after_s = self._answer(message)
            packed = frames.pack_json({**answer, "op": message["op"]})
            threading.Timer(after_s + LINK_S, self._answers.put, [packed]).start()

    def _answer(self, message: dict[str, Any]) -> tuple[dict[str, Any], float]:
        op = message["op"]
        if op == "time":
            return {"time": time.time()}, 0.0
        if op == "facts":
            facts = {
                "interfaces": [{"name": "eth0", "mtu": 1500}],
                "addresses": [address(self._index)],
                "looked_up": {},
            }
            return {**facts, "hostname": f"n{self._index}", "ways": {}}, 0.1
        if op == "listen":
            return {"ports": [port or 40_000 + i for i, port in enumerate(message["ports"])]}, 0.0
        if op == "call":
            seen = {
                "result": "ok",
                "took_ms": 0.2,
                "seen": address(self._index),
                "own": address(self._index),
            }
            answers = [{"node": node, "port": port, "kind": kind, **seen} for node, _, port, kind in message["targets"]]
            return {"answers": answers}, CALL_S * (1 + len(answers) // pairs.PARALLEL)
        took = quality.WARM_S + message["seconds"] + (quality.PINGS + quality.BURSTS) * LINK_S + 0.025
        good = {"rtt_ms": [0.1, 0.1], "sent": 500, "lost": 0, "mbit_s": 9400.0, "retransmitted": 0, "segments": 9}
        return good, took

    def read(self, size: int) -> bytes:
        return self._answers.get()

    def read_stderr(self) -> bytes:
        return b""

    def close_stdin(self) -> None:
        return

    def exit_status(self, timeout_s: float) -> int | None:
        return 0

    def close(self) -> None:
        self._answers.put(b"")


def address(index: int) -> str:
    """A node's address."""
    return f"10.0.{index // 250}.{1 + index % 250}"


class SimulatedNode:
    """A connection to a simulated probe."""

    def __init__(self, target: Target, count: int) -> None:
        self.target = target
        self._index, self._count = int(target.name[1:]), count

    def peer_address(self) -> str:
        return self.target.address

    def open(self, command: str) -> SimulatedStream:
        return SimulatedStream(self._index, self._count)

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        return


class Simulation:
    """A transport to simulated nodes."""

    def __init__(self, count: int) -> None:
        self._count = count

    def connect(self, target: Target) -> SimulatedNode:
        return SimulatedNode(target, self._count)


def simulated(count: int) -> dict[str, float]:
    """Seconds of the quick and the full examination of so many simulated nodes, their checks included."""
    wanted = [
        NodeQuery(target=Target(name=f"n{i}", address=address(i)), python=None, workdir="~/.dtctl")
        for i in range(count)
    ]
    found = {}
    for name, measure_s, ports in (("quick", 0.0, 1), ("full", MEASURE_S, DATA_PORTS)):
        begun, cpu = time.monotonic(), time.process_time()
        probes = NodeProbes(wanted, Simulation(count), progress=lambda _: None)  # type: ignore[arg-type]
        seen = probes.look(rendezvous=(29500,), data_ports=ports, measure_s=measure_s)
        bad = [
            *network.check_node_addresses(seen),
            *network.check_node_pairs(seen, rendezvous=(29500,), fixed=True),
            *links.check_links(seen),
        ]
        assert not bad, bad[0]
        assert all(node.error is None for node in seen)
        probes.close()
        found[name] = round(time.monotonic() - begun, 3)
        found[f"{name}_cpu"] = round(time.process_time() - cpu, 3)
        found[f"{name}_s_per_node"] = round(found[name] / count, 4)
    return found


def timed(act: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


def hosts(count: int, act: Callable[[int, Path], dict[str, Any]]) -> dict[str, Any]:
    """Do something with so many virtual hosts."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        os.environ["DTCTL_SANDBOX_DIR"] = folder
        os.environ["DTCTL_SANDBOX"] = "bench"
        control.start_sandbox("bench", nodes=count)
        try:
            return act(count, Path(folder))
        finally:
            control.remove_sandbox("bench")


def write_spec(count: int, folder: Path) -> str:
    """A spec of these hosts; its text."""
    names = ", ".join(f"node{i + 1}" for i in range(count))
    cluster = f"{{transport: sandbox, nodes: [{names}], slots: 1, python: {sys.executable}}}"
    text = f"cluster: {cluster}\njob: {{name: t, script: train.py}}\n"
    (folder / "dtctl.yaml").write_text(text)
    return text


def examined(folder: Path, *options: str) -> tuple[float, list[str]]:
    """Seconds that one run of the doctor took, and what it has found."""
    argv = [sys.executable, "-m", "dtctl", "doctor", "--json", *options]
    said = json.loads(subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False).stdout)
    return float(said["took_s"]), [one["summary"] for one in said["findings"] if one["status"] in ("fail", "warn")]


def soak(count: int, folder: Path, *, runs: int, torch: bool) -> dict[str, Any]:
    """A healthy cluster, again and again."""
    write_spec(count, folder)
    ended = []
    for number in range(1, runs + 1):
        ended.append(examined(folder, *(() if torch else ("--skip", "collective"))))
        print(f"run {number}: {ended[-1][0]:.1f} s, {ended[-1][1] or 'nothing found'}", flush=True)
    return {
        "nodes": count,
        "runs": runs,
        "clean": sum(not texts for _, texts in ended),
        "median_s": statistics.median(t for t, _ in ended),
        "longest_s": max(t for t, _ in ended),
        "load_average": round(os.getloadavg()[1], 1),
        "found": [text for _, texts in ended for text in texts],
    }


def speed(count: int, folder: Path) -> dict[str, Any]:
    """The doctor on healthy hosts: medians of several runs, in seconds."""
    text = write_spec(count, folder)
    spec = parse_spec(text, source="dtctl.yaml", base_dir=folder)
    cluster = resolve_cluster(spec, start=True)

    def connect() -> None:
        transport = cluster.make_transport()
        with ThreadPoolExecutor(count) as pool:
            for connection in list(pool.map(transport.connect, cluster.targets.values())):
                connection.close()

    def doctor(*options: str) -> float:
        took_s, bad = examined(folder, *options)
        assert not bad, bad
        return took_s

    found: dict[str, list[float]] = {"connections": [], "quick": [], "full without torch": []}
    for _ in range(RUNS):
        found["connections"].append(timed(connect))
        found["quick"].append(doctor("--quick"))
    found["full without torch"].append(doctor("--skip", "collective"))
    medians = {name: round(statistics.median(values), 2) for name, values in found.items()}
    medians["quick beyond connections"] = round(medians["quick"] - medians["connections"], 2)
    return {"nodes": count, "pairs": count * (count - 1), "seconds": medians, "all": found}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["hosts", "simulated", "soak"])
    parser.add_argument("--nodes", type=int, default=16, help="of `hosts`")
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 64, 256], help="of `simulated`")
    parser.add_argument("--runs", type=int, default=SOAK_RUNS, help="of `soak`")
    parser.add_argument("--torch", action="store_true", help="`soak` with sums over all nodes")
    parser.add_argument("--into", type=Path, help="put the figures into this kept file")
    asked = parser.parse_args()
    versions = {"python": platform.python_version(), "cores": os.cpu_count()}
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions}
    if asked.only in (None, "hosts"):
        figures["hosts"] = hosts(asked.nodes, speed)
        print(json.dumps(figures["hosts"], indent=1))
    if asked.only == "soak":
        kind = "with torch" if asked.torch else "without torch"
        done = hosts(3, functools.partial(soak, runs=asked.runs, torch=asked.torch))
        figures["soak"] = {kind: done}
        print(json.dumps(done, indent=1))
    if asked.only in (None, "simulated"):
        figures["simulated"] = {}
        for count in asked.counts:
            figures["simulated"][str(count)] = simulated(count)
            print(f"{count} simulated nodes: {figures['simulated'][str(count)]}", flush=True)
    machine.keep(f"doctor-{asked.only or 'all'}", figures, asked.into)


if __name__ == "__main__":
    main()
