"""A node that lies: `python liar.py LIE COMMAND` runs the node's half of dtctl and changes what it says, in one way.

What it is told goes to the real one and what that says comes back frame by frame, so that a lie is told at its moment
in a talk that is otherwise as ever. Imports nothing of dtctl, since it is to lie about what dtctl would say.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("!cii")
Message = dict[str, Any]
Lie = Callable[[bytes, int, bytes], bytes]
"""(kind, rank, payload of a frame) -> bytes to be sent in its place."""


def frame(payload: bytes | Message, kind: bytes = b"J", rank: int = -1) -> bytes:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return HEADER.pack(kind, rank, len(data)) + data


def instead(op: str, *said: bytes | Message, state: str = "") -> Lie:
    """Say something else in the place of a message."""

    def lie(kind: bytes, rank: int, payload: bytes) -> bytes:
        if not is_it(kind, payload, op, state):
            return frame(payload, kind, rank)
        return b"".join(one if isinstance(one, bytes) else frame(one) for one in said)

    return lie


def changed(op: str, change: Callable[[Message], object], state: str = "") -> Lie:
    """Change a message."""

    def lie(kind: bytes, rank: int, payload: bytes) -> bytes:
        if not is_it(kind, payload, op, state):
            return frame(payload, kind, rank)
        message = json.loads(payload)
        change(message)
        return frame(message)

    return lie


def beside(op: str, *said: bytes | Message) -> Lie:
    """Say something more after a message."""
    more = b"".join(one if isinstance(one, bytes) else frame(one) for one in said)

    def lie(kind: bytes, rank: int, payload: bytes) -> bytes:
        return frame(payload, kind, rank) + (more if is_it(kind, payload, op, "") else b"")

    return lie


def is_it(kind: bytes, payload: bytes, op: str, state: str) -> bool:
    if kind != b"J":
        return False
    message = json.loads(payload)
    return message.get("op") == op and (not state or message.get("state") == state)


DEEP = b"[" * 200_000 + b"]" * 200_000
WORKER = dict.fromkeys(
    ("rank", "pid", "phase", "step", "place", "first", "saved", "until", "begun_s", "stale_s", "slowest_s", "stall_s"),
    0,
) | {"evaluation_s": 0, "state": "R"}
EXIT = {"rank": 1, "code": 0, "signal": None}

LIES: dict[str, Lie] = {
    # before the run
    "hello is a list": instead("hello", frame(b"[1, 2]")),
    "hello is no JSON": instead("hello", frame(b"{")),
    "hello is no UTF-8": instead("hello", frame(b'{"op": "hello\xff"}')),
    "hello is deep": instead("hello", frame(b'{"op": "hello", "x": ' + DEEP + b"}")),
    "hello has a number of a million digits": instead(
        "hello", frame(b'{"op": "hello", "gpus": ' + b"9" * 999_000 + b"}")
    ),
    "hello has no operation": instead("hello", {"gpus": 0}),
    "hello has a list for an operation": instead("hello", {"op": ["hello"]}),
    "hello is another operation": instead("hello", {"op": "reformat"}),
    "hello lacks its GPUs": changed("hello", lambda m: m.pop("gpus")),
    "hello has fewer GPUs than none": changed("hello", lambda m: m.update(gpus=-1)),
    "hello has a billion GPUs": changed("hello", lambda m: m.update(gpus=10**9)),
    "hello has GPUs of text": changed("hello", lambda m: m.update(gpus="8; rm -rf ~")),
    "hello has true GPUs": changed("hello", lambda m: m.update(gpus=True)),
    "hello has not-a-number GPUs": changed("hello", lambda m: m.update(gpus=float("nan"))),
    "hello has a port that nobody asked for": changed("hello", lambda m: m.update(port=22)),
    "hello has an address that is a name": changed("hello", lambda m: m.update(address="evil.example")),
    "hello has keys of ours": changed("hello", lambda m: m.update(what=1, self=2, session=3, error=4)),
    "an error of another form": instead("hello", {"op": "error", "code": ["x"], "message": {"a": 1}}),
    "a banner before hello": instead("hello", b"Welcome to node b!\r\n" * 100),
    "a frame of two gigabytes": instead("hello", HEADER.pack(b"J", -1, (1 << 31) - 1) + bytes(1000)),
    "a frame of less than nothing": instead("hello", HEADER.pack(b"J", -1, -5)),
    "half a frame": instead("hello", frame({"op": "hello"})[:12]),
    "silence": lambda *_: time.sleep(10_000) or b"",
    "ready before its time": instead("hello", {"op": "ready"}),
    "files instead of hello": instead("hello", frame(b"x" * 1000, b"B")),
    "the code lies in /etc": changed("push", lambda m: m.update(path="/etc"), "done"),
    "the code lies in a list": changed("push", lambda m: m.update(path=[1]), "done"),
    "the code lies in a path with an escape sequence": changed(
        "push", lambda m: m.update(path="/\x1b[2J/code/x"), "done"
    ),
    "it has another tree": changed("push", lambda m: m.update(digest="0" * 32), "done"),
    "it needs a file that there is not": changed("push", lambda m: m.update(indexes=[99_999]), "need"),
    "it needs a file before the first": changed("push", lambda m: m.update(indexes=[-1]), "need"),
    "it needs one file a million times": changed("push", lambda m: m.update(indexes=[0] * 300_000), "need"),
    "it needs text": changed("push", lambda m: m.update(indexes="all"), "need"),
    "ready is a log": instead("ready", frame(b"x", b"L", 0)),
    # while it runs
    "started a thousand times": beside("started", *[{"op": "started", "interface": "x"}] * 1000),
    "an interface with an escape sequence": changed("started", lambda m: m.update(interface="\x1b]0;mine\x07" * 3)),
    "an interface of a megabyte": changed("started", lambda m: m.update(interface="x" * 1_000_000)),
    "an end of the other node's worker": beside("started", {"op": "exit", **EXIT, "rank": 0, "code": 3}),
    "an end of a worker that there is not": beside("started", {"op": "exit", **EXIT, "rank": 10**6, "code": 3}),
    "an end with a text for a code": beside("started", {"op": "exit", **EXIT, "code": "0"}),
    "an end without a rank": beside("started", {"op": "exit", "code": 1, "signal": None}),
    "stopped without ends": instead("stopped", {"op": "stopped", "left": 0}),
    "stopped with a text for a number": changed("stopped", lambda m: m.update(left="none")),
    "stopped with fewer than none left": changed("stopped", lambda m: m.update(left=-7)),
    "stopped with a hundred thousand ends": changed("stopped", lambda m: m.update(exits=[EXIT] * 10_000)),
    "progress of the other node's worker": beside(
        "started", {"op": "progress", "workers": [{**WORKER, "step": 10**9}]}
    ),
    "progress of garbage": beside("started", {"op": "progress", "workers": [1, [], {}, {**WORKER, "rank": "x"}]}),
    "progress that is no list": beside("started", {"op": "progress", "workers": {"0": 1}}),
    "a stack that nobody asked for": beside(
        "started", {"op": "stack", "rank": 7, "state": "", "how": "", "text": "", "flight": ""}
    ),
    "a stack of another form": beside("started", {"op": "stack", "rank": [], "state": 1}),
    "metrics of the other node": beside("started", {"op": "metrics-begin"}, frame(b'{"step": 9}\n' * 9, b"L", -2)),
    "output of workers that there are not": beside("started", *[frame(b"x\n", b"L", rank) for rank in range(2, 2000)]),
    "output of rank minus a billion": beside("started", frame(b"x\n", b"L", -(10**9))),
    "files while it runs": beside("started", frame(b"x" * 100_000, b"B")),
    "words of the launcher's own": beside("started", {"op": "failed"}, {"op": "lost"}, {"op": "log"}),
    "cold a thousand times": beside("started", *[{"op": "cold", "why": "\x1b[31m" * 50}] * 1000),
    "a port that nobody asked for": beside("started", {"op": "probed", "port": 22}),
    "hello once more": beside("started", {"op": "hello", "gpus": 8, "address": "", "port": 0}),
    "it never says that it has started": instead("started"),
}


def deep_in(op: str) -> Lie:
    return instead(op, frame(b'{"op": "%s", "x": ' % op.encode() + DEEP + b"}"))


MARKUP = "\x1b]0;mine\x07\x1b[2J[/red][link=x]b\u202e"
DOCTOR: dict[str, Lie] = {
    # each question
    "time is not a number": changed("time", lambda m: m.update(time=float("nan"))),
    "time is without end": changed("time", lambda m: m.update(time=float("inf"))),
    "time of the far future": changed("time", lambda m: m.update(time=1e308)),
    "time before all time": changed("time", lambda m: m.update(time=-5)),
    "time is text": changed("time", lambda m: m.update(time="12:00")),
    "time is true": changed("time", lambda m: m.update(time=True)),
    "time is missing": changed("time", lambda m: m.pop("time")),
    "another question's answer": changed("time", lambda m: m.update(op="facts")),
    "no operation": changed("time", lambda m: m.pop("op")),
    "an answer too many": beside("time", {"op": "time", "time": 1.0}, {"op": "time", "time": 1.0}),
    "an error with escape sequences": instead("time", {"op": "error", "code": "x", "message": MARKUP}),
    "an error of a megabyte": instead("time", {"op": "error", "code": "x", "message": "x" * 1_000_000}),
    "an error without words": instead("time", {"op": "error"}),
    "no JSON": instead("time", frame(b"{")),
    "a list": instead("time", frame(b"[]")),
    "deep": deep_in("time"),
    "deep facts": deep_in("facts"),
    "output": instead("facts", frame(b"x", b"L", 0)),
    "two gigabytes": instead("facts", HEADER.pack(b"J", -1, (1 << 31) - 1) + bytes(1000)),
    "half an answer": instead("facts", frame({"op": "facts"})[:12]),
    "it says nothing": lambda *_: time.sleep(10_000) or b"",
    "facts that never come": instead("facts"),
    # facts
    "no facts": instead("facts", {"op": "facts"}),
    "a host name of markup": changed("facts", lambda m: m.update(hostname=MARKUP)),
    "a host name that is a list": changed("facts", lambda m: m.update(hostname=["a"])),
    "a host name of a megabyte": changed("facts", lambda m: m.update(hostname="x" * 900_000)),
    "a disk of less than nothing": changed("facts", lambda m: m["disk"].update(free=-1)),
    "a disk of text": changed("facts", lambda m: m["disk"].update(free="much")),
    "a disk with a number of many digits": changed("facts", lambda m: m["disk"].update(free=int("9" * 4000))),
    "a disk at a place of markup": changed("facts", lambda m: m["disk"].update(path=MARKUP, free=0)),
    "limits of one number": changed("facts", lambda m: m["limits"].update(nofile=[1])),
    "limits of three": changed("facts", lambda m: m["limits"].update(nofile=[1, 2, 3])),
    "a million GPUs": changed("facts", lambda m: m.update(gpus=10**6)),
    "GPUs with digits of another script": changed(
        "facts", lambda m: m.update(gpus=1, gpu="0, A, \u00b2, \u0663, 1, \u00b3")
    ),
    "GPUs with a number of many digits": changed(
        "facts", lambda m: m.update(gpus=1, gpu=f"0, A, {'9' * 5000}, {'9' * 5000}, 1, {'9' * 5000}")
    ),
    "an Xid of many digits": changed("facts", lambda m: m.update(xid="NVRM: Xid (PCI:0): " + "7" * 5000)),
    "Xids of markup": changed("facts", lambda m: m.update(xid=f"NVRM: Xid ({MARKUP}): 79, x")),
    "a hundred thousand Xids": changed("facts", lambda m: m.update(xid="NVRM: Xid (a): 79\n" * 25_000)),
    "a topology of many rows": changed("facts", lambda m: m.update(topology="GPU0 X\n" * 60_000)),
    "links without a GPU": changed("facts", lambda m: m.update(nvlink="Link 0: 25 GB/s\nGPU \nLink 1: x GB/s\n" * 900)),
    "rows of memory that are none": changed("facts", lambda m: m.update(remapped="a,b,c\n,,\nx,Yes,\n,No,Yes" * 900)),
    "ports of another form": changed("facts", lambda m: m.update(rdma=[{"device": 1}])),
    "ports without end": changed(
        "facts",
        lambda m: m.update(rdma=[dict.fromkeys(("device", "port", "state", "rate", "link_layer"), "x")] * 10_000),
    ),
    "interfaces that are a number": changed("facts", lambda m: m.update(interfaces=7)),
    "an interface with an address that is a name": changed(
        "facts", lambda m: m.update(interfaces=[{"name": "x", "address": "evil", "mtu": 1, "mbit_s": 1}])
    ),
    "addresses of text": changed("facts", lambda m: m.update(addresses=["x; rm -rf ~"])),
    "it was reached at a name": changed("facts", lambda m: m.update(reached_at="evil.example")),
    "names that mean lists of lists": changed("facts", lambda m: m.update(looked_up={"a": [["b"]]})),
    "a job's Python without a version": changed("job-python", lambda m: m.update(job={"torch": "2.0"})),
    "a job's Python of numbers": changed("job-python", lambda m: m.update(job={"python": 3, "torch": 2})),
    "a job's Python that is a list": changed("job-python", lambda m: m.update(job=[])),
    "variables of markup": changed("facts", lambda m: m["env"].update({"NCCL_DEBUG": MARKUP, "NCCL_" + MARKUP: "1"})),
    "variables that are numbers": changed("facts", lambda m: m["env"].update(NCCL_DEBUG=1)),
    "a configuration of many lines": changed(
        "facts", lambda m: m.update(conf={"/etc/nccl.conf": "".join(f"NCCL_DEBU{i}=1\n" for i in range(50_000))})
    ),
    "paths that are missing, and markup": changed("facts", lambda m: m.update(missing=[MARKUP] * 4000)),
    "a folder that cannot be written to for a megabyte": changed("facts", lambda m: m.update(writable="x" * 900_000)),
    "code that is a number": changed("facts", lambda m: m.update(code=1)),
    # between nodes
    "fewer ports than asked for": changed("listen", lambda m: m.update(ports=[])),
    "ports above all ports": changed("listen", lambda m: m.update(ports=[70_000 for _ in m["ports"]])),
    "ports of text": changed("listen", lambda m: m.update(ports=["22" for _ in m["ports"]])),
    "ports that could not be opened": changed("listen", lambda m: m.update(ports=[-4096 for _ in m["ports"]])),
    "no port at all": changed("listen", lambda m: m.update(ports=[0 for _ in m["ports"]])),
    "ports that somebody else listens on": changed("listen", lambda m: m.update(ports=[1 for _ in m["ports"]])),
    "calls that nobody asked for": changed("call", lambda m: m["answers"].append(dict(m["answers"][0], node="c"))),
    "no calls": changed("call", lambda m: m.update(answers=[])),
    "calls with another result": changed("call", lambda m: [one.update(result="hm") for one in m["answers"]]),
    "a stranger who says nothing": changed(
        "call", lambda m: [(one.update(result="stranger"), one.pop("said", 0)) for one in m["answers"]]
    ),
    "calls that were seen from nowhere": changed(
        "call", lambda m: [(one.update(seen=MARKUP[:60]), one.pop("own", 0)) for one in m["answers"]]
    ),
    "calls without a port": changed("call", lambda m: [one.pop("port") for one in m["answers"]]),
    "a rate that is not a number": changed("measure", lambda m: m.update(mbit_s=float("nan"))),
    "a rate below nothing": changed("measure", lambda m: m.update(mbit_s=-1.0)),
    "a round trip that is one number": changed("measure", lambda m: m.update(rtt_ms=1.0)),
    "a round trip before it began": changed("measure", lambda m: m.update(rtt_ms=[-1e300, 1.0])),
    "more lost than sent": changed("measure", lambda m: m.update(sent=1, lost=10**9)),
    "lost without being sent": changed("measure", lambda m: (m.pop("sent", 0), m.update(lost=3))),
    "a measurement that failed with markup": instead("measure", {"op": "measure", "error": MARKUP}),
    "a connection with a result of its own": changed("measure", lambda m: m.update(error="no", result="fine")),
    "measurements that never come": instead("measure"),
}
"""To the doctor, by a probe."""

FLOODS: dict[str, bytes] = {
    "large frames of output": frame(b"x" * (1 << 20), b"L", 1),
    "small frames of output": frame(b"x", b"L", 1) * 1000,
    "empty frames of output": frame(b"", b"L", 1) * 1000,
    "lines of progress bars": frame(b"\r 1%" * 10_000, b"L", 1),
    "large messages": frame(b'{"op": "pong", "workers": [' + b"{}," * 300_000 + b"{}]}"),
    "small messages": frame({"op": "progress", "workers": []}) * 1000,
}
"""What it repeats for ever once the run has started."""
for _name in FLOODS:
    LIES[f"for ever: {_name}"] = beside("started", b"")
for _name in ("large messages", "empty frames of output"):
    DOCTOR[f"answers and then for ever: {_name}"] = beside("time", b"")


def main(name: str, command: str) -> None:
    child = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    threading.Thread(target=pass_on, args=(child.stdin,), daemon=True).start()
    buffer, lie = b"", {**LIES, **DOCTOR}[name]
    while data := os.read(child.stdout.fileno(), 1 << 16):
        buffer += data
        while len(buffer) >= HEADER.size:
            kind, rank, length = HEADER.unpack_from(buffer)
            end = HEADER.size + length
            if len(buffer) < end:
                break
            payload, buffer = buffer[HEADER.size : end], buffer[end:]
            say(lie(kind, rank, payload))
            flood = FLOODS.get(name.rpartition("for ever: ")[2])
            while flood is not None and (is_it(kind, payload, "started", "") or is_it(kind, payload, "time", "")):
                say(flood)
    os._exit(child.wait())


def pass_on(to: Any) -> None:
    while data := os.read(0, 1 << 16):
        to.write(data)
        to.flush()
    to.close()


def say(data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(1, view) :]
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
