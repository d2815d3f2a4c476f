"""Answers from the machine of Slurm's commands (dtctl/supervisor/slurm_commands.py): one type per request."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

from dtctl.launch.control.link import checked, quoted
from dtctl.schema import (
    InvalidMessage,
    Record,
    file_name,
    integer,
    list_of,
    mapping_of,
    nullable,
    number,
    pair,
    path,
    prose,
    text,
    value,
)

BYTES: Final = 256 << 20
"""Bytes of one answer: a piece of a megabyte from each rank's log."""
_FIELD: Final = text(4096)
_JOB: Final = re.compile(r"\d{1,18}(_\d{1,9})?\Z")
_LOG: Final = re.compile(r"(?:agent|rank-\d{1,9})\.log\Z")
_CONTROL: Final = re.compile(
    r"control/(?:(?:events|metrics)\.jsonl|(?:plan|ledger)\.json|logs/attempt\.json|logs/attempts\.jsonl"
    r"|logs/(?!\.)[\w.-]+/(?:agent|rank-\d{1,9})\.(?:log|times)"
    r"|hangs/attempt-\d{1,9}/(?!\.)[\w.-]+/(?:rank-\d{1,9}\.txt|trace_rank_\d{1,9}\.json))\Z"
)
"""A record of the launcher inside of the job."""
_ATTEMPT: Final = re.compile(r"attempt-\d{1,9}\Z")


def _job(value: Any) -> str:
    if not isinstance(value, str) or not _JOB.match(value):
        raise InvalidMessage(f"{quoted(value)} is not the number of a job")
    return value


def _kept_file(value: Any) -> str:
    """Return one of the files that a job's folder has for its followers."""
    if value in ("job.log", "metrics.jsonl"):
        return str(value)
    if isinstance(value, str) and _CONTROL.match(value):
        return value
    parts = value.split("/") if isinstance(value, str) else []
    if len(parts) != 4 or parts[0] != "logs" or not (_ATTEMPT.match(parts[1]) and _LOG.match(parts[3])):
        raise InvalidMessage(f"{quoted(value)} is not a file of the job")
    file_name(parts[2])
    return str(value)


