"""Schemas of the answers of a probe, one per question, by the checks of dtctl/schema.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from dtctl.errors import NodeError
from dtctl.launch.control.link import checked, quoted
from dtctl.schema import (
    Check,
    InvalidMessage,
    address,
    flag,
    form,
    integer,
    list_of,
    mapping_of,
    nullable,
    number,
    prose,
    text,
)
from dtctl.supervisor.messages.base import Message

_COUNT: Final = integer(0)
_NAME: Final = text(256)
_WORDS: Final = text(1 << 19)
"""Words of a tool or a file, which the checks look through."""
_LIMIT: Final = integer(-1, 1 << 64)
_ROWS: Final = 4096


def _pair(check: Check[Any]) -> Check[Any]:
    def check_both(value: Any) -> list[Any]:
        items: list[Any] = list_of(check, 2)(value)
        if len(items) != 2:
            raise InvalidMessage("not two")
        return items

    return check_both


def _limit(value: Any) -> int:
    # RLIM_INFINITY is -1 or all bits, by system.
    return int(_LIMIT(value))


def _time(value: Any) -> float:
    if not 0 <= number(value) < 1 << 40:
        raise InvalidMessage("no time of a clock")
    return float(value)


def _tool(value: Any) -> str:
    # What looks through it reads numbers: digits of other scripts, and more of them than a number has, are none.
    name: str = _WORDS(value)
    return _LONG_NUMBER.sub("?", name.encode("ascii", "replace").decode())


def _conf(value: Any) -> str:
    found: str = _WORDS(value)
    if len(found.splitlines()) > _ROWS:
        raise InvalidMessage(f"no file of at most {_ROWS} lines")
    return found


def _job(value: Any) -> dict[str, Any]:
    facts: dict[str, Any] = _JOB(value)
    return {"python": "", "torch": None, "cuda": None, **facts} if facts else {}


def _above(low: float) -> Check[Any]:
    def check(value: Any) -> float:
        if number(value) < low:
            raise InvalidMessage(f"less than {low:g}")
        return float(value)

    return check


def _call(value: Any) -> dict[str, Any]:
    call: dict[str, Any] = _CALL(value)
    if call["result"] not in _RESULTS or ("seen" in call) != ("own" in call):
        raise InvalidMessage(f"no result of a call: {quoted(call['result'])}")
    return {"said": "", **call}


def _measured(value: Any) -> dict[str, Any]:
    measurement: dict[str, Any] = _MEASURED(value)
    lost = measurement.get("lost")
    if lost is not None and not ("sent" in measurement and lost <= measurement["sent"]):
        raise InvalidMessage("more datagrams were lost than sent")
    result = measurement.get("result")  # of a connection that was not made, and why
    if result is not None and (result not in _RESULTS or "error" not in measurement):
        raise InvalidMessage(f"no result of a call: {quoted(result)}")
    return measurement


def _three(value: Any) -> list[str]:
    found: list[str] = list_of(text(4096), 3)(value)
    if len(found) != 3:
        raise InvalidMessage("not a name and two paths")
    return found


def _mac(value: Any) -> str:
    if not _MAC.fullmatch(text(64)(value)):
        raise InvalidMessage("no hardware address")
    return str(value)


_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_LONG_NUMBER: Final = re.compile(r"\d{19,}")
_RESULTS: Final = ("ok", "dropped", "no-room", "refused", "unreachable", "silent", "stranger", "large-lost", "error")
_JOB: Final = form(
    optional={
        "executable": nullable(text(4096)), "python": text(40), "torch": nullable(text(256)),
        "cuda": nullable(text(256)), "nccl": nullable(text(256)), "torch_path": nullable(text(4096)),
        "error": prose, "because": list_of(_NAME, 64), "shadows": list_of(_three, 64),
    }
)  # fmt: skip
_CALL: Final = form(
    node=_NAME, port=integer(1, 65_535), kind=text(20), result=text(20),
    optional={"said": prose, "took_ms": number, "seen": text(64), "own": text(64)},
)  # fmt: skip
_RATE: Final = nullable(_above(0.0))
_MEASURED: Final = form(
    optional={
        "error": prose, "rtt_ms": _pair(_above(0.0)), "sent": _COUNT, "lost": nullable(_COUNT), "mbit_s": _RATE,
        "retransmitted": _COUNT, "segments": _COUNT, "twice": _COUNT, "carried": _COUNT, "broken": text(20),
        "result": text(20),
    }
)  # fmt: skip
_SPACE: Final[Mapping[str, Check[Any]]] = {
    "path": text(4096), "total": _COUNT, "free": _COUNT, "inodes": _COUNT, "free_inodes": _COUNT, "noexec": flag,
}  # fmt: skip
_FACTS: Final = form(
    hostname=_NAME, user=_NAME, time=_time, python=text(40), kernel=_NAME, machine=_NAME, cpus=nullable(_COUNT),
    looked_up=mapping_of(_NAME, nullable(list_of(text(64), _ROWS)), _ROWS),
    interfaces=list_of(form(name=text(64), address=address, mtu=_COUNT, mbit_s=_COUNT, up=flag, mac=_mac), _ROWS),
    addresses=list_of(address, _ROWS), reached_at=address, ways=mapping_of(_NAME, text(64), _ROWS),
    limits=form(
        optional={name: _pair(_limit) for name in ("as", "fsize", "cpu", "nproc")},
        nofile=_pair(_limit), memlock=_pair(_limit),
    ),
    machine_cpus=_COUNT, cpu_quota=number, memory_limit=integer(-1), memory_free=integer(-1), pids_free=integer(-1),
    ports=list_of(_COUNT, 2), neighbours=mapping_of(text(64), _mac, _ROWS),
    shm=form(None, **_SPACE, why=prose), disk=form(None, **_SPACE),
    tmp=form(None, **_SPACE, why=prose, origin=text(40)), files=mapping_of(_NAME, prose, _ROWS), writable=prose,
    missing=list_of(text(4096), _ROWS),
    env=mapping_of(_NAME, _WORDS, _ROWS), conf=mapping_of(text(4096), _conf, 16),
    code=text(64), gpus=integer(0, 4096), gpu=_tool, remapped=_tool, nvlink=_tool, topology=_tool, xid=_tool,
    fabric=_tool, state=_tool, vendor=text(16), gpu_error=prose, xid_source=text(64),
    rdma=list_of(
        form(
            optional={"roce": text(8), "verbs": text(8)},
            device=_NAME, port=_NAME, state=_NAME, rate=_NAME, link_layer=_NAME,
        ),
        _ROWS,
    ),
)  # fmt: skip
_ANSWERS: Final[Mapping[str, Check[Any]]] = {
    "time": form(time=_time, gpus=integer(0, 4096)),
    "facts": _FACTS,
    "job-python": form(job=_job),
    "listen": form(ports=list_of(integer(-4096, 65_535), 64)),
    "spread": form(spread=list_of(integer(1, 65_535), 64), meeting=list_of(integer(1, 65_535), 64)),
    "call": form(answers=list_of(_call, 1 << 20)),
    "measure": _measured,
    "mark": form(folders=list_of(text(4096), _ROWS)),
    "look": form(seen=list_of(_RATE, 1 << 20)),
    "unmark": form(),
}  # fmt: skip
_GPU: Final = form(
    name=_NAME, error=prose,
    optional={"tflops": _above(0.0), "to_gb_s": _above(0.0), "from_gb_s": _above(0.0), "within_gb_s": _above(0.0)},
)  # fmt: skip
_TOLD: Final = {
    "gpus": list_of(_GPU, 64), "busbw_gb_s": nullable(_above(0.0)), "devices": integer(0, 4096),
    "stage": text(40), "silent": flag, "complained": _WORDS, "error": prose, "wrong": nullable(_COUNT),
    "seconds": number, "bytes": _COUNT, "nccl": nullable(text(64)), "uses": list_of(_NAME, 64),
}  # fmt: skip
_WORKER: Final = form(optional={**_TOLD, "each": list_of(form(optional=_TOLD), 64)})
"""Answer of the job's own Python, which the probe passes on; `each` where there are several."""


def answer(message: Message, said: Mapping[str, Any], *, node: str) -> dict[str, Any]:
    """Return a probe's answer to a question.

    Raises:
        NodeError: it has not the form that was asked for.
    """
    op = message.op
    if said.get("op") != op:
        raise NodeError(f"the node answered {quoted(said.get('op'))}, and was asked {op!r}", node=node)
    reply: dict[str, Any] = checked(_ANSWERS.get(op, _WORKER), said, subject=f"its answer to `{op}`", node=node)
    for one in (reply, *reply.get("each", ())):
        if one.get("stage") == "done" or "seconds" in one:
            checked(form(seconds=_above(1e-9), bytes=_COUNT), one, subject="its worker's answer", node=node)
    asked = {"look": "wanted", "listen": "ports"}.get(op, "asks" if "each" in reply and op == "round" else None)
    if asked is not None:
        value = reply[{"look": "seen", "listen": "ports"}.get(op, "each")]
        checked(_as_many(len(getattr(message, asked))), value, subject=f"its answer to `{op}`", node=node)
    return reply


def _as_many(count: int) -> Check[Any]:
    def check(value: Any) -> Any:
        if len(value) != count:
            raise InvalidMessage(f"not {count}, as there were asked for")
        return value

    return check
