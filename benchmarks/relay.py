"""How long it takes to bring 16 MB to many nodes over a slow link, and how much of it leaves the control machine.

    python benchmarks/relay.py            1 and 32 virtual hosts, and 1 to 4 on a fast link
    python benchmarks/relay.py --hosts 8  a smaller cluster
    python benchmarks/relay.py --kills 20 pushes to 8 hosts, of which one to three are killed at a random moment

The control machine's link is limited to 10 Mbit/s, those between nodes are not; node folders are on tmpfs. Bytes are
counted at the control machine's interface, whatever they are. The time is from the first node that is pushed to until
the last one has everything. Figures are kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import keep, measure_command, wait_for_quiet

SIZE = 16_000_000
RATE = "10mbit"
HOST_RATE = "40mbit"
"""Limit of each host's link while hosts are killed, so that a push takes long enough to be hit in the middle."""
KILLED_HOSTS = 8


LAUNCH = [sys.executable, "-m", "dtctl", "launch", "--json"]


class Bench:
    """A sandbox and a project with 16 MB that do not shrink."""

    def __init__(self, hosts: int, folder: Path) -> None:
        from dtctl.sandbox import control, faults

        self.folder = folder
        self.sandbox = control.start_sandbox("relay", nodes=hosts)
        for node in self.sandbox.nodes:
            faults.fill_disk(self.sandbox, node, path=".dtctl", size="400m")

    def close(self) -> None:
        """Take the sandbox down."""
        from dtctl.sandbox import control

        control.remove_sandbox("relay")

    def limit(self, rate: str) -> None:
        """Limit what leaves the control machine; empty: no longer."""
        from dtctl.sandbox import faults

        place = ["dev", self.sandbox.bridge, "root"]
        if rate:
            shape = ["tbf", "rate", rate, "burst", "65536", "latency", "100ms"]
            faults.run_in_network(self.sandbox, None, ["tc", "qdisc", "replace", *place, *shape])
        else:
            faults.run_in_network(self.sandbox, None, ["tc", "qdisc", "del", *place])

    def sent_bytes(self) -> int:
        """Return the bytes that have left the control machine for the hosts."""
        return int(Path(f"/sys/class/net/{self.sandbox.bridge}/statistics/tx_bytes").read_text())

    def push(self, hosts: int, *, change: str) -> dict[str, object]:
        """Launch a job that does nothing on so many hosts.

        Args:
            hosts: how many.
            change: all, one block, or nothing, since the last push.
        """
        path = self.write_project(hosts)
        if change == "all":
            path.write_bytes(os.urandom(SIZE))
        elif change == "block":
            with path.open("r+b") as file:
                file.seek(5_000_000)
                file.write(os.urandom(64))
        before = self.sent_bytes()
        done = measure_command(LAUNCH, env=self.env, cwd=self.folder, limit_s=900)
        sent = self.sent_bytes() - before
        if done.returncode:
            raise SystemExit(f"{hosts} hosts: {done.stderr[-2000:]}{done.stdout[-2000:]}")
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        times = {
            state: [event["time"] for event in events if event.get("state") == state] for state in ("pushing", "pushed")
        }
        figures: dict[str, object] = {
            "hosts": hosts,
            "change": change,
            "push_s": round(max(times["pushed"]) - min(times["pushing"]), 2),
            "wall_s": round(done.wall_s, 2),
            "sent_bytes": sent,
            "sent_per_byte": round(sent / SIZE, 3),
            "notes": [event["text"] for event in events if event["event"] == "note"],
        }
        print(figures, flush=True)
        return figures

    @property
    def env(self) -> dict[str, str]:
        """Return the variables of a launch."""
        return {**os.environ, "DTCTL_SANDBOX": "relay", "NO_COLOR": "1"}

    def write_project(self, hosts: int) -> Path:
        """Write the spec of a job on so many hosts; return the path of the large file."""
        cluster = f"cluster: {{transport: sandbox, nodes: {hosts}, slots: 1}}"
        (self.folder / "dtctl.yaml").write_text(f"{cluster}\njob: {{name: relay, command: ['true']}}\n")
        return self.folder / "weights.bin"

    def kill_during_push(self, seed: int) -> dict[str, object]:
        """Kill dtctl's program on one to three hosts at a random moment of a push, and look at what the others have.

        The push is right if every host that was not killed has all files with the right contents, no host has others,
        no other host is reported as failed, and a launch after it succeeds on all hosts.
        """
        from dtctl.sandbox import control

        chance = random.Random(seed)
        nodes = self.sandbox.nodes
        for node in nodes:  # earlier runs would fill the small disks
            for runs in Path(f"/proc/{node.pid}/root{self.sandbox.home}/.dtctl").glob("*/runs"):
                shutil.rmtree(runs)
        path = self.write_project(len(nodes))
        path.write_bytes(os.urandom(SIZE))
        expected = hashlib.sha256(path.read_bytes()).hexdigest()
        killed = chance.sample(nodes, chance.randint(1, 3))
        after_bytes = chance.randint(3_000_000, SIZE)
        before = self.sent_bytes()
        with open(self.folder.parent / f"{self.folder.name}.out", "w+") as out:
            process = subprocess.Popen(LAUNCH, env=self.env, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT)
            while self.sent_bytes() - before < after_bytes and process.poll() is None:
                time.sleep(0.01)
            is_in_time = process.poll() is None
            for node in killed:
                for pid, line in control.list_host_processes(node).items():
                    if pid != node.pid and line and "sshd" not in line:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            process.wait(600)
            out.seek(0)
            events = [json.loads(line) for line in out if line.startswith("{")]
        Path(out.name).unlink()
        names = {node.name for node in killed}
        failed = {event["node"]: event.get("error") for event in events if event.get("state") in ("failed", "lost")}
        complete = self.list_complete_hosts(events, expected)
        again = measure_command(LAUNCH, env=self.env, cwd=self.folder, limit_s=900)
        later = [json.loads(line) for line in again.stdout.splitlines() if line.startswith("{")]
        every = {node.name for node in nodes}
        figures: dict[str, object] = {
            "seed": seed,
            "killed": sorted(names),
            "after_bytes": after_bytes,
            "is_in_time": is_in_time,
            "is_right": complete >= every - names
            and failed.keys() <= names
            and again.returncode == 0
            and self.list_complete_hosts(later, expected) == every,
            "failed": failed,
            "notes": [event["text"] for event in events if event["event"] == "note"],
        }
        print(figures, flush=True)
        return figures

    def list_complete_hosts(self, events: list[dict[str, Any]], expected: str) -> set[str]:
        """Return the hosts to which a launch has brought the large file.

        Raises:
            SystemExit: one of them has other contents, which must not happen.
        """
        hosts = set()
        for event in events:
            if event.get("state") == "pushed":
                node = self.sandbox.node(event["node"])
                path = Path(f"/proc/{node.pid}/root{event['push']['path']}/weights.bin")
                if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                    raise SystemExit(f"{node.name} has wrong contents in {path}")
                hosts.add(node.name)
        return hosts


