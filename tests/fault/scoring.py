"""Lets the doctor examine virtual hosts with a fault of the grammar, and scores what it says against what was
expected."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox
from tests.fault.grammar import NODES, PRELUDE, Expected, Fault

LIMIT_S = 400.0
SETTLE_S = 120.0


@contextmanager
def hosts(name: str) -> Iterator[Sandbox]:
    """Three fresh hosts: what a fault has changed goes with them."""
    groups = Path("/sys/fs/cgroup")
    try:
        yield control.start_sandbox(name, nodes=len(NODES))
    finally:
        control.remove_sandbox(name)
        for folder in groups.glob(f"*/{name}"):
            with suppress(OSError):  # the kernel is not done with its last process
                folder.rmdir()


def administer(sandbox: Sandbox, node: str, script: str) -> None:
    """Run a script of the grammar on a host."""
    host = sandbox.node(node)
    places = {f"P{one.index}": one.address for one in sandbox.nodes}
    places |= {"HERE": host.address, "SELF": str(sandbox.state / "self"), "LOGIN": str(sandbox.home)}
    places |= {"PY": sys.executable, "GROUP": sandbox.name}
    places["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    argv = [
        *faults._build_nsenter_argv(sandbox, host),
        "env",
        "-i",
        *(f"{key}={value}" for key, value in places.items()),
    ]
    text = PRELUDE + script.replace("@PYTHON@", sys.executable)
    done = subprocess.run([*argv, "bash", "-c", text], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{node}: {script}: {done.stderr.strip()}")


def spec_of(fault: Fault, sandbox: Sandbox) -> dict[str, Any]:
    """The spec that is examined."""
    spec: dict[str, Any] = {
        "cluster": {"transport": "sandbox", "nodes": list(NODES), "slots": 1, "connect_timeout_s": 3.0},
        "job": {"name": "t", "script": "train.py", "kind": "direct"},
    }
    first = sandbox.nodes[0].address
    said = {node.name: node.address for node in sandbox.nodes}
    said |= {"prefix": first.rpartition(".")[0], "last1": first.rpartition(".")[2]}
    for key, value in fault.spec.items():
        *parents, last = key.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = re.sub(r"\{(\w+)\}", lambda found: said[found[1]], value) if isinstance(value, str) else value
    return spec


JOB = """\
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
data = torch.ones(1 << 18)
for _ in range(5):
    data.fill_(1.0)
    dist.all_reduce(data)
