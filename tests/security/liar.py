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


def main(name: str, command: str) -> None:
    child = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    threading.Thread(target=pass_on, args=(child.stdin,), daemon=True).start()
    buffer = b""
    while data := os.read(child.stdout.fileno(), 1 << 16):
        buffer += data
        while len(buffer) >= HEADER.size:
            kind, rank, length = HEADER.unpack_from(buffer)
            end = HEADER.size + length
            if len(buffer) < end:
                break
            payload, buffer = buffer[HEADER.size : end], buffer[end:]
            say(LIES[name](kind, rank, payload))
            flood = FLOODS.get(name.removeprefix("for ever: "))
            while flood is not None and is_it(kind, payload, "started", ""):
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
