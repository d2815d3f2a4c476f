"""What login_agent.py may answer from the machine of Slurm's commands: one schema per request."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from dtctl.launch.control.messages import (
    Check,
    InvalidMessage,
    checked,
    file_name,
    form,
    integer,
    list_of,
    mapping_of,
    nullable,
    number,
    path,
    prose,
    quoted,
    text,
)

BYTES: Final = 256 << 20
"""Of one answer: a piece of a megabyte from each rank's log."""
_FIELD: Final = text(4096)
_JOB: Final = re.compile(r"\d{1,18}\Z")
_LOG: Final = re.compile(r"(?:agent|rank-\d{1,9})\.log\Z")
_STACK: Final = re.compile(r"rank-\d{1,9}\.txt\Z|trace_rank_\d{1,9}\.json\Z")
_ATTEMPT: Final = re.compile(r"attempt-\d{1,9}\Z")


def _job(value: Any) -> str:
    if not isinstance(value, str) or not _JOB.match(value):
        raise InvalidMessage(f"{quoted(value)} is not the number of a job")
    return value


def _kept_file(value: Any) -> str:
    """One of the files that a job's folder has for whoever follows it."""
    if value in ("job.log", "metrics.jsonl", "progress.jsonl"):
        return str(value)
    parts = value.split("/") if isinstance(value, str) else []
    kinds = {"logs": _LOG, "hangs": _STACK}
    if len(parts) != 4 or parts[0] not in kinds or not (_ATTEMPT.match(parts[1]) and kinds[parts[0]].match(parts[3])):
        raise InvalidMessage(f"{quoted(value)} is not a file of the job")
    file_name(parts[2])
    return str(value)


def _file_part(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidMessage("not a part of a file")
    try:
        base64.b64decode(value[1], validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidMessage("not a part of a file") from None
    return [integer(0)(value[0]), value[1]]


def _partition(value: Any) -> dict[str, str]:
    form(PartitionName=_FIELD)(value)
    fields: dict[str, str] = mapping_of(text(256), _FIELD)(value)
    return fields


def _row(value: Any) -> list[str]:
    fields: list[str] = list_of(_FIELD, 16)(value)
    if len(fields) < 5:
        raise InvalidMessage("not a row that describes a node")
    return fields


_STATE: Final = form(
    JobState=text(64),
    optional={
        **dict.fromkeys(("Reason", "StartTime", "NodeList", "Partition", "TimeLimit", "Account", "QOS"), prose),
        "ExitCode": text(32), "Restarts": text(32), "ids": list_of(_job, 1000), "nodes": list_of(file_name, 100_000),
        "start": nullable(number),
    },
)  # fmt: skip
_SBATCH_OUTPUT: Final = {"code": integer(-255, 255), "said": prose}
_ANSWERS: Final[Mapping[str, Check]] = {
    "offer": form(
        partitions=list_of(_partition, 10_000),
        nodes=list_of(_row, 1_000_000),
    ),
    "place": form(folder=path),
    "fill": form(),
    "submit": form(code=_SBATCH_OUTPUT["code"], optional={"said": prose, "job": _job}),
    "test": form(code=_SBATCH_OUTPUT["code"], said=prose),
    "look": form(job=_STATE, files=mapping_of(_kept_file, _file_part)),
    "state": form(job=_STATE),
    "left": form(left=mapping_of(file_name, nullable(integer(0, 1 << 22))), how=prose),
}
_NO: Final = form(error=prose)


def answer(request: Mapping[str, Any], output: str, *, node: str) -> dict[str, Any]:
    """The answer to a request, or an `error`.

    Raises:
        Wrong: there is none.
        NodeError: it has not the form that was asked for.
    """
    if len(output) > BYTES:
        raise InvalidMessage("no answer")
    try:
        parsed = json.loads(output)
    except (ValueError, RecursionError):
        raise InvalidMessage("no answer") from None
    op = request["op"]
    subject = f"its answer to `{op}`"
    if isinstance(parsed, dict) and "error" in parsed:
        return checked(_NO, parsed, subject=subject, node=node)
    answer = checked(_ANSWERS[op], parsed, subject=subject, node=node)
    if op == "place":
        checked(lambda folder: _is_place(folder, request), answer["folder"], subject=subject, node=node)
    if op == "submit" and not answer["code"] and "job" not in answer:
        checked(_job, None, subject=subject, node=node)
    return answer


def _is_place(folder: str, request: Mapping[str, Any]) -> Any:
    # Snapshots are removed below it later on: it is the run's own.
    if not folder.startswith("/") or folder.split("/")[-2:] != ["slurm", request["run"]]:
        raise InvalidMessage(f"{quoted(folder)} is not a folder of the run")
    return folder
