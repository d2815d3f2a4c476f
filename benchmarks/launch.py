"""How long it takes to run a command on many nodes, and to bring code to them, beside other launchers.

    python benchmarks/launch.py            everything; some minutes on an idle machine
    python benchmarks/launch.py --quick    fewer repetitions, smaller clusters

All programs run as fresh processes against the same virtual hosts (dtctl's sandbox) in turn, A B C A B C, so that a
slow moment of the machine hits all of them alike. The key exchange is curve25519 for everybody: OpenSSH's own choice
costs twice as much and would flatter us. Peers live in a virtual environment of their own. Refuses to measure on a
machine that is busy with something else. Results are kept in benchmarks/results/ as JSON, and drawn.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from machine import keep, measure_command, wait_for_quiet

HERE = Path(__file__).resolve().parent
PEERS = HERE / ".venv-peers"

BARE = """\
import sys, threading
import paramiko
identity, user, *hosts = sys.argv[1:]
key = paramiko.Ed25519Key.from_private_key_file(identity)
def run(host):
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
    client.connect(host, username=user, pkey=key, allow_agent=False, look_for_keys=False)
    _, out, _ = client.exec_command("true")
    out.channel.recv_exit_status()
    client.close()
threads = [threading.Thread(target=run, args=(host,)) for host in hosts]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
PARALLEL_SSH = """\
import sys
from pssh.clients import ParallelSSHClient
identity, user, *hosts = sys.argv[1:]
client = ParallelSSHClient(hosts, user=user, pkey=identity, pool_size=64)
client.join(client.run_command("true"))
"""
TORCHRUNX = """\
import socket, sys
import torchrunx
def nothing():
    return 0
if __name__ == "__main__":
    config, ours, *hosts = sys.argv[1:]
    socket.getfqdn = lambda name="": ours  # agents call back by it, and the hosts do not know this machine's name
    torchrunx.Launcher(hostnames=hosts, workers_per_host=1, backend=None, ssh_config_file=config).run(nothing)
"""


