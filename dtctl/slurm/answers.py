"""Answers from the machine of Slurm's commands (dtctl/supervisor/slurm_commands.py): one type per request."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

from dtctl.launch.control.link import quote_node_value, validate_node_value
from dtctl.schema import (
    InvalidMessage,
    Record,
    check_file_name,
    check_number,
    check_path,
    check_prose,
    define_record_key,
    list_of,
    make_integer_check,
    make_nullable_check,
    make_text_check,
    make_two_item_check,
    mapping_of,
)

BYTES: Final = 256 << 20
"""Largest size of one answer, in bytes. An answer has up to a megabyte of each rank's log."""
_FIELD: Final = make_text_check(4096)
_JOB: Final = re.compile(r"\d{1,18}(_\d{1,9})?\Z")
_LOG: Final = re.compile(r"(?:agent|rank-\d{1,9})\.log\Z")
_CONTROL: Final = re.compile(
    r"control/(?:(?:events|metrics)\.jsonl|(?:plan|ledger)\.json|logs/attempt\.json|logs/attempts\.jsonl"
    r"|logs/(?!\.)[\w.-]+/(?:agent|rank-\d{1,9})\.(?:log|times)"
    r"|hangs/attempt-\d{1,9}/(?!\.)[\w.-]+/(?:rank-\d{1,9}\.txt|trace_rank_\d{1,9}\.json))\Z"
)
"""Pattern of the files that the launcher inside the job writes."""
_ATTEMPT: Final = re.compile(r"attempt-\d{1,9}\Z")


def _check_job_number(value: Any) -> str:
    if not isinstance(value, str) or not _JOB.match(value):
        raise InvalidMessage(f"{quote_node_value(value)} is not the number of a job")
    return value


def _kept_file(value: Any) -> str:
    """Check the name of a file in the job's folder that followers copy, and return it."""
    if value in ("job.log", "metrics.jsonl"):
        return str(value)
    if isinstance(value, str) and _CONTROL.match(value):
        return value
    parts = value.split("/") if isinstance(value, str) else []
    if len(parts) != 4 or parts[0] != "logs" or not (_ATTEMPT.match(parts[1]) and _LOG.match(parts[3])):
        raise InvalidMessage(f"{quote_node_value(value)} is not a file of the job")
    check_file_name(parts[2])
    return str(value)


