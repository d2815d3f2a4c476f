"""Ends of processes in messages of launchers, schedulers, shells and fault handlers: rank, signal or exit code.

torchrun's table, srun, mpirun, DeepSpeed, Lightning, spawn, Ray, Kubernetes and shells report ends in many forms. Here
they become one form: rank, node, exit code, signal, and a mark if the launcher reports the end as the first. Pure.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from dtctl.doctor.explain.lines import LogLine

SIGNALS = {
    "Killed": 9, "Terminated": 15, "Segmentation fault": 11, "Aborted": 6, "Abort": 6, "Bus error": 7, "Hangup": 1,
    "Interrupt": 2, "Illegal instruction": 4, "Floating point exception": 8, "Floating-point exception": 8,
    "Quit": 3, "Trace/breakpoint trap": 5, "User defined signal 1": 10, "User defined signal 2": 12,
    "Broken pipe": 13, "Alarm clock": 14, "CPU time limit exceeded": 24, "Cputime limit exceeded": 24,
    "File size limit exceeded": 25, "Filesize limit exceeded": 25, "Bad system call": 31,
    # Messages of shells in other languages.
    "已杀死": 9, "段错误": 11, "总线错误": 7, "已终止": 15, "已放弃": 6, "強制終了": 9, "죽었음": 9,
    "세그멘테이션 오류": 11, "Getötet": 9, "Speicherzugriffsfehler": 11, "Processus arrêté": 9,
    "Erreur de segmentation": 11, "Violación de segmento": 11, "Falha de segmentação": 11, "Ucciso": 9,
    "Errore di segmentazione": 11, "Убито": 9, "Ошибка сегментирования": 11,
}  # fmt: skip
MEANINGS = {
    3: "it received SIGQUIT, which ends it with a core file",
    5: "a trap of a debugger or of a check in native code",
    8: "an impossible calculation of whole numbers in native code, such as a division by zero",
    10: "a signal that a user or program sends on purpose; schedulers send it before the time limit",
    12: "a signal that a user or program sends on purpose; schedulers send it before the time limit",
    13: "the process that read its output has ended",
    14: "an alarm that the program has set itself",
    24: "the limit of processor time was reached (ulimit -t, or the scheduler's limit)",
    25: "the limit of the size of a file was reached (ulimit -f)",
    31: "a system call that its container or sandbox does not allow (seccomp)",
}
"""Signal -> reason for which the system sends the signal, or the sender."""
_NAMED = "|".join(SIGNALS)
_FATAL = (2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 24, 25, 31)
"""Signals that an exit code 128+N of a shell means."""
_SRUN = re.compile(
    r"srun: error: (?P<nodes>[\w.,\[\]-]+): tasks? (?P<tasks>[\d,-]+): (?P<how>Exited with exit code "
    r"(?P<code>\d+)|Out Of Memory|"
    + _NAMED + r")"
)  # fmt: skip
_FORMS = tuple(
    re.compile(form)
    for form in (
        r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+)",
        r"\(local_rank (?P<local>\d+)\) FAILED \(exitcode (?P<code>-?\d+)\)",
        r"--local[-_]rank=(?P<local>\d+)\b.*exits with return code = (?P<code>-?\d+)",  # DeepSpeed
        r"Signal (?P<signal>\d+) \(SIG\w+\) received by PID",
        r"process rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on signal (?P<signal>\d+)",
        r"MPI_ABORT was invoked on rank (?P<rank>\d+)",
        r"\[rank: (?P<rank>\d+)\] Child process with PID \d+ terminated with code (?P<code>-?\d+)",
        r"ProcessExitedException: process (?P<rank>\d+) terminated with (?:signal (?P<name>SIG\w+)|exit code "
        r"(?P<code>\d+))",
        r"= +KILLED BY SIGNAL: (?P<signal>\d+)",
        r"= +EXIT CODE: (?P<code>\d+)",
        r"^\s*Exit code: +(?P<code>\d+)$",
        r"\*\*\* (?P<name>SIG(?:SEGV|BUS|ABRT|FPE|ILL)) \(?@?received|\*\*\* Aborted at \d+ \(unix time\)",
        r"^Fatal Python error: (?P<what>" + _NAMED + r")",
        r"Caught signal (?P<signal>\d+) \(",
        r"^\s*Signal: [\w ]+ \((?P<signal>\d+)\)",
        r"(?i:exit(?:s|ed|ing)?|return(?:s|ed)?|terminated|finished|fail(?:s|ed)|crash(?:es|ed)?|died) "
        r"(?:with |by |due to )(?i:(?:a )?(?:non-zero )?(?:exit |return )?(?:code|status)):? ?[ =]? ?(?P<code>-?\d+)",
        r"(?i:exit|return) ?(?i:code|status) ?[=:] ?(?P<code>-?[1-9]\d*)\b",
        r"(?i:killed|terminated|exited|died|ended) (?:by|with|on|from|due to) "
        r"(?:(?:a )?[Ss]ignal:? (?P<signal>\d+)\b|(?:signal:? )?(?P<name>SIG[A-Z]{3,5})\b)",
        r"^(?:\S+: (?:line \d+|\S* ?\d+ \S*)[:：] +\d+ |\[\d+\]\s+\d+ +|\S+: line \d+: +)?(?P<what>"
        + _NAMED
        + r")(?: {4,}.*| \(core dumped\).*)?$",
        r"--local[-_]rank=(?P<local>\d+)\b.*returned non-zero exit status (?P<code>\d+)",  # torch.distributed.launch
        r"--local[-_]rank=(?P<local>\d+)\b.*died with <Signals\.(?P<name>SIG\w+)",
        r"[Cc]ontainer rank (?P<rank>\d+) status failed .*\bcode (?P<code>-?\d+) log",  # Paddle
        r"reason: ?(?P<what>OOMKilled)|Reason:\s+(?P<what2>OOMKilled)",
    )
)
_TABLE = re.compile(r"^\s+(?P<key>host|rank|exitcode|time|traceback|error_file)\s*: (?P<value>.*)$")
_TABLE_RANK = re.compile(r"(?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_MPICH = re.compile(r"= +(?:RANK (?P<rank>\d+) )?PID \d+ RUNNING AT (?P<node>\S+)")
_PROCESS_NAME = re.compile(r"Process name: \[\[(?:\d+|[^\],]*),\d+\],(?P<rank>\d+)\]")
_GATE = (
    "xit",
    "ignal",
    "SIG",
    "illed",
    "return",
    "code",
    "RUNNING AT",
    "EXIT CODE",
    "Process name",
    " host",
    " rank",
    "Root Cause",
    "====",
    "fault",
    "Aborted",
    "Terminated",
    "Bus error",
    "MPI_ABORT",
    "Fatal Python",
    "tasks",
    "task ",
    "Hangup",
    *(name for name in SIGNALS if not name.isascii()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedExit:
    """Exit of a process in a launcher's message."""

    code: int
    """Exit code as a shell reports it, 128 + N for signal N; 0 if only a signal is known."""
    signal: int
    """Number of the signal that has ended the process; 0 if no signal has."""
    ranks: tuple[int, ...] = ()
    node: str | None = None
    root: bool = False
    """True if the launcher reports this exit as the first failure."""
    out_of_memory: bool = False
    local: bool = False
    """True if the launcher reports only the local rank."""


