"""What a node may send: one schema per message. Nothing from a node is used before it has been validated here.

A node is not trusted (docs/security.md): it may be faulty, run another version, or belong to somebody else by now. A
value of the wrong form is an error of that node, unknown keys are dropped, and every size is limited. The supervisor's
messages are listed in dtctl/supervisor/supervisor.py, the answers of `python -m dtctl.runtime.snapshot` in
dtctl/runtime/snapshot/commands.py, which also reads the snapshots that lie on this machine.
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

from dtctl import folders
from dtctl.errors import NodeError

ANSWER_BYTES: Final = 64 << 20
"""Of one answer about snapshots: some 300,000 tensors."""
STDERR_BYTES: Final = 1 << 20
"""Of what a command has printed beside its answer; more is not read."""
PROSE: Final = 4000
"""Characters of a text for people; the rest is left out."""
DEPTH: Final = 32
"""Of what a snapshot's manifest says freely."""
MANY: Final = 200_000
"""Rows of a list, where the limit of bytes is not the closer one."""
WORKERS: Final = 4096
"""Of one node."""
STACK_CHARACTERS: Final = 1 << 20

Check: TypeAlias = Callable[[Any], Any]
"""Returns the value, perhaps shortened, or raises Wrong."""


class InvalidMessage(ValueError):
    """A message that does not match its schema; the text says where."""


# -- kinds of values ----------------------------------------------------------------------------------------------


def prose(value: Any) -> str:
    """A text for people, cut to a length that they read."""
    if not isinstance(value, str):
        raise InvalidMessage("not a string")
    return value if len(value) <= PROSE else f"{value[:PROSE]} ..."


def text(limit: int) -> Check:
    """A text that is used whole, or not at all."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise InvalidMessage(f"not a string of at most {limit} characters")
        return value

    return check


def integer(low: int, high: int = 1 << 63) -> Check:
    """An integer of a range, both ends included."""

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise InvalidMessage(f"not an integer from {low} to {high}")
        return value

    return check


def number(value: Any) -> float:
    """A number that a clock or a plot can have."""
    if type(value) is int and abs(value) < 1 << 63:
        return value
    if type(value) is not float or not math.isfinite(value):
        raise InvalidMessage("not a finite number")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidMessage("not a boolean")
    return value


def any_json(value: Any) -> Any:
    """Any JSON that is not too deep to be looked through."""
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > DEPTH:
            raise InvalidMessage(f"nested deeper than {DEPTH} levels")
        if isinstance(item, dict):
            todo += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            todo += [(inner, depth + 1) for inner in item]
    return value


def file_name(value: Any) -> str:
    """The name of one file, which is no path."""
    if not folders.is_name(value):
        raise InvalidMessage("not the name of a file")
    return str(value)


def path(value: Any) -> str:
    """A path for people to read and for its own node to be given back; nothing is opened by it here."""
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or not value.isprintable():
        raise InvalidMessage("not a path")
    return value


def address(value: Any) -> str:
    """A numeric address, or nothing."""
    try:
        return str(ipaddress.ip_address(value)) if value else ""
    except ValueError:
        raise InvalidMessage("not a numeric address") from None


def nullable(check: Check) -> Check:
    """The value, or null."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check, limit: int = MANY) -> Check:
    """A list of such values."""

    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > limit:
            raise InvalidMessage(f"not a list of at most {limit} items")
        return [check(item) for item in value]

    return check_all


def valid_items(check: Check, limit: int) -> Check:
    """As `each`, of which those that are wrong are left out: user programs can write what a node reports of them."""

    def check_some(value: Any) -> list[Any]:
        valid = []
        for item in list_of(lambda item: item, limit)(value):
            try:
                valid.append(check(item))
            except InvalidMessage:
                continue
        return valid

    return check_some


