"""Schemas of a probe's answers, one per kind of request, with the checks of dtctl/schema.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from dtctl.errors import NodeError
from dtctl.launch.control.link import quote_node_value, validate_node_value
from dtctl.schema import (
    Check,
    InvalidMessage,
    check_address,
    check_flag,
    check_number,
    check_prose,
    list_of,
    make_integer_check,
    make_nullable_check,
    make_object_check,
    make_text_check,
    mapping_of,
)
from dtctl.supervisor.messages.base import Message

_COUNT: Final = make_integer_check(0)
_NAME: Final = make_text_check(256)
_WORDS: Final = make_text_check(1 << 19)
"""Output of a tool or content of a file, which checks search."""
_LIMIT: Final = make_integer_check(-1, 1 << 64)
_ROWS: Final = 4096


def _make_pair_check(check: Check[Any]) -> Check[Any]:
    def check_both(value: Any) -> list[Any]:
        items: list[Any] = list_of(check, 2)(value)
        if len(items) != 2:
            raise InvalidMessage("not two")
        return items

    return check_both


def _check_resource_limit(value: Any) -> int:
    # RLIM_INFINITY is -1 on some systems, and all bits on others.
    return int(_LIMIT(value))


def _check_clock_time(value: Any) -> float:
    if not 0 <= check_number(value) < 1 << 40:
        raise InvalidMessage("no time of a clock")
    return float(value)


def _check_tool_output(value: Any) -> str:
    # The checks read numbers from this text. They expect ASCII digits, and no more of them than a number has.
    name: str = _WORDS(value)
    return _LONG_NUMBER.sub("?", name.encode("ascii", "replace").decode())


def _check_conf_text(value: Any) -> str:
    found: str = _WORDS(value)
    if len(found.splitlines()) > _ROWS:
        raise InvalidMessage(f"no file of at most {_ROWS} lines")
    return found


def _check_job_facts(value: Any) -> dict[str, Any]:
    facts: dict[str, Any] = _JOB(value)
    return {"python": "", "torch": None, "cuda": None, **facts} if facts else {}


def _make_minimum_check(low: float) -> Check[Any]:
    def check(value: Any) -> float:
        if check_number(value) < low:
            raise InvalidMessage(f"less than {low:g}")
        return float(value)

    return check


def _check_call_answer(value: Any) -> dict[str, Any]:
    call: dict[str, Any] = _CALL(value)
    if call["result"] not in _RESULTS or ("seen" in call) != ("own" in call):
        raise InvalidMessage(f"no result of a call: {quote_node_value(call['result'])}")
    return {"said": "", **call}


def _check_measurement(value: Any) -> dict[str, Any]:
    measurement: dict[str, Any] = _MEASURED(value)
    lost = measurement.get("lost")
    if lost is not None and not ("sent" in measurement and lost <= measurement["sent"]):
        raise InvalidMessage("more datagrams were lost than sent")
    result = measurement.get("result")  # set if the connection failed, with the reason
    if result is not None and (result not in _RESULTS or "error" not in measurement):
        raise InvalidMessage(f"no result of a call: {quote_node_value(result)}")
    return measurement


def _check_shadow_entry(value: Any) -> list[str]:
    found: list[str] = list_of(make_text_check(4096), 3)(value)
    if len(found) != 3:
        raise InvalidMessage("not a name and two paths")
    return found


def _check_hardware_address(value: Any) -> str:
    if not _MAC.fullmatch(make_text_check(64)(value)):
        raise InvalidMessage("no hardware address")
    return str(value)


_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_LONG_NUMBER: Final = re.compile(r"\d{19,}")
_RESULTS: Final = ("ok", "dropped", "no-room", "refused", "unreachable", "silent", "stranger", "large-lost", "error")
_JOB: Final = make_object_check(
    optional={
        "executable": make_nullable_check(make_text_check(4096)), "python": make_text_check(40),
        "torch": make_nullable_check(make_text_check(256)), "cuda": make_nullable_check(make_text_check(256)),
        "nccl": make_nullable_check(make_text_check(256)), "torch_path": make_nullable_check(make_text_check(4096)),
        "error": check_prose, "because": list_of(_NAME, 64), "shadows": list_of(_check_shadow_entry, 64),
    }
)  # fmt: skip
_CALL: Final = make_object_check(
    node=_NAME, port=make_integer_check(1, 65_535), kind=make_text_check(20), result=make_text_check(20),
    optional={"said": check_prose, "took_ms": check_number, "seen": make_text_check(64), "own": make_text_check(64)},
)  # fmt: skip
_RATE: Final = make_nullable_check(_make_minimum_check(0.0))
_MEASURED: Final = make_object_check(
    optional={
        "error": check_prose, "rtt_ms": _make_pair_check(_make_minimum_check(0.0)), "sent": _COUNT,
        "lost": make_nullable_check(_COUNT), "mbit_s": _RATE, "retransmitted": _COUNT, "segments": _COUNT,
        "twice": _COUNT, "carried": _COUNT, "broken": make_text_check(20), "result": make_text_check(20),
    }
)  # fmt: skip
_SPACE: Final[Mapping[str, Check[Any]]] = {
    "path": make_text_check(4096), "total": _COUNT, "free": _COUNT, "inodes": _COUNT, "free_inodes": _COUNT,
    "noexec": check_flag,
}  # fmt: skip
_FACTS: Final = make_object_check(
    hostname=_NAME, user=_NAME, time=_check_clock_time, python=make_text_check(40), kernel=_NAME, machine=_NAME,
    cpus=make_nullable_check(_COUNT),
    looked_up=mapping_of(_NAME, make_nullable_check(list_of(make_text_check(64), _ROWS)), _ROWS),
    interfaces=list_of(
        make_object_check(
            name=make_text_check(64), address=check_address, mtu=_COUNT, mbit_s=_COUNT, up=check_flag,
            mac=_check_hardware_address,
        ),
        _ROWS,
    ),
    addresses=list_of(check_address, _ROWS), reached_at=check_address,
    ways=mapping_of(_NAME, make_text_check(64), _ROWS),
    limits=make_object_check(
        optional={name: _make_pair_check(_check_resource_limit) for name in ("as", "fsize", "cpu", "nproc")},
        nofile=_make_pair_check(_check_resource_limit), memlock=_make_pair_check(_check_resource_limit),
    ),
    machine_cpus=_COUNT, cpu_quota=check_number, memory_limit=make_integer_check(-1),
    memory_free=make_integer_check(-1), pids_free=make_integer_check(-1),
    ports=list_of(_COUNT, 2), neighbours=mapping_of(make_text_check(64), _check_hardware_address, _ROWS),
    shm=make_object_check(None, **_SPACE, why=check_prose), disk=make_object_check(None, **_SPACE),
    tmp=make_object_check(None, **_SPACE, why=check_prose, origin=make_text_check(40)),
    files=mapping_of(_NAME, check_prose, _ROWS), writable=check_prose,
    missing=list_of(make_text_check(4096), _ROWS),
    env=mapping_of(_NAME, _WORDS, _ROWS), conf=mapping_of(make_text_check(4096), _check_conf_text, 16),
    code=make_text_check(64), gpus=make_integer_check(0, 4096), gpu=_check_tool_output, remapped=_check_tool_output,
    nvlink=_check_tool_output, topology=_check_tool_output, xid=_check_tool_output, fabric=_check_tool_output,
    state=_check_tool_output, vendor=make_text_check(16), gpu_error=check_prose, xid_source=make_text_check(64),
    rdma=list_of(
        make_object_check(
            optional={"roce": make_text_check(8), "verbs": make_text_check(8)},
            device=_NAME, port=_NAME, state=_NAME, rate=_NAME, link_layer=_NAME,
        ),
        _ROWS,
    ),
)  # fmt: skip
_ANSWERS: Final[Mapping[str, Check[Any]]] = {
    "time": make_object_check(time=_check_clock_time, gpus=make_integer_check(0, 4096)),
    "facts": _FACTS,
    "job-python": make_object_check(job=_check_job_facts),
    "listen": make_object_check(ports=list_of(make_integer_check(-4096, 65_535), 64)),
    "spread": make_object_check(
        spread=list_of(make_integer_check(1, 65_535), 64), meeting=list_of(make_integer_check(1, 65_535), 64)
    ),
    "call": make_object_check(answers=list_of(_check_call_answer, 1 << 20)),
    "measure": _check_measurement,
    "network-settings": make_object_check(
        sysctls=mapping_of(_NAME, check_prose, 64), unread=check_prose, filters=list_of(check_prose, 64),
        queues=list_of(check_prose, 64), routes=list_of(check_prose, 64),
    ),
    "mark": make_object_check(folders=list_of(make_text_check(4096), _ROWS)),
    "look": make_object_check(seen=list_of(_RATE, 1 << 20)),
    "unmark": make_object_check(),
}  # fmt: skip
_GPU: Final = make_object_check(
    name=_NAME, error=check_prose,
    optional={
        "tflops": _make_minimum_check(0.0), "to_gb_s": _make_minimum_check(0.0),
        "from_gb_s": _make_minimum_check(0.0), "within_gb_s": _make_minimum_check(0.0),
    },
)  # fmt: skip
_TOLD: Final = {
    "gpus": list_of(_GPU, 64), "busbw_gb_s": make_nullable_check(_make_minimum_check(0.0)),
    "devices": make_integer_check(0, 4096), "stage": make_text_check(40), "silent": check_flag, "complained": _WORDS,
    "error": check_prose, "wrong": make_nullable_check(_COUNT), "seconds": check_number, "bytes": _COUNT,
    "nccl": make_nullable_check(make_text_check(64)), "uses": list_of(_NAME, 64),
}  # fmt: skip
_WORKER: Final = make_object_check(optional={**_TOLD, "each": list_of(make_object_check(optional=_TOLD), 64)})
"""Answer of the job's own Python, which the probe passes on; `each` has the answers of several workers."""