@dataclass(slots=True)
class LauncherSummary:
    """State of the parser of a launcher's summary, such as torchrun's table."""

    host: str | None = None
    rank: int | None = None
    root: bool = False

    def read_summary_line(self, text: str) -> ReportedExit | None:
        """Return the exit that is completed by a line of torchrun's or mpirun's summary; None if there is none."""
        if text.startswith("Root Cause (first observed failure)"):
            self.root = True
        elif text.startswith("====="):
            self.root = False
        elif (mpich := _MPICH.search(text)) is not None:
            self.rank, self.host = int(mpich["rank"]) if mpich["rank"] else None, mpich["node"]
        elif (process := _PROCESS_NAME.search(text)) is not None:
            self.rank = int(process["rank"])
        elif text[:1].isspace() and (row := _TABLE.match(text)) is not None:
            if row["key"] == "host":
                self.host = row["value"].split()[0] if row["value"].split() else None
            elif row["key"] == "rank" and (who := _TABLE_RANK.match(row["value"])) is not None:
                self.rank = int(who["rank"])
            elif row["key"] == "exitcode" and (code := re.match(r"-?\d+", row["value"])) is not None:
                return _build_reported_exit(int(code[0]), 0, ranks=self._row_ranks, node=self.host, root=self.root)
        return None

    def has(self, text: str) -> bool:
        """Return whether a line is a row of the summary, so that it concerns the process of the rows above it."""
        return text[:1].isspace() and _TABLE.match(text) is not None

    @property
    def _row_ranks(self) -> tuple[int, ...]:
        return () if self.rank is None else (self.rank,)