def _decode_file_part(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidMessage("not a part of a file") from None


def _check_partition(value: Any) -> dict[str, str]:
    fields = mapping_of(make_text_check(256), _FIELD)(value)
    if "PartitionName" not in fields:
        raise InvalidMessage("PartitionName is missing")
    return fields


def _check_node_row(value: Any) -> list[str]:
    fields = list_of(_FIELD, 16)(value)
    if len(fields) < 5:
        raise InvalidMessage("not a row that describes a node")
    return fields


class JobFacts(Record):
    """Slurm's record of a job."""

    state: str = define_record_key(make_text_check(64))
    """Slurm's name of the state, such as RUNNING."""
    reason: str = define_record_key(check_prose, default="")
    exit_code: str = define_record_key(make_text_check(32), default="")
    """Exit code of the batch script as CODE:SIGNAL; empty while the code is not known."""
    partition: str = define_record_key(check_prose, default="")
    account: str = define_record_key(check_prose, default="")
    qos: str = define_record_key(check_prose, default="")
    ids: list[str] = define_record_key(list_of(_check_job_number, 1000), default=[])
    """Numbers of the components of a heterogeneous job; empty for any other job."""
    nodes: list[str] = define_record_key(list_of(check_file_name, 100_000), default=[])
    """Nodes of the job; empty while Slurm has given it none."""
    node_list: str = define_record_key(make_text_check(1 << 20), default="")
    """Nodes in Slurm's notation; `(null)` for a job without nodes, empty if Slurm does not report them."""
    restarts: str = define_record_key(make_text_check(32), default="0")
    start: float | None = define_record_key(make_nullable_check(check_number), default=None)
    """Time of the job's start, or Slurm's estimate of it, in seconds since the epoch."""
    end: float | None = define_record_key(make_nullable_check(check_number), default=None)
    """Time of the job's end, or of its time limit while it runs, in seconds since the epoch."""


_OWN_NAMES: Final = {
    "JobState": "state", "Reason": "reason", "ExitCode": "exit_code", "Partition": "partition", "Account": "account",
    "QOS": "qos", "NodeList": "node_list", "Restarts": "restarts",
}  # fmt: skip


def _job_facts(document: Any) -> JobFacts:
    if not isinstance(document, dict):
        raise InvalidMessage("not an object")
    return JobFacts.parse({_OWN_NAMES.get(name, name): item for name, item in document.items()})


class SlurmAnswer(Record):
    """Answer to the request whose name is `op`."""

    op: ClassVar[str]


class ClusterResources(SlurmAnswer):
    """Resources of the cluster."""

    op = "offer"
    partitions: list[dict[str, str]] = define_record_key(list_of(_check_partition, 10_000))
    """Fields of `scontrol show partition`."""
    nodes: list[list[str]] = define_record_key(list_of(_check_node_row, 1_000_000))
    """Columns of sinfo: name, partition, state, gres, features."""


class SubmissionSite(ClusterResources):
    """Resources of the cluster, and the place of a run's folder, which does not exist yet."""

    op = "place"
    folder: str = define_record_key(check_path)


class SbatchResult(SlurmAnswer):
    """Result of sbatch in the run's new folder: its exit code, its messages, and the job's number."""

    op = "submit"
    code: int = define_record_key(make_integer_check(-255, 255))
    ignored: list[str] = define_record_key(list_of(make_text_check(256), 1000))
    """Variables of that machine's shell that would have changed the job and were removed."""
    used: list[str] = define_record_key(list_of(make_text_check(256), 1000))
    """Variables of that machine's shell that sbatch has used."""
    said: str = define_record_key(check_prose, default="")
    job: str = define_record_key(_check_job_number, default="")
    """Number of the job, if Slurm accepted it."""


class FoundJobs(SlurmAnswer):
    """Numbers of the jobs that were submitted from a batch file, or None if Slurm does not answer."""

    op = "find"
    jobs: list[str] | None = define_record_key(make_nullable_check(list_of(_check_job_number, 10_000)))


class OutputCount(SlurmAnswer):
    """Number and size of the files that a run has left in its working folder."""

    op = "outputs"
    files: int = define_record_key(make_integer_check(0))
    bytes: int = define_record_key(make_integer_check(0))


class SbatchTestResult(SlurmAnswer):
    """Result of `sbatch --test-only`."""

    op = "test"
    code: int = define_record_key(make_integer_check(-255, 255))
    said: str = define_record_key(check_prose)


class JobUpdate(SlurmAnswer):
    """State of the job, and the parts of its files that the follower has not read yet."""

    op = "look"
    job: JobFacts = define_record_key(_job_facts)
    files: dict[str, tuple[int, bytes]] = define_record_key(
        mapping_of(_kept_file, make_two_item_check(make_integer_check(0), _decode_file_part))
    )
    """File -> offset, and the bytes from that offset on."""


class JobStatus(SlurmAnswer):
    """State of the job."""

    op = "state"
    job: JobFacts = define_record_key(_job_facts)


class JobProcessCounts(SlurmAnswer):
    """Node -> number of the job's processes on it; None if the number is unknown."""

    op = "left"
    left: dict[str, int | None] = define_record_key(
        mapping_of(check_file_name, make_nullable_check(make_integer_check(0, 1 << 22)))
    )
    how: str = define_record_key(check_prose)


class _ErrorAnswer(Record):
    error: str = define_record_key(check_prose)


A = TypeVar("A", bound=SlurmAnswer)


def parse_login_answer(kind: type[A], request: Mapping[str, Any], output: str, *, node: str) -> A:
    """Return the answer to a request.

    Raises:
        InvalidMessage: the output has no answer.
        NodeError: the answer does not have the requested form.
        SlurmRequestRefused: the answer reports that the request cannot be fulfilled.
    """
    if len(output) > BYTES:
        raise InvalidMessage("no answer")
    try:
        document = json.loads(output)
    except (ValueError, RecursionError):
        raise InvalidMessage("no answer") from None
    subject = f"its answer to `{kind.op}`"
    if isinstance(document, dict) and "error" in document:
        raise SlurmRequestRefused(validate_node_value(_ErrorAnswer.parse, document, subject=subject, node=node).error)
    answer = validate_node_value(kind.parse, document, subject=subject, node=node)
    if isinstance(answer, SubmissionSite):
        validate_node_value(lambda folder: _is_place(folder, request), answer.folder, subject=subject, node=node)
    if isinstance(answer, SbatchResult) and not answer.code:
        validate_node_value(_check_job_number, answer.job, subject=subject, node=node)
    return answer


class SlurmRequestRefused(Exception):
    """Error of a request that the machine of Slurm's commands cannot fulfil; the text has the reason."""


def _is_place(folder: str, request: Mapping[str, Any]) -> Any:
    # Snapshots below this folder are removed later, so it must be the run's own.
    if not folder.startswith("/") or folder.split("/")[-2:] != ["slurm", request["run"]]:
        raise InvalidMessage(f"{quote_node_value(folder)} is not a folder of the run")
    return folder