def _contents(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidMessage("not a part of a file") from None


def _partition(value: Any) -> dict[str, str]:
    fields = mapping_of(text(256), _FIELD)(value)
    if "PartitionName" not in fields:
        raise InvalidMessage("PartitionName is missing")
    return fields


def _row(value: Any) -> list[str]:
    fields = list_of(_FIELD, 16)(value)
    if len(fields) < 5:
        raise InvalidMessage("not a row that describes a node")
    return fields


class JobFacts(Record):
    """Slurm's record of a job."""

    state: str = value(text(64))
    """Slurm's word, such as RUNNING."""
    reason: str = value(prose, default="")
    exit_code: str = value(text(32), default="")
    """CODE:SIGNAL of the batch script; empty while it is not known."""
    partition: str = value(prose, default="")
    account: str = value(prose, default="")
    qos: str = value(prose, default="")
    ids: list[str] = value(list_of(_job, 1000), default=[])
    """One for each component of a heterogeneous job."""
    nodes: list[str] = value(list_of(file_name, 100_000), default=[])
    """Empty while it has none."""
    node_list: str = value(text(1 << 20), default="")
    """Nodes as Slurm writes them; (null) of a job that has none, empty where Slurm does not report them."""
    restarts: str = value(text(32), default="0")
    start: float | None = value(nullable(number), default=None)
    """Time when it has started, or is expected to, in seconds since the epoch."""
    end: float | None = value(nullable(number), default=None)
    """Time when it has ended, or has to at the latest."""


_OWN_NAMES: Final = {
    "JobState": "state", "Reason": "reason", "ExitCode": "exit_code", "Partition": "partition", "Account": "account",
    "QOS": "qos", "NodeList": "node_list", "Restarts": "restarts",
}  # fmt: skip


def _job_facts(document: Any) -> JobFacts:
    if not isinstance(document, dict):
        raise InvalidMessage("not an object")
    return JobFacts.parse({_OWN_NAMES.get(name, name): item for name, item in document.items()})


class AgentAnswer(Record):
    """An answer to the request `op`."""

    op: ClassVar[str]


class Offer(AgentAnswer):
    """Resources of the cluster."""

    op = "offer"
    partitions: list[dict[str, str]] = value(list_of(_partition, 10_000))
    """Fields of `scontrol show partition`."""
    nodes: list[list[str]] = value(list_of(_row, 1_000_000))
    """Columns of sinfo: name, partition, state, gres, features."""


class RunPlace(AgentAnswer):
    """The run's folder is there."""

    op = "place"
    folder: str = value(path)


class Filled(AgentAnswer):
    """The run's folder has its files."""

    op = "fill"


class Submitted(AgentAnswer):
    """Result of sbatch."""

    op = "submit"
    code: int = value(integer(-255, 255))
    ignored: list[str] = value(list_of(text(256), 1000))
    """Variables of the shell there that would have changed the job, and were not used."""
    used: list[str] = value(list_of(text(256), 1000))
    """Nodes that were used."""
    said: str = value(prose, default="")
    job: str = value(_job, default="")
    """Job id, if it was accepted."""


class JobFound(AgentAnswer):
    """Numbers of the jobs that were submitted from a batch file; None if Slurm does not answer."""

    op = "find"
    jobs: list[str] | None = value(nullable(list_of(_job, 10_000)))


class OutputsCounted(AgentAnswer):
    """Files that a run has left in its working folder."""

    op = "outputs"
    files: int = value(integer(0))
    bytes: int = value(integer(0))


class Tested(AgentAnswer):
    """Result of `sbatch --test-only`."""

    op = "test"
    code: int = value(integer(-255, 255))
    said: str = value(prose)


class JobLook(AgentAnswer):
    """State of the job, and the part of its files that is not known yet."""

    op = "look"
    job: JobFacts = value(_job_facts)
    files: dict[str, tuple[int, bytes]] = value(mapping_of(_kept_file, pair(integer(0), _contents)))
    """File -> offset, and what stands there."""


class JobAsked(AgentAnswer):
    """State of the job."""

    op = "state"
    job: JobFacts = value(_job_facts)


class Counted(AgentAnswer):
    """Node -> processes of the job on it; None where unknown."""

    op = "left"
    left: dict[str, int | None] = value(mapping_of(file_name, nullable(integer(0, 1 << 22))))
    how: str = value(prose)


class _Error(Record):
    error: str = value(prose)


A = TypeVar("A", bound=AgentAnswer)


def parse(kind: type[A], request: Mapping[str, Any], output: str, *, node: str) -> A:
    """Return the answer to a request.

    Raises:
        InvalidMessage: there is none.
        NodeError: it has not the requested form.
        AgentRefused: it reports that it cannot be done.
    """
    if len(output) > BYTES:
        raise InvalidMessage("no answer")
    try:
        document = json.loads(output)
    except (ValueError, RecursionError):
        raise InvalidMessage("no answer") from None
    subject = f"its answer to `{kind.op}`"
    if isinstance(document, dict) and "error" in document:
        raise AgentRefused(checked(_Error.parse, document, subject=subject, node=node).error)
    answer = checked(kind.parse, document, subject=subject, node=node)
    if isinstance(answer, RunPlace):
        checked(lambda folder: _is_place(folder, request), answer.folder, subject=subject, node=node)
    if isinstance(answer, Submitted) and not answer.code:
        checked(_job, answer.job, subject=subject, node=node)
    return answer


class AgentRefused(Exception):
    """The machine cannot fulfil the request, for the reason in the text."""


def _is_place(folder: str, request: Mapping[str, Any]) -> Any:
    # Snapshots are removed below it later on: it is the run's own.
    if not folder.startswith("/") or folder.split("/")[-2:] != ["slurm", request["run"]]:
        raise InvalidMessage(f"{quoted(folder)} is not a folder of the run")
    return folder
