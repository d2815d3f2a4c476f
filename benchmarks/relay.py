"""How long it takes to bring 16 MB to many nodes over a slow link, and how much of it leaves the control machine.

    python benchmarks/relay.py            1 and 32 virtual hosts, and 1 to 4 on a fast link
    python benchmarks/relay.py --hosts 8  a smaller cluster

The control machine's link is limited to 10 Mbit/s, those between nodes are not; node folders are on tmpfs. Bytes are
counted at the control machine's interface, whatever they are. The time is from the first node that is pushed to until
the last one has everything. Figures are kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from machine import keep, measure_command, wait_for_quiet

SIZE = 16_000_000
RATE = "10mbit"


class Bench:
    """A sandbox and a project with 16 MB that do not shrink."""

    def __init__(self, hosts: int, folder: Path) -> None:
        from dtctl.sandbox import control, faults

        self.folder = folder
        self.sandbox = control.up("relay", nodes=hosts)
        for node in self.sandbox.nodes:
            faults.fill_disk(self.sandbox, node, path=".dtctl", size="400m")

    def close(self) -> None:
        """Take the sandbox down."""
        from dtctl.sandbox import control

        control.down("relay")

    def limit(self, rate: str) -> None:
        """Limit what leaves the control machine; empty: no longer."""
        from dtctl.sandbox import faults

        place = ["dev", self.sandbox.bridge, "root"]
        if rate:
            shape = ["tbf", "rate", rate, "burst", "65536", "latency", "100ms"]
            faults.in_network(self.sandbox, None, ["tc", "qdisc", "replace", *place, *shape])
        else:
            faults.in_network(self.sandbox, None, ["tc", "qdisc", "del", *place])

    def sent_bytes(self) -> int:
        """Return the bytes that have left the control machine for the hosts."""
        return int(Path(f"/sys/class/net/{self.sandbox.bridge}/statistics/tx_bytes").read_text())

    def push(self, hosts: int, *, change: str) -> dict[str, object]:
        """Launch a job that does nothing on so many hosts.

        Args:
            hosts: how many.
            change: all, one block, or nothing, since the last push.
        """
        path = self.folder / "weights.bin"
        if change == "all":
            path.write_bytes(os.urandom(SIZE))
        elif change == "block":
            with path.open("r+b") as file:
                file.seek(5_000_000)
                file.write(os.urandom(64))
        cluster = f"cluster: {{transport: sandbox, nodes: {hosts}, slots: 1}}"
        spec = f"{cluster}\njob: {{name: relay, command: ['true']}}\n"
        (self.folder / "dtctl.yaml").write_text(spec)
        before = self.sent_bytes()
        done = measure_command(
            [sys.executable, "-m", "dtctl", "launch", "--json"],
            env={**os.environ, "DTCTL_SANDBOX": "relay", "NO_COLOR": "1"},
            cwd=self.folder,
            limit_s=900,
        )
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


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--busy", action="store_true", help="measure although the machine does something else")
    options = parser.parse_args()
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