def parse_reported_exit(line: LogLine, table: LauncherSummary) -> ReportedExit | None:
    """Return the end of a process that this line reports; None without one, or if the process succeeded."""
    text = line.text
    if not any(word in text for word in _GATE):
        return None
    if (row := table.read_summary_line(text)) is not None:
        return row
    if text.startswith("srun") and (srun := _SRUN.search(text)) is not None:
        return _parse_srun_exit(srun)
    if "potential root causes" in text:  # Ray lists reasons here that it cannot determine
        return None
    for form in _FORMS:
        found = form.search(text)
        if found is not None:
            return _of_form({key: value for key, value in found.groupdict().items() if value is not None}, table)
    return None


def _parse_srun_exit(found: re.Match[str]) -> ReportedExit | None:
    tasks = parse_slurm_tasks(found["tasks"])
    number = SIGNALS.get(found["how"], 0)
    nodes = found["nodes"]
    node = nodes if "[" not in nodes and "," not in nodes else None
    if found["how"] == "Out Of Memory":
        return ReportedExit(code=0, signal=9, ranks=tasks, node=node, out_of_memory=True)
    return _build_reported_exit(int(found["code"] or 0), number, ranks=tasks, node=node, root=False)


def _of_form(groups: dict[str, str], table: LauncherSummary) -> ReportedExit | None:
    if "OOMKilled" in groups.values():
        return ReportedExit(code=137, signal=9, out_of_memory=True)
    number = int(groups.get("signal", 0))
    if name := groups.get("name"):
        number = getattr(signal, name, signal.Signals(9)).value
    number = number or SIGNALS.get(groups.get("what", ""), 0)
    ranks = [int(groups[key]) for key in ("rank", "local") if key in groups][:1]
    known = tuple(ranks) if ranks else table._row_ranks
    return _build_reported_exit(
        int(groups.get("code", 0)),
        number,
        ranks=known,
        node=groups.get("node") or (None if ranks else table.host),
        root=False,
        local="local" in groups,
    )


def _build_reported_exit(
    code: int, number: int, *, ranks: tuple[int, ...], node: str | None, root: bool, local: bool = False
) -> ReportedExit | None:
    if code < 0:
        number, code = -code, 0
    elif not number and code - 128 in _FATAL:
        number = code - 128
    if not code and not number:
        return None
    return ReportedExit(code=code, signal=number, ranks=ranks, node=node, root=root, local=local)


def parse_slurm_tasks(tasks: str) -> tuple[int, ...]:
    """Return the tasks of `0-2,5` in Slurm's notation, at most a thousand."""
    found: list[int] = []
    for part in tasks.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found += range(int(first), min(int(last or first), int(first) + 1000) + 1)
    return tuple(found)


def format_signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
