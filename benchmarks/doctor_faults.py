"""Faults of virtual hosts, and what `dtctl doctor`, torchrun alone, and ping with nc say of each.

    python benchmarks/doctor_faults.py [--only WORDS] [--into FILE]
    python benchmarks/doctor_faults.py --grammar developed|held|harmless|second-developed|second-held|third|odd
        [--only WORDS] [--into FILE] [--again N]

With --grammar the faults are those of tests/fault/grammar, each on three fresh hosts, and only the doctor is asked:
right is the expected check as the primary one, the node or pair, and a usable fix. `held` are those on which it was not
developed.

The faults are those of tests/fault/test_doctor*.py, and the doctor is right where the test of the fault passes: it asks
for the check, the nodes, one primary cause and a fix. While the fault is there, torchrun is started by hand on each of
the three hosts, over SSH, with the job's Python, variables and port, for three all_reduce with gloo and a time-out of
6 s; and the others ping the head node and call its port with nc, where something listens for them. Whoever says
nothing for `LIMIT_S` is ended, and that is the answer. Needs root: this machine is to reach the hosts by SSH. With
--limit-s it stops after so many seconds, and --into goes on with the faults that a file does not have yet.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import machine  # noqa: E402 - it and the tests are no packages

from dtctl.sandbox import control  # noqa: E402
from dtctl.sandbox.layout import Sandbox, SandboxNode  # noqa: E402
from tests.fault import examining, grammar, scoring  # noqa: E402

LAYERS = ("network", "reach", "links", "settings", "torch", "node")
LEFT_OUT = ("quick", "nothing_is_left", "people_see", "nccl_env", "launch", "iperf3", "torch_is_not_asked", "adds_up")
"""Tests of something else than one fault and what is found."""
HALVES = ("developed", "held", "harmless", "second-developed", "second-held", "third", "odd")
WITH_LAUNCH = ("third", "odd")
"""Collections in which a launch on the same hosts shows whether `can train` and its opposite are true."""
LIMIT_S = 22.0
"""torchrun, the processes it starts and their imports of torch included."""
PING_LIMIT_S = 10.0
PORT = 29500
# When a worker fails, torchrun prints its argv, and so this text: what a well job says is not to be found in it.
JOB = """\
import datetime, os, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
data = torch.ones(1 << 20)
for _ in range(3):
    data.fill_(1.0)
    dist.all_reduce(data)