@dataclass
class Series:
    """The repetitions of one program at one size."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    failed: str | None = None


def measure(argv: list[str], env: dict[str, str] | None, cwd: Path, limit_s: float) -> tuple[float, float, str | None]:
    """Wall and CPU seconds of one fresh process, and why it failed, if it did."""
    try:
        done = measure_command(argv, env=env, cwd=cwd, limit_s=limit_s)
    except subprocess.TimeoutExpired:
        return limit_s, 0.0, f"not within {limit_s:g} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:200]
        return done.wall_s, done.cpu_s, last
    return done.wall_s, done.cpu_s, None


class Bench:
    """One sandbox and the programs that are measured on it."""

    def __init__(self, nodes: int, folder: Path) -> None:
        from dtctl.sandbox import control

        # As an installed package is; an editable one would be compiled at every start where nothing may be written.
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(HERE.parent / "dtctl")], check=True)
        self.folder = folder
        self.sandbox = control.start_sandbox("bench", nodes=nodes)
        self.hosts = [node.address for node in self.sandbox.nodes]
        self.identity, self.user = str(self.sandbox.identity_file), self.sandbox.user
        self.config = folder / "ssh_config"
        self.config.write_text(
            "Host *\n  KexAlgorithms curve25519-sha256\n  BatchMode yes\n  StrictHostKeyChecking yes\n"
            f"  User {self.user}\n  IdentityFile {self.identity}\n  UserKnownHostsFile {self.sandbox.known_hosts}\n"
            "  LogLevel ERROR\n"
        )
        self.env = {
            **os.environ,
            "DTCTL_SANDBOX": "bench",
            "PDSH_SSH_ARGS_APPEND": f"-F {self.config}",
            "NO_COLOR": "1",
        }

    def close(self) -> None:
        """Take the sandbox down."""
        from dtctl.sandbox import control

        control.remove_sandbox("bench")

    def program(self, name: str, nodes: int) -> list[str] | None:
        """The argv of a launcher that runs `true` on the first `nodes` hosts; None when it is not installed."""
        hosts = self.hosts[:nodes]
        peer = str(PEERS / "bin" / "python")
        if name == "bare paramiko":
            return [sys.executable, "-c", BARE, self.identity, self.user, *hosts]
        if name == "dtctl":
            entries = ", ".join(f"{{name: n{i}, address: {host}}}" for i, host in enumerate(hosts))
            spec = (
                f"cluster: {{transport: ssh, nodes: [{entries}], user: {self.user}, identity_file: {self.identity}, "
                f"known_hosts: {self.sandbox.known_hosts}, python: {sys.executable}}}\njob: {{command: 'true'}}\n"
            )
            path = self.folder / f"nodes-{nodes}" / "dtctl.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(spec)
            return [str(Path(sys.executable).parent / "dtctl"), "launch", "--no-doctor", str(path)]
        if name == "pdsh":
            return ["pdsh", "-R", "ssh", "-f", "1024", "-w", ",".join(hosts), "true"] if shutil.which("pdsh") else None
        if name == "clush":
            options = f"-F {self.config}"
            return (
                ["clush", "-f", "64", "-o", options, "-w", ",".join(hosts), "true"] if shutil.which("clush") else None
            )
        if not Path(peer).exists():
            return None
        if name == "parallel-ssh":
            return [peer, "-c", PARALLEL_SSH, self.identity, self.user, *hosts]
        if name == "torchrunx":
            script = self.folder / "torchrunx_true.py"
            script.write_text(TORCHRUNX)
            return [peer, str(script), str(self.config), self.sandbox.bridge_address.split("/")[0], *hosts]
        hostfile = self.folder / f"hostfile-{nodes}"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
        return [
            str(PEERS / "bin" / "deepspeed"), "--hostfile", str(hostfile), "--no_python", "--no_local_rank",
            "--master_addr", hosts[0], "--launcher", "pdsh", "--force_multi", "/bin/true",
        ]  # fmt: skip

    def run(self, name: str, nodes: int, series: Series, limit_s: float = 120.0) -> None:
        """One repetition."""
        argv = self.program(name, nodes)
        if argv is None:
            series.failed = "not installed"
            return
        env = self.env
        if name == "deepspeed":  # it asks every host for its name first, with an ssh that takes no options from us
            shim = self.folder / "bin" / "ssh"
            shim.parent.mkdir(exist_ok=True)
            shim.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n')
            shim.chmod(0o755)
            env = {**env, "DS_ACCELERATOR": "cpu", "PATH": f"{shim.parent}:{PEERS / 'bin'}:{env['PATH']}"}
        wall, cpu, failed = measure(argv, env, self.folder, limit_s)
        if failed:
            series.failed = failed
            return
        series.wall_s.append(wall)
        series.cpu_s.append(cpu)


def latency(bench: Bench, names: list[str], nodes: int, repetitions: int) -> dict[str, Series]:
    """All programs in turn, after one repetition that does not count."""
    found = {name: Series() for name in names}
    for repetition in range(repetitions + 1):
        wait_for_quiet()
        for name in names:
            series = Series() if repetition == 0 else found[name]
            bench.run(name, nodes, series)
            if repetition == 0 and series.failed:
                found[name].failed = series.failed
        names = [name for name in names if not found[name].failed]
    return found


def make_tree(folder: Path, files: int, total_bytes: int) -> None:
    """A tree of source-like text with some binary files; the same every time."""
    import random
    import sysconfig

    random.seed(1)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    size = total_bytes // files
    for index in range(files):
        path = folder / f"pkg{index % 50:02d}" / f"sub{index % 7}" / f"mod{index}.{'bin' if index % 10 == 0 else 'py'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        start = random.randrange(len(text) - size)
        path.write_bytes(random.randbytes(size) if index % 10 == 0 else text[start : start + size])


def push(bench: Bench, nodes: int, repetitions: int) -> dict[str, Series]:
    """A tree of 5,000 files, 50 MB to all nodes: fresh and unchanged, by dtctl and by one rsync a node in parallel."""
    found = {name: Series() for name in ("dtctl fresh", "rsync fresh", "dtctl unchanged", "rsync unchanged")}
    tree = bench.folder / "tree"
    tree.mkdir()
    make_tree(tree, 5_000, 50_000_000)
    argv = bench.program("dtctl", nodes)
    if argv is None:
        return found
    spec = Path(argv[-1]).read_text()
    (tree / "dtctl.yaml").write_text(spec)
    dtctl = [*argv[:-1], str(tree / "dtctl.yaml")]
    script = bench.folder / "rsync.sh"
    lines = [
        f"rsync -a --delete --exclude .dtctl -e 'ssh -F {bench.config}' {tree}/ {host}:rsynced/ &"
        for host in bench.hosts[:nodes]
    ]
    script.write_text("\n".join([*lines, "wait"]) + "\n")
    for _ in range(repetitions):
        for host in bench.sandbox.nodes[:nodes]:
            for folder in ("rsynced", ".dtctl/node/code"):
                shutil.rmtree(bench.sandbox.state / "hosts" / host.name / "home" / folder, ignore_errors=True)
        shutil.rmtree(tree / ".dtctl", ignore_errors=True)
        for state in ("fresh", "unchanged"):
            os.sync()  # what the last one has left for the kernel to write is not this one's work
            wait_for_quiet()
            for name, command in ((f"dtctl {state}", dtctl), (f"rsync {state}", ["bash", str(script)])):
                wall, cpu, failed = measure(command, bench.env, bench.folder, 300)
                if failed:
                    found[name].failed = failed
                else:
                    found[name].wall_s.append(wall)
                    found[name].cpu_s.append(cpu)
    return found


def help_time(repetitions: int) -> Series:
    """`dtctl --help`."""
    series = Series()
    for _ in range(repetitions):
        wall, cpu, series.failed = measure([str(Path(sys.executable).parent / "dtctl"), "--help"], None, HERE, 10)
        series.wall_s.append(wall)
        series.cpu_s.append(cpu)
    return series


def summary(series: Series) -> dict[str, object]:
    """Median and range."""
    if not series.wall_s:
        return {"failed": series.failed}
    return {
        "median_s": round(statistics.median(series.wall_s), 4),
        "min_s": round(min(series.wall_s), 4),
        "max_s": round(max(series.wall_s), 4),
        "client_cpu_s": round(statistics.median(series.cpu_s), 4),
        "repetitions": len(series.wall_s),
    }


def table(title: str, rows: dict[str, Series], against: str) -> None:
    """Medians, and the ratio to one of them."""
    print(f"\n{title}\n{'':16} {'median s':>9} {'min':>7} {'max':>7} {'CPU s':>7} {'ratio':>6}")
    floor = statistics.median(rows[against].wall_s) if rows[against].wall_s else float("nan")
    for name, series in rows.items():
        if not series.wall_s:
            print(f"{name:16} {series.failed}")
            continue
        middle = statistics.median(series.wall_s)
        cpu = statistics.median(series.cpu_s)
        low, high = min(series.wall_s), max(series.wall_s)
        print(f"{name:16} {middle:9.3f} {low:7.3f} {high:7.3f} {cpu:7.3f} {middle / floor:6.2f}")


def versions() -> dict[str, str]:
    """What was measured, where."""
    freeze = [str(PEERS / "bin" / "python"), "-m", "pip", "list", "--format", "freeze"]
    listed = subprocess.run(freeze, capture_output=True, text=True, check=False).stdout if PEERS.exists() else ""
    wanted = ("torchrunx", "deepspeed", "parallel-ssh", "torch=")
    found = {line.split("==")[0]: line.split("==")[1] for line in listed.splitlines() if line.startswith(wanted)}
    for tool, flag in (("pdsh", "-V"), ("clush", "--version"), ("ssh", "-V"), ("rsync", "--version")):
        if shutil.which(tool):
            done = subprocess.run([tool, flag], capture_output=True, text=True, check=False)
            found[tool] = (done.stdout or done.stderr).splitlines()[0]
    return {**found, "python": platform.python_version(), "kernel": platform.release(), "cores": str(os.cpu_count())}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--skip-heavy", action="store_true", help="leave out torchrunx and deepspeed, which take minutes"
    )
    options = parser.parse_args()
    repetitions = 3 if options.quick else 9
    light = ["bare paramiko", "dtctl", "pdsh", "clush", "parallel-ssh"]
    heavy = [] if options.skip_heavy else ["bare paramiko", "dtctl", "torchrunx", "deepspeed"]
    growth = (1, 4, 16) if options.quick else (1, 2, 4, 8, 16, 32, 64)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the sandbox is taken down then, too
    wait_for_quiet()
    kept: dict[str, object] = {"date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions()}
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".dtctl-bench-") as temporary:
        bench = Bench(max(growth), Path(temporary))
        try:
            rows = latency(bench, light, 16, repetitions)
            table("`true` on 16 nodes", rows, "bare paramiko")
            kept["true on 16 nodes"] = {name: summary(series) for name, series in rows.items()}
            if heavy:
                rows = latency(bench, heavy, 8, 3)
                table("`true` on 8 nodes", rows, "dtctl")
                kept["true on 8 nodes"] = {name: summary(series) for name, series in rows.items()}
            by_size = {}
            for nodes in growth:
                by_size[nodes] = latency(bench, ["bare paramiko", "dtctl"], nodes, 3 if options.quick else 5)
                table(f"`true` on {nodes} nodes", by_size[nodes], "bare paramiko")
            kept["growth"] = {n: {k: summary(s) for k, s in rows.items()} for n, rows in by_size.items()}
            first, last = growth[0], growth[-1]
            cpu = {n: statistics.median(by_size[n]["dtctl"].cpu_s) for n in (first, last)}
            kept["client CPU ms per node"] = round(1000 * (cpu[last] - cpu[first]) / (last - first), 2)
            print(f"\nclient CPU per node: {kept['client CPU ms per node']} ms")
            for nodes in (4,) if options.quick else (4, 16):
                rows = push(bench, nodes, 3)
                shutil.rmtree(bench.folder / "tree")
                table(f"5,000 files, 50 MB to {nodes} nodes", rows, "rsync fresh")
                kept[f"push to {nodes} nodes"] = {name: summary(series) for name, series in rows.items()}
            series = help_time(9)
            kept["dtctl --help"] = summary(series)
            print(f"\ndtctl --help: {statistics.median(series.wall_s):.3f} s")
        finally:
            bench.close()
    keep("launch", kept)


if __name__ == "__main__":
    main()
