"""Rank and node in the text of a line, in every form that launchers, schedulers and libraries use. Pure.

Module `lines` reads prefixes of a line (`[rank3]:`, `node1:4711:4801 [2]`); this module reads the text itself.
"""

from __future__ import annotations

import re

_NUMBER = r"[ _#:=]*(?P<{name}>\d{{1,5}})(?! ?[/%])(?: \([^)]{{0,60}}\))?:? "
_SUBJECT = (
    r"(?:global |container |worker |trainer |process |mpi )?(?:rank|(?<!dataloader )worker|trainer|replica)(?: rank)?"
    + _NUMBER
)
"""Patterns of a line's subject: `Global rank 3 (PID 4711)`."""
_FATE = (
    r"(?:has |was |is |got |status )?(?:crashed|failed|exited|died|dead|terminated|killed|timed out|caught|raised|"
    r"hit|got|received|skipping|running|aborted|encountered|stopped|lost|stuck|unreachable|ended)\b"
)
RANK = re.compile(
    r"(?i)(?:\(|\[|\b)(?:global[_ ]?)?rank(?:[_ ]?id)?\s*[=:]\s*(?P<rank>\d{1,5})\b|"
    r"^\W*(?:[\w.-]+\] )?rank (?P<at>\d{1,5})\b|"
    r"\[rank (?P<in>\d{1,5})\]|\(rank (?P<par>\d{1,5})\)|\b" + _SUBJECT.format(name="doing") + _FATE +
    r"|worker rank (?P<w>\d{1,5})\b|\bon rank (?P<on>\d{1,5})\b"
)  # fmt: skip
"""Pattern of the rank whose event a line reports."""
_PROCESS = re.compile(r"(?i)\bproc(?:ess)?" + _NUMBER.format(name="process") + r"(?!got signal\b)" + _FATE)
"""Pattern of a number that may be a rank or the process id of the system; in torch's `Process 182 got signal: 15` it is
a process id."""
_HOST = r"[A-Za-z][\w.-]*\d[\w.-]*\w|[A-Za-z][\w-]*\d"
NODE = re.compile(
    r"\bON (?P<on>[\w.-]+) CANCELLED|\b(?:on|at|from) node (?P<node>[\w.-]+\w)|\b(?:host|hostname|node(?:name)?)"
    r"\s*[=:]\s*['\"]?(?P<host>" + _HOST + r")|Worker IP address: (?P<worker>[\w.:]+)|"
    r"^srun: error: (?P<srun>[\w.-]+): tasks?|\bip=(?P<ip>\d+\.\d+\.\d+\.\d+)|^slurmstepd-(?P<stepd>[\w.-]+):|"
    r"\[proxy:\d+(?::\d+)?@(?P<proxy>[\w.-]+)\]|\bon (?P<remote>[\w.-]*[\w-]), is localhost: False|"
    r"RUNNING AT (?P<mpich>[\w.-]+)|^\[(?P<said>" + _HOST + r")\] [Rr]ank \d"
)
"""Pattern of the node whose event a line reports."""
_LAUNCHER = re.compile(r"\[mpiexec@(?P<node>[\w.-]+)\]")
"""Pattern of the launcher's host, which is the node of lines that name no other."""


def rank_named(text: str) -> int | None:
    """Return the rank that a line is about; None if the line names none.

    >>> rank_named("ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.")
    2
    """
    if "ank" not in text and "ANK" not in text and "orker" not in text:
        return None
    found = RANK.search(text)
    return int(next(value for value in found.groups() if value is not None)) if found else None


def process_named(text: str) -> int | None:
    """Return the number of the process that a line is about; it is a rank only if the job has such a rank.

    >>> process_named("Process 3 exited with code 1")
    3
    """
    found = _PROCESS.search(text) if "roc" in text else None
    return int(found["process"]) if found else None


def node_named(text: str) -> str | None:
    """Return the node that a line is about; None if the line names none.

    >>> node_named("srun: error: Task launch for 36.0 failed on node cn131: Job credential expired")
    'cn131'
    """
    found = NODE.search(text) or _LAUNCHER.search(text)
    return next(value for value in found.groups() if value is not None) if found else None