assert (data == dist.get_world_size()).all(), "wrong sums"
dist.destroy_process_group()
"""
LAUNCH_LIMIT_S = 150.0


def examine(fault: Fault, *, options: Sequence[str] = (), launch: bool = False) -> dict[str, Any]:
    """What the doctor says of a fault: the object of `--json`, and `code`; `said` is what it printed where that is
    none. With `launch`, `trains` says whether a launch on the same hosts has trained, and `launched` how it ended."""
    name = f"g{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(dir=Path.home() / ".cache") as base, hosts_in(base, name) as sandbox:
        folder = Path(base) / "project"
        folder.mkdir()
        (folder / "dtctl.yaml").write_text(json.dumps(spec_of(fault, sandbox)))
        for path, text in {"train.py": JOB if launch else "print(1)\n", **fault.files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        for node, script in fault.do:
            administer(sandbox, node, script)
        environ = {
            key: re.sub(r"^\+(\d+)$", lambda found: str(int(time.time()) + int(found[1])), value)
            for key, value in fault.environ.items()
        }
        # As a console script does, `-P` keeps the project's own modules out of dtctl's.
        command = [sys.executable, "-P", "-m", "dtctl", "doctor", "--json", *options]
        env = {**os.environ, "DTCTL_SANDBOX": name, "DTCTL_SANDBOX_DIR": base, "NO_COLOR": "1", **environ}
        begun = time.monotonic()
        with subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            told = _while_it_runs(process, fault, sandbox)
            out = process.stdout.read() if process.stdout else ""
            code = process.wait(LIMIT_S)
        took_s = round(time.monotonic() - begun, 1)
        launched = _launch(folder, env) if launch else {}
    try:
        return {**json.loads(out), "code": code, "wall_s": took_s, **launched}
    except ValueError:
        return {"ok": False, "findings": [], "code": code, "said": (out + told)[-400:], "wall_s": took_s, **launched}


def _launch(folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Whether a launch trains on the hosts as they are, without restarts."""
    command = [sys.executable, "-P", "-m", "dtctl", "launch", "--set", "job.max_restarts=0"]
    with subprocess.Popen(
        command, cwd=folder, env={**env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=LAUNCH_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                out, _ = process.communicate(timeout=30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            return {"trains": False, "launched": f"no end within {LAUNCH_LIMIT_S:g} s: {out[-200:]}"}
    return {"trains": process.returncode == 0, "launched": f"exit code {process.returncode}: {out[-300:]}"}


@contextmanager
def hosts_in(base: str, name: str) -> Iterator[Sandbox]:
    before = os.environ.get("DTCTL_SANDBOX_DIR")
    os.environ["DTCTL_SANDBOX_DIR"] = base
    try:
        with hosts(name) as sandbox:
            yield sandbox
    finally:
        if before is None:
            del os.environ["DTCTL_SANDBOX_DIR"]
        else:
            os.environ["DTCTL_SANDBOX_DIR"] = before


def _while_it_runs(process: subprocess.Popen[str], fault: Fault, sandbox: Sandbox) -> str:
    left = list(fault.during)
    told = []
    for line in process.stderr or ():
        told.append(line)
        for one in [one for one in left if one[0] in line]:
            left.remove(one)
            host = sandbox.node(one[1])
            if one[2] == "kill":
                faults.power_off_host(sandbox, host)
            elif one[2] == "freeze":
                faults.freeze_host(host)
            else:
                faults.disconnect_host(sandbox, host, None)
    return "".join(told)


def score(fault: Fault, said: Mapping[str, Any]) -> dict[str, Any]:
    """`verdict` (right, partly, missed, wrong, false alarm), `can_train` where that was said in error, and why."""
    found = [one for one in said["findings"] if one["status"] in ("fail", "warn")]
    first = (
        f"{found[0]['check']} ({found[0]['status']}): {', '.join(found[0]['nodes'])}"
        if found
        else str(said.get("said") or "nothing")
    )
    row = {
        "verdict": "right",
        "can_train": False,
        "first": first,
        "also": [f"{one['check']} ({one['status']}): {', '.join(one['nodes'])}" for one in found[1:]],
        "summary": found[0]["summary"] if found else "",
        "fix": found[0]["fix"] if found else "",
    }
    if not fault.expected:
        row["verdict"] = "right" if not found and said["ok"] else "false alarm"
        return row
    fatal = any(one.fatal for one in fault.expected)
    row["can_train"] = said.get("can_train", said["ok"]) is True and fatal
    whole = [any(_matches(one, finding) and _fixes(one, finding) for finding in found) for one in fault.expected]
    near = [any(finding["check"] in one.checks or _who(one, finding) for finding in found) for one in fault.expected]
    first_right = bool(found) and any(_matches(one, found[0]) and _fixes(one, found[0]) for one in fault.expected)
    if all(whole) and first_right and not row["can_train"]:
        row["verdict"] = "right"
    elif any(near):
        row["verdict"] = "partly"
    elif not found:
        row["verdict"] = "missed"
    else:
        about = {node for one in fault.expected for node in one.nodes}
        row["verdict"] = "missed" if about & {*found[0]["nodes"], *found[0]["peers"]} else "wrong"
    return row


def _matches(expected: Expected, finding: Mapping[str, Any]) -> bool:
    return finding["check"] in expected.checks and _who(expected, finding)


def _who(expected: Expected, finding: Mapping[str, Any]) -> bool:
    nodes, peers = {*finding["nodes"]}, {*finding["peers"]}
    wanted = {*expected.nodes}
    return bool(nodes) and nodes <= wanted and nodes | peers >= wanted if expected.pair else nodes == wanted


def _fixes(expected: Expected, finding: Mapping[str, Any]) -> bool:
    return re.search(expected.fix, finding["fix"], re.IGNORECASE | re.DOTALL) is not None