assert (data == dist.get_world_size()).all(), "WRONG SUMS"
print("JOB-IS-" + "FINE", flush=True)
"""


class Hosts:
    """The hosts as their user reaches them: over SSH, as the spec of the test says."""

    def __init__(self, sandbox: Sandbox, spec: Mapping[str, Any]) -> None:
        self.sandbox = sandbox
        cluster, self._job = spec["cluster"], spec.get("job", {})
        self._cluster = cluster
        self._of = {one["name"] if isinstance(one, dict) else one: one for one in cluster["nodes"]}
        port = spec.get("network", {}).get("rendezvous_port")
        self.port = port if isinstance(port, int) else PORT
        self.names = list(self._of)

    def start(self, name: str, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Start something on a host."""
        known = self._cluster.get("known_hosts") or self.sandbox.known_hosts
        user = self._own(name).get("user") or self.sandbox.user
        options = {"UserKnownHostsFile": known, "IdentityFile": self.sandbox.identity_file, "BatchMode": "yes"}
        options |= {"IdentitiesOnly": "yes", "ConnectTimeout": 5, "StrictHostKeyChecking": "yes", "LogLevel": "ERROR"}
        options |= {"GlobalKnownHostsFile": "none", "PreferredAuthentications": "publickey"}
        ssh = ["ssh", "-F", "none", *(f"-o{key}={value}" for key, value in options.items())]
        command = [*ssh, f"{user}@{self.sandbox.node(name).address}", shlex.join(argv)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _own(self, name: str) -> dict[str, Any]:
        one = self._of[name]
        return one if isinstance(one, dict) else {}

    def torchrun(self, name: str) -> list[str]:
        """What somebody types on this host."""
        env = {"OMP_NUM_THREADS": "1", **self._job.get("env", {}), **self._own(name).get("env", {})}
        python = self._own(name).get("python") or self._cluster.get("python") or sys.executable
        head = self.sandbox.node(self.names[0]).address
        return [
            *("env", *(f"{key}={value}" for key, value in env.items()), python, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(self.names)), "--nproc-per-node", "1", "--node-rank", str(self.names.index(name))),
            *("--master-addr", head, "--master-port", str(self.port), "--no-python", python, "-c", JOB),
        ]

    def end(self) -> None:
        """End what was started on the hosts and is still there, and see that it is gone: the tests look, too."""
        deadline = time.monotonic() + 5.0
        while left := [pid for node in self.sandbox.nodes for pid in self._ours(node)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise SystemExit(f"processes {left} cannot be ended")
            time.sleep(0.02)

    def _ours(self, node: SandboxNode) -> list[int]:
        texts = ("torch.distributed.run", "JOB-IS-", "nc -l", "if ping -q")
        return [pid for pid, line in control.list_host_processes(node).items() if any(text in line for text in texts)]


def gather(started: Mapping[str, subprocess.Popen[str]], limit_s: float) -> dict[str, str]:
    """What each prints until it ends or the time is over."""
    deadline = time.monotonic() + limit_s
    said = {}
    for name, process in started.items():
        try:
            said[name] = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said[name] = process.communicate()[0] + f"\n(nothing more within {limit_s:g} s)"
    return said


def torchrun(hosts: Hosts) -> dict[str, Any]:
    """What torchrun alone says."""
    begun = time.monotonic()
    try:
        said = gather({name: hosts.start(name, hosts.torchrun(name)) for name in hosts.names}, LIMIT_S)
    finally:
        hosts.end()
    took_s = round(time.monotonic() - begun, 1)
    if all("JOB-IS-FINE" in text for text in said.values()):
        return {"says": "nothing: the job runs", "took_s": took_s}
    return {"says": "; ".join(f"{name}: {line_of(text)}" for name, text in said.items()), "took_s": took_s}


TELLS = re.compile(
    r"\w+(Error|Exception)\b: |^ssh: |Permission denied|Host key|not found|No such file|Timed out|timed out"
)


def line_of(text: str) -> str:
    """The line of an output that says most."""
    lines = [re.sub(r"^\[\w+\]:", "", line).strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if TELLS.search(line) and "ChildFailedError" not in line]
    quiet = [line for line in lines if line.startswith("(nothing more")]
    best = (found or quiet or (["fine"] if "JOB-IS-FINE" in text else lines[-1:]) or ["nothing"])[0]
    return best[:200]


def ping_and_nc(hosts: Hosts) -> dict[str, Any]:
    """The recipe of most guides: ping the head node, and `nc -zv` its port, while something listens there."""
    begun = time.monotonic()
    head, *others = hosts.names
    address = hosts.sandbox.node(head).address
    listener = hosts.start(head, ["nc", "-lkv", str(hosts.port)])
    try:
        assert listener.stdout is not None
        heard = listener.stdout.readline() if select.select([listener.stdout], [], [], PING_LIMIT_S)[0] else ""
        script = (
            f"if ping -q -c 3 -i 0.2 -W 1 {address} >/dev/null 2>&1; then echo ping ok; else echo ping fails; fi; "
            f"if nc -z -w 3 {address} {hosts.port}; then echo nc ok; else echo nc fails; fi"
        )
        said = gather({name: hosts.start(name, ["sh", "-c", script]) for name in others}, PING_LIMIT_S)
    finally:
        listener.kill()
        listener.communicate()
        hosts.end()
    told = {name: ", ".join(text.strip().splitlines()[:2]) or "nothing" for name, text in said.items()}
    if "Listening" not in heard:
        told = {head: heard.strip() or "nothing", **told}
    right = all(text == "ping ok, nc ok" for text in told.values())
    says = "all is well" if right else "; ".join(f"{name}: {text}" for name, text in told.items())
    return {"says": says, "took_s": round(time.monotonic() - begun, 1)}


def title(item: pytest.Item) -> str:
    """The fault of a test, in words."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    said = item.name.partition("[")[0].removeprefix("test_").replace("_", " ")
    if "what" in params:
        return str(params["what"])
    if "value" in params:
        return f"{params['name']}={params['value']} for all"
    if "reject" in params:
        return f"the rendezvous port is {'rejected' if params['reject'] else 'dropped'}"
    if "port" in params:
        return f"a port of InfiniBand is {'down' if 'state' in params['port'] else 'slower'}"
    return re.sub(r" (is|are) (named|told|found)\b.*| and does not delay.*| run after run| has no finding.*", "", said)


class Table:
    """A plugin of pytest that asks torchrun, ping and nc about the fault of each test."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path = path
        self._deadline = time.monotonic() + limit_s
        self._rows: dict[str, Any] = {}
        self._item: pytest.Item | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is not about one fault, and what is kept already."""
        kept = json.loads(self._path.read_text())["faults"] if self._path.exists() else {}
        items[:] = [
            item for item in items if not any(word in item.name for word in LEFT_OUT) and title(item) not in kept
        ]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Watch a test, and keep what it has shown."""
        self._item = item
        outcome = yield
        row = self._rows.get(title(item))
        if row is not None:
            row["doctor"]["right"] = outcome.excinfo is None
            print(f"\n{title(item)}: {json.dumps(row)}", flush=True)
            versions = {"torch": importlib.metadata.version("torch"), "cores": os.cpu_count()}
            versions |= {"python": platform.python_version()}
            figures = {"date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions, "faults": {title(item): row}}
            machine.keep("doctor-faults", figures, self._path)
        if time.monotonic() > self._deadline:
            item.session.shouldstop = "the time is over"

    def watch(self, said: dict[str, Any]) -> None:
        """Ask the others while the fault is there."""
        item = self._item
        assert item is not None
        name = title(item)
        spec = json.loads((item.funcargs["project"].folder / "dtctl.yaml").read_text())  # type: ignore[attr-defined]
        sandbox = control.find_running_sandbox("main")
        assert sandbox is not None
        hosts = Hosts(sandbox, spec)
        found = [one for one in said["findings"] if one["status"] in ("fail", "warn")]
        nothing = {"status": "ok", "check": "", "nodes": [], "summary": "nothing is wrong", "fix": ""}
        first = found[0] if found else nothing
        also = [f"{one['check']}: {', '.join(one['nodes'])}" for one in found[1:]]
        keys = ("status", "check", "nodes", "summary", "fix")
        self._rows[name] = {
            "layer": item.path.stem.removeprefix("test_doctor").strip("_") or "all",
            "doctor": {**{key: first[key] for key in keys}, "also": also, "took_s": said["took_s"]},
            "torchrun": torchrun(hosts),
            "ping and nc": ping_and_nc(hosts),
        }


def by_grammar(half: str, only: str, path: Path, limit_s: float, again: int) -> None:
    """Examine the faults of one half, or what only looks like faults, and keep each verdict and the sums."""
    of_half = grammar.second_half if half.startswith("second-") else grammar.of_half
    whole = {"harmless": grammar.HARMLESS, "third": grammar.THIRD, "odd": grammar.ODD}
    chosen = list(whole[half]) if half in whole else of_half(held=half.endswith("held"))
    chosen = [fault for fault in chosen if only in fault.name] * again
    deadline = time.monotonic() + limit_s
    rows: dict[str, Any] = {}
    for number, fault in enumerate(chosen):
        if time.monotonic() > deadline:
            break
        load = os.getloadavg()[0]
        try:
            said = scoring.examine(fault, launch=half in WITH_LAUNCH)
        except RuntimeError as exc:  # this machine's kernel lacks what the fault is made with
            print(f"not injected: {fault.name}: {exc}", flush=True)
            continue
        name = fault.name if again == 1 else f"{fault.name} #{number}"
        rows[name] = {"layer": fault.layer, **scoring.score(fault, said), "took_s": said["wall_s"], "load": load}
        if half in WITH_LAUNCH:
            claimed = said.get("can_train", said["ok"])
            rows[name] |= {"claims": claimed, "trains": said["trains"], "launched": said["launched"]}
            rows[name]["claim"] = "open" if claimed is None else "true" if claimed == said["trains"] else "false"
        print(f"{rows[name]['verdict']}: {name}: {rows[name]['first']}; {rows[name].get('claim', '')}", flush=True)
    figures = {"date": time.strftime("%Y-%m-%d %H:%M"), half: {**sums(rows, len(chosen)), "faults": rows}}
    machine.keep("doctor-grammar", figures, path)


def sums(rows: Mapping[str, Mapping[str, Any]], of: int) -> dict[str, Any]:
    """How many there are of each verdict, of how many that could have been examined."""
    verdicts = [row["verdict"] for row in rows.values()]
    counted = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return {
        "examined": len(rows),
        "of": of,
        "can_train": sum(bool(row["can_train"]) for row in rows.values()),
        **counted,
    }


def main() -> None:
    """Run the tests, ask, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="only tests that pytest's -k selects by this")
    parser.add_argument("--into", type=Path, help="put the rows into this file, made if need be")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="begin no further fault after so long")
    parser.add_argument("--grammar", choices=HALVES, help="faults of the grammar")
    parser.add_argument("--again", type=int, default=1, help="how often each is examined")
    asked = parser.parse_args()
    kind = "grammar" if asked.grammar else "faults"
    path = asked.into or machine.RESULTS / f"doctor-{kind}-{time.strftime('%Y%m%d-%H%M')}.json"
    if asked.grammar:
        by_grammar(asked.grammar, asked.only or "", path, asked.limit_s, asked.again)
        return
    table = Table(path, asked.limit_s)
    examining.watching.append(table.watch)
    folder = ROOT / "tests" / "fault"
    files = [str(folder / name) for name in ("test_doctor.py", *(f"test_doctor_{layer}.py" for layer in LAYERS))]
    only = ["-k", asked.only] if asked.only else []
    raise SystemExit(int(pytest.main(["-q", "-s", "-p", "no:cacheprovider", *only, *files], plugins=[table])))


if __name__ == "__main__":
    main()