def check_probe_answer(message: Message, said: Mapping[str, Any], *, node: str) -> dict[str, Any]:
    """Return a probe's answer to a request.

    Raises:
        NodeError: the answer does not have the requested form.
    """
    op = message.op
    if said.get("op") != op:
        raise NodeError(f"the node answered {quote_node_value(said.get('op'))}, and was asked {op!r}", node=node)
    reply: dict[str, Any] = validate_node_value(
        _ANSWERS.get(op, _WORKER), said, subject=f"its answer to `{op}`", node=node
    )
    for one in (reply, *reply.get("each", ())):
        if one.get("stage") == "done" or "seconds" in one:
            validate_node_value(
                make_object_check(seconds=_make_minimum_check(1e-9), bytes=_COUNT),
                one,
                subject="its worker's answer",
                node=node,
            )
    asked = {"look": "wanted", "listen": "ports"}.get(op, "asks" if "each" in reply and op == "round" else None)
    if asked is not None:
        value = reply[{"look": "seen", "listen": "ports"}.get(op, "each")]
        validate_node_value(_as_many(len(getattr(message, asked))), value, subject=f"its answer to `{op}`", node=node)
    return reply


def _as_many(count: int) -> Check[Any]:
    def check(value: Any) -> Any:
        if len(value) != count:
            raise InvalidMessage(f"not {count}, as there were asked for")
        return value

    return check