def mapping_of(check_name: Check, check: Check, limit: int = MANY) -> Check:
    """An object with names that are not known before."""

    def check_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > limit:
            raise InvalidMessage(f"not an object with at most {limit} keys")
        return {check_name(name): check(item) for name, item in value.items()}

    return check_all


def form(optional: Mapping[str, Check] | None = None, **needed: Check) -> Check:
    """An object with these keys; others are dropped."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidMessage("not an object")
        fields = {}
        for key, inner in (*needed.items(), *(optional or {}).items()):
            if key in value:
                try:
                    fields[key] = inner(value[key])
                except InvalidMessage as exc:
                    raise InvalidMessage(f"{key}: {exc}") from None
            elif key in needed:
                raise InvalidMessage(f"{key} is missing")
        return fields

    return check


# -- what a supervisor says ---------------------------------------------------------------------------------------

RANK: Final = integer(-1, 1 << 24)
COUNT: Final = integer(0)
PORT: Final = integer(0, 65_535)
_EXIT: Final = form(
    rank=RANK,
    code=integer(0, 255),
    signal=nullable(integer(1, 64)),
    optional={"why": prose, "asked": flag, "told": flag, "time": number},
)
WORKER: Final = form(
    rank=integer(0, 1 << 24), pid=COUNT, phase=integer(0, 255), step=COUNT, place=COUNT, first=COUNT, saved=COUNT,
    until=COUNT, optional={"committed": COUNT},
    begun_s=number, stale_s=number, slowest_s=number, stall_s=number, evaluation_s=number, state=text(1),
)  # fmt: skip
_WORKERS: Final = valid_items(WORKER, WORKERS)

_BEFORE: Final[dict[str, Check]] = {
    "hello": form(gpus=integer(0, WORKERS), address=address, port=PORT, optional={"python": text(40)}),
    "ready": form(),
    "push": form(
        state=text(40),
        optional={
            "path": path,
            "indexes": list_of(COUNT, 10_000_000),
            "digest": text(64),
            "code": text(40),
            "message": prose,
        },
    ),
    "swept": form(left=integer(0, 1 << 22), found=integer(0, 1 << 22)),
    "error": form(code=text(40), message=prose),
}
"""Until a run has started."""

_RUNNING: Final[dict[str, Check]] = {
    "started": form(optional={"interface": nullable(text(64))}),
    "exit": _EXIT,
    "stopped": form(
        left=integer(0, 1 << 22),
        exits=list_of(_EXIT, WORKERS),
        optional={"gone": flag, "lost": flag, "log_bytes_lost": COUNT, "record": prose},
    ),
    "pong": form(workers=_WORKERS),
    "progress": form(workers=_WORKERS, optional={"before_stop": flag}),
    "probed": form(port=PORT),
    "cold": form(why=prose),
    "metrics-begin": form(),
    "stack": form(
        rank=integer(0, 1 << 24),
        state=text(8),
        how=text(40),
        text=text(STACK_CHARACTERS),
        flight=text(STACK_CHARACTERS),
    ),
    "stacks-end": form(),
    "error": _BEFORE["error"],
}
"""From then on."""


def before_start(message: Mapping[str, Any], *, node: str) -> dict[str, Any]:
    """A supervisor's message before it has started a run, with its `op`.

    Raises:
        NodeError: it is none of those that there are, or has not their form.
    """
    return _supervisors(_BEFORE, message, node)


def while_running(message: Mapping[str, Any], *, node: str) -> dict[str, Any]:
    """A supervisor's message from the start of a run on, with its `op`.

    Raises:
        NodeError: as `before_start`.
    """
    return _supervisors(_RUNNING, message, node)


def _supervisors(checks: Mapping[str, Check], message: Mapping[str, Any], node: str) -> dict[str, Any]:
    op = message.get("op")
    check = checks.get(op) if isinstance(op, str) else None
    if check is None:
        raise NodeError(f"the node said {quoted(op)}, which is not valid here", node=node)
    return {"op": op, **checked(check, message, subject=f"its message {op!r}", node=node)}


def require_known(value: int, allowed: Collection[int], *, subject: str, node: str) -> int:
    """The value, if it is one of those that were asked about.

    Raises:
        NodeError: it is another one.
    """
    if value not in allowed:
        raise NodeError(f"the node reported {subject} {value}, which was not requested", node=node)
    return value


# -- what is said about snapshots ---------------------------------------------------------------------------------

_STEP: Final = integer(0)
_ROWS: Final = 100_000
_REJECTED: Final = list_of(prose, _ROWS)
_FILE: Final = form(size_bytes=COUNT, digest=text(128), optional={"part": nullable(text(255))})

_SNAPSHOTS: Final[dict[str, Check]] = {
    "ls": form(
        snapshots=list_of(form(path=path, step=_STEP, committed=flag, size_bytes=COUNT, time=number), _ROWS),
    ),
    "verify": form(
        snapshots=list_of(form(path=path, step=_STEP, status=text(20), bad=list_of(prose)), _ROWS),
        newest_good=nullable(path),
    ),
    "pieces": form(
        rows=list_of(
            form(
                path=path, step=_STEP, record=nullable(text(300)), manifest=nullable(text(ANSWER_BYTES)),
                good=list_of(file_name), bad=list_of(prose), made_s=number,
            ),
            _ROWS,
        ),
    ),
    "show": form(
        path=path, step=_STEP, rejected=_REJECTED, hash=text(20), facts=any_json,
        files=mapping_of(file_name, _FILE),
        tensors=mapping_of(text(4096), form(dtype=text(40), shape=list_of(COUNT, 64)), 1_000_000),
    ),
    "digest": form(path=path, step=_STEP, rejected=_REJECTED, digest=text(128)),
    "prune": form(kept=list_of(path, _ROWS), removed=list_of(path, _ROWS), optional={"left": list_of(path, _ROWS)}),
    "remove": form(removed=list_of(path, _ROWS), optional={"left": list_of(path, _ROWS)}),
    "export": form(path=path, step=_STEP, rejected=_REJECTED, size_bytes=COUNT, out=nullable(path)),
    "send": form(path=path, step=_STEP),
}  # fmt: skip
_NO: Final = form(error=prose, optional={"where": nullable(prose), "hint": nullable(prose)})
MANIFEST: Final = form(
    format=integer(1, 1000), step=_STEP, hash=text(20), facts=form(optional={"retention": any_json}),
    files=mapping_of(file_name, _FILE),
)  # fmt: skip


def about_snapshots(verb: str, output: str, *, node: str) -> dict[str, Any]:
    """The last line of what `python -m dtctl.runtime.snapshot VERB` has said: an answer, or an `error`.

    Raises:
        Wrong: there is no such line.
        NodeError: it has not the form of an answer.
    """
    lines = output.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):
        raise InvalidMessage("no answer") from None
    check = _NO if isinstance(answer, dict) and "error" in answer else _SNAPSHOTS[verb]
    return checked(check, answer, subject=f"its answer to `{verb}`", node=node)


def manifest(text: str, *, node: str) -> dict[str, Any]:
    """A snapshot's manifest, as a node has sent it.

    Raises:
        NodeError: it is none.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise NodeError("the node sent something that is not a manifest", node=node) from None
    return checked(MANIFEST, document, subject="a manifest", node=node)


def checked(check: Check, value: Any, *, subject: str, node: str) -> dict[str, Any]:
    """The value in its form.

    Raises:
        NodeError: it has another one.
    """
    try:
        result: dict[str, Any] = check(value)
    except InvalidMessage as exc:
        raise NodeError(
            f"{subject} is malformed: {exc}",
            node=node,
            hint="another version of dtctl may be installed there, or the node may be faulty",
        ) from None
    return result


def quoted(value: object) -> str:
    """A value that a node sent, shortened for an error message."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