def measure_kills(count: int) -> None:
    """Kill hosts during pushes, and keep how many pushes were right."""
    from dtctl.sandbox import faults

    folder = Path(tempfile.mkdtemp(prefix="dtctl-relay-"))
    bench = Bench(KILLED_HOSTS, folder)
    try:
        for node in bench.sandbox.nodes:
            faults.limit_bandwidth(bench.sandbox, node, rate=HOST_RATE)
        rows = [bench.kill_during_push(seed) for seed in range(count)]
    finally:
        bench.close()
        shutil.rmtree(folder)
    right = sum(bool(row["is_right"]) for row in rows)
    keep("relay-kills", {"hosts": KILLED_HOSTS, "size_bytes": SIZE, "right": right, "of": count, "pushes": rows})


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument(
        "--kills", type=int, default=0, metavar="N", help="kill hosts during N pushes, and nothing else"
    )
    parser.add_argument("--busy", action="store_true", help="measure although the machine does something else")
    options = parser.parse_args()
    if options.kills:
        measure_kills(options.kills)
        return
    if not options.busy:
        wait_for_quiet()
    folder = Path(tempfile.mkdtemp(prefix="dtctl-relay-"))
    bench = Bench(options.hosts, folder)
    try:
        small = min(4, options.hosts)
        fast = [bench.push(hosts, change="all") for hosts in range(1, small + 1)]
        bench.limit(RATE)
        slow = [bench.push(1, change="all")]
        slow += [bench.push(options.hosts, change=change) for change in ("all", "nothing", "block")]
        figures: dict[str, object] = {"size_bytes": SIZE, "rate": RATE, "fast_link": fast, "limited_link": slow}
        keep("relay", figures)
    finally:
        bench.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
