"""Search of log lines for known texts, exceptions with their chains, and ends of processes, by process. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from dtctl.doctor.explain import activity, attribution, collective, exception_classes, launchers, signatures
from dtctl.doctor.explain.launchers import ReportedExit
from dtctl.doctor.explain.lines import PROGRESS, LogLine, parse_log_line
from dtctl.doctor.explain.log_findings import LogFindings, LogSource, SignatureMatch
from dtctl.doctor.explain.several_runs import LASTING, RunStartFinder, is_of_a_parent, mark_earlier_runs
from dtctl.doctor.explain.signatures import Signature
from dtctl.doctor.explain.tracebacks import TracebackReader

UNLABELLED = 5
"""Lines of progress after a traceback without a rank, until it counts as survived: ranks die one after another, and
another rank may print in between."""
CALM = 8
"""Number of ordinary lines after which a line that only looks like an error counts as survived."""
LONG_CALM = 40
"""Number of ordinary lines after which a warning of NCCL counts as survived; libraries print lines while a job
hangs."""
STICKY = frozenset(["device-assert", "illegal-access", "launch-failure"])
"""Faults from which a process cannot recover, since its CUDA context is lost."""
BY_A_SHELL = frozenset(["command-missing", "conda-missing"])
"""Faults after which a shell script continues."""
_WANTS_THE_ENVIRONMENT = frozenset(
    [
        "missing-module",
        "part-missing",
        "import-failed",
        "missing-library",
        "undefined-symbol",
        "version-conflict",
        *BY_A_SHELL,
    ]
)
"""Faults that may result from a missing command which should have prepared the job's environment."""
SCRIPT_GOES_ON = 20
"""Number of ordinary lines after a missing command, until the script counts as continued without it."""
ATTENTION = 400
"""Number of lines after a finding that are all examined."""
OFTEN = 64
"""Number of lines of one form that are examined completely; afterwards every `SAMPLE`th is."""
SAMPLE = 7
OPEN_HITS = 2000
FORMS = 200_000
_DIGITS = dict.fromkeys(map(ord, "0123456789"))
_NOT_A_NUMBER = re.compile(r"\bnan\b", re.IGNORECASE)
_ENDED_WELL = re.compile(
    r"\btraining (?:is |has )?(?:finished|completed?|done|ended)\b(?!.*(?:error|fail))"
    r"|\b(?:finished|completed|end(?: of)?) training\b(?!.*(?:error|fail))"
    r"|训练(?:已?完成|结束|完毕)|学習(?:が|を)?(?:完了|終了)|학습 ?(?:완료|종료)"
    r"|treinamento (?:conclu[ií]do|finalizado)|entrenamiento (?:finalizado|completado|terminado)"
    r"|entra[iî]nement (?:est )?terminé|training (?:ist )?abgeschlossen"
    r"|\b(?:finished|completed|exited|succeeded) successfully\b|^(?:all )?done[.!]?$|\bJob "
    r"completed\b(?!.*(?:error|fail))"
    r"|'train_runtime': \d|\bexit(?:ed)? (?:with )?(?:code|status):? ?0\b(?!:)|\bExitCode=0:0|\bState: +COMPLETED\b",
    re.IGNORECASE,
)
_WARNING = re.compile(
    r": [WI] (?:tensorflow|external|xla)/|[Ee]rror caught was|\boptional\b|(?<!NCCL )\bWARN(?:ING)?\b|"
    r"\b(?:INFO|DEBUG)\b|\[W\d{3,4} |\[W |^W\d{4} |\w+Warning\b|\b[Ww]arnings?:|\b[Rr]etry|"
    r"\bfall(?:ing|s)? ?back\b|\bignor(?:ed|ing)\b|\bskipp(?:ed|ing)\b|"
    r"\b(?:going|switching|reverting|defaulting) to \S+ instead\b|"
    r"\baccepting this\b|\bharmless\b|\bcan be ignored\b|\bnot (?:fatal|an error)\b"
)
"""Pattern of a line that is not a failure, such as a warning."""
_JSON_TEXTS = ("message", "msg", "log", "text", "event", "error", "exc_info", "exception", "stack")
_NEWS = re.compile(r"\b(?:INFO|DEBUG)\b|\b[Rr]etry|\bfall(?:ing|s)? ?back\b|\bignor(?:ed|ing)\b")
"""Pattern of a line that only reports progress."""
_COMPLAINS = re.compile(r"rror|ERROR|CRITICAL|FATAL|xception")
_SAYS_SO = re.compile(
    r"NCCL WARN|\b[Ee]rror|\bERROR\b|\bFATAL\b|\b[Ff]atal\b|\bCRITICAL\b|Exception\b|\[E |\[[EF]\d{3,4} |"
    r"^[EF]\d{4} |\bkernel\b|NVRM|what\(\)|terminate|[Aa]bort|Killed|[Ff]ail(?:ed|ure)\b|\bFAILED\b"
)
"""Pattern of a line that calls itself an error."""
_WEAK = re.compile(
    r"(?:^|[\s\]|:-])(?:ERROR|CRITICAL|FATAL|Fatal error|FAILED|panic)\b(?!\s*(?:rate|bars?|=|s\b))|^(?:\S+: "
    r")?(?:fatal |internal )?error: |^Error\b[: ]|\bgiving up\b|\b[Aa]borting\b|panicked at|^\w+(?:\.\w+)*: "
    r"FATAL|[Ff]ailed to (?:start|launch|initiali[sz]e|connect|allocate|create|load|open)|Check failed: |"
    r"^Assertion `|: Assertion `"
)
_GOES_ON_WITHOUT = re.compile(
    r"(?i)could not find|failed to open|missing|plugin|deprecated|fall(?:ing)? ?back|disabl|ignor"
)
_WEAK_WORDS = (
    "rror",
    "ERROR",
    "CRITICAL",
    "FATAL",
    "FAILED",
    "anic",
    "giving up",
    "borting",
    "ailed to",
    "Check failed",
    "Assertion",
)
"""Words of a line with an unknown error message."""
_LEVEL = re.compile(
    r"ERROR|CRITICAL|FATAL|FAILED|[Ff]atal|rror: |^Error|panic|borting|giving up|Assertion|Check failed"
)
"""Pattern of error messages that report more than a failed attempt."""
_BY_A_SCRIPT = re.compile(
    r"^(?:all )?done[.!]?$|\bexit(?:ed)? (?:with )?(?:code|status)|\bExitCode=|\bState: ", re.IGNORECASE
)
"""Pattern of last lines of a shell or a launcher, which may follow the failure of a process."""
STILL_ENDING = 60
"""Number of lines after one of these last lines within which the end of a job belongs to the same job; later, a script
may have started another one."""
STEPS_OF_ANOTHER = 5
"""Number of lines of progress after the end of a training run that only another run can have printed."""
_CONTENT_MATTERS = re.compile(
    r"(?i)exit|error_file|code\b|signal|errno|xid|status|timed|joined|completion|http|watchdog|lagging|work:|local_rank|"
    r"\bhost\s*:|Root Cause|={5}|RUNNING AT|Process name"
)
_NCCL_RANK = re.compile(
    r"(?:NCCL )?INFO .*\brank (?P<rank>\d+) (?:nranks|nRanks) \d+|(?:NCCL )?INFO .*\brank (?P<also>\d+) .*\bcudaDev \d+"
)


COMPLAINT = Signature(
    id="complaint", patterns=(), cause="", fix="", source="", example="", role="note",
)  # fmt: skip


@dataclass(slots=True)
class _ProcessState:
    """State of the lines of one process in one file."""

    reader: TracebackReader = field(default_factory=TracebackReader)


@dataclass(slots=True)
class _FileState:
    """State of the lines of one file."""

    lines: Sequence[str]
    streams: dict[tuple[int | None, str | None, str | None], _ProcessState] = field(default_factory=dict)
    table: launchers.LauncherSummary = field(default_factory=launchers.LauncherSummary)
    time: float | None = None
    last: tuple[int | None, str | None, str | None] = (None, None, None)
    """Process of the last line."""
    attend: int = 0
    """Number of the line up to which all lines are examined."""
    open: list[tuple[SignatureMatch, int]] = field(default_factory=list)
    """Hits that may still prove to be survived, with the number of lines of progress that would show it."""
    complaining: bool = False
    """True if lines with unknown error messages are among these hits."""
    ended: bool = False
    """True if a line reports the successful end of the training run."""
    ended_at: int = 0
    """Number of the last line of the job's end."""
    after_end: int = 0
    """Number of lines of progress after that line."""
    starts: RunStartFinder = field(default_factory=RunStartFinder)


class _LogScanner:
    """Scanner that reads one file after another."""

    def __init__(self) -> None:
        self.found = LogFindings()
        self.forms: dict[str, int] = {}
        self.rank_of: dict[tuple[str, str], int] = {}
        self.raised: list[SignatureMatch] = []

    def file(self, source: LogSource) -> None:
        """Scan the lines of a file; of lines with a known form, only some are examined completely."""
        lines = _split_folded_lines(source.lines)
        state = _FileState(lines=lines)
        end = len(lines) - 300
        for index, raw in enumerate(lines):
            form = (raw if len(raw) <= 1000 else raw[:800] + raw[-200:]).translate(_DIGITS)
            seen = self.forms.get(form, 0)
            if state.starts.check_run_start(form, index + 1) and index + 1 < len(lines):
                state.starts.confirm_run_start(lines[index + 1].translate(_DIGITS))
            if seen:
                self.forms[form] = seen + 1
                if seen > OFTEN and state.attend < index < end and index % SAMPLE:
                    continue
            line = parse_log_line(
                raw.rstrip("\r"), file=source.file, number=index + 1, rank=source.rank, node=source.node
            )
            self._record_line_facts(line)
            if not self._scan_line(line, index, state, known_form=seen > 0) and not seen and len(self.forms) < FORMS:
                self.forms[form] = 1
        for stream in state.streams.values():
            if (cut := stream.reader.get_unfinished_traceback()) is not None and cut.line.number > state.starts.went_on:
                hit = _build_hit(signatures.find_exception_kind("traceback-cut"), cut.line, {})
                hit.raised = cut
                self.raised.append(hit)
                self._add_hit(hit, state)
        mark_earlier_runs(self.found, source.file, state.starts, lines=len(lines))
        self.found.length[source.file] = len(lines)
        self.found.last_said = activity.find_last_activity(lines, len(lines)) or self.found.last_said

    def _scan_line(self, line: LogLine, index: int, state: _FileState, *, known_form: bool) -> bool:
        """Process a line; return whether the next line of the same form may add information."""
        if line.time is not None:
            # The time is of another year, or no time at all.
            apart = state.time is not None and abs(line.time - state.time) > 1e6
            state.time = line.time if state.time is None or apart else max(line.time, state.time)
        key = (line.rank, line.node, line.pid)
        stream = state.streams.setdefault(key, _ProcessState())
        hits = (
            [] if known_form and not stream.reader.is_in_traceback else self._find_line_hits(line, stream, state.table)
        )
        before = state.streams.get(state.last)
        for hit in hits:
            self._add_hit(hit, state)
            if (
                hit.bare
                and line.rank is None
                and before is not None
                and before.reader.opened
                and state.last[0] is not None
            ):
                hit.rank, before.reader.opened = state.last[0], 0  # the last line of a traceback, without its prefix
            if len(self.found.hits) < 200:
                begun = index - (len(hit.raised.frames) * 2 + 1 if hit.raised else 0)
                hit.before = activity.find_last_activity(state.lines, begun)
            if hit.signature.id in LASTING:
                state.starts.steps = 0
            else:
                state.open.append((hit, _count_survival_lines(hit)))
                state.complaining = (
                    state.complaining or hit.signature is COMPLAINT or _is_unmarked_text(hit) or _by_a_shell(hit)
                )
            near = line.number - state.ended_at <= STILL_ENDING
            hit.late = state.ended and (near or not hit.signature.ends)
            state.attend = index + ATTENTION
        state.last = key
        if stream.reader.is_in_traceback:
            state.attend = max(state.attend, index + 100)
        if not hits:
            _mark_survived_hits(line, state, ordinary=not stream.reader.opened)
        return bool(hits) or stream.reader.is_in_traceback or _CONTENT_MATTERS.search(line.text) is not None

    def _add_hit(self, hit: SignatureMatch, state: _FileState) -> None:
        hit.time, hit.order = state.time, len(self.found.hits) + len(self.found.complaints)
        (self.found.complaints if hit.signature is COMPLAINT else self.found.hits).append(hit)

    def _record_line_facts(self, line: LogLine) -> None:
        """Record the facts in a line other than failures."""
        found, text = self.found, line.text
        if line.node is not None:
            found.nodes.add(line.node)
        if line.rank is not None:
            found.ranks.add(line.rank)
            if line.node is not None:
                found.node_of.setdefault(line.rank, line.node)
        if line.node is not None and line.pid is not None and (known := _NCCL_RANK.match(text)) is not None:
            self.rank_of[line.node, line.pid] = int(known["rank"] or known["also"])
        if "Using" in text or "IFNAME" in text:
            found.interfaces.record_interfaces(text)
        found.facts.add_log_line(line)
        if "orld" in text or "anks" in text or "WORLD" in text or "clients joined" in text:
            found.world = max(found.world, collective.world_in(text))
        if "work" in text or "WorkNCCL" in text or "lagging" in text:
            found.watching.append(line)
            rank = collective.rank_in(line) if "atchdog" in text else None
            if rank is not None:
                found.ranks.add(rank)

    def _find_line_hits(
        self, line: LogLine, stream: _ProcessState, table: launchers.LauncherSummary
    ) -> list[SignatureMatch]:
        silent, raised = stream.reader.feed(line)
        if silent:
            return []
        if raised is not None:
            if line.text.startswith("  ") and table.rank is not None:  # the line is in torchrun's table
                raised.rank, raised.node = table.rank, table.host
            hit = _build_hit(signatures.find_exception_kind("exception"), line, {})
            hit.raised, hit.bare = raised, raised.bare
            hit.rank = raised.rank if raised.rank is not None else hit.rank
            hit.node = raised.node or hit.node
            hit.warned = raised.told or _WARNING.search(line.raw[: max(0, line.raw.find(raised.name))]) is not None
            self.raised.append(hit)
            end = launchers.parse_reported_exit(line, table) if raised.short == "CalledProcessError" else None
            return [hit] if end is None else [hit, _of_exit(end, line)]
        text = line.text
        if "resource_tracker" in text or text.startswith("ras/"):
            return []  # Python's cleanup after a process that has ended; NCCL's service for queries, which no job needs
        end = launchers.parse_reported_exit(line, table)
        if end is not None:
            return [_of_exit(end, line)]
        if (
            text.startswith("    ") and stream.reader.opened
        ):  # the source lines of a traceback may quote the texts of errors
            return []
        known = signatures.find_best(text)
        if known is not None:
            hit = _build_hit(
                known[0], line, {"text": text.strip()[:300], "where": "the line that its traceback names", **known[1]}
            )
            if table.has(text):
                hit.rank, hit.node = table.rank, table.host
            hit.warned = (_WARNING if hit.signature.role == "cause" else _NEWS).search(line.raw) is not None
            sticky = "NCCL WARN" in line.raw or hit.signature.id in STICKY
            hit.warned = hit.warned and not sticky and hit.signature.role != "symptom"
            if not _SAYS_SO.search(line.raw) and not signatures.SPOKEN_BY_TOOLS.search(known[0].source):
                hit.weight = 0  # the line has no mark of an error, so an exception counts more
            return [hit]
        if (
            any(word in text for word in _WEAK_WORDS)
            and _WEAK.search(text)
            and not _WARNING.search(text)
            and "NCCL WARN" not in line.raw
        ) or _complaint_of_nccl(line.raw):
            return [_build_hit(COMPLAINT, line, {})]
        return []

    def finish(self) -> LogFindings:
        """Classify the exceptions, assign them to ranks, and drop exceptions that are only a part of another one."""
        chained = {
            id(one)
            for hit in self.raised
            if hit.raised is not None and not hit.raised.passed_on
            for one in hit.raised.chain()
        }
        kept = [hit for hit in self.found.hits if not _is_part_of_another(hit, chained)]
        for hit in kept:
            self._classify_hit(hit)
        for hit in kept:
            if hit.rank is None and not hit.ranks:
                hit.rank = self._rank_of_process(hit.line)
            if _ended_one_command(hit) and any(_ran_without(hit, other) for other in kept):
                hit.survived = True
        self.found.hits = kept
        self.found.complaints = [hit for hit in self.found.complaints if not hit.survived]
        for (node, _), rank in self.rank_of.items():
            self.found.node_of.setdefault(rank, node)
        for hit in kept:
            if hit.rank is not None and hit.node is not None and hit.signature.blames == "self":
                self.found.node_of.setdefault(hit.rank, hit.node)
        return self.found

    def _classify_hit(self, hit: SignatureMatch) -> None:
        if hit.raised is not None:
            _resolve_hit_exception(hit)
        if hit.rank is None and hit.line.pid is not None and hit.node is not None:
            hit.rank = self.rank_of.get((hit.node, hit.line.pid))
        if hit.late and hit.end is not None and hit.end.signal in (6, 11):
            hit.signature = signatures.by_id("aborted-at-exit")
        elif hit.late and (hit.signature.ends or hit.signature.role == "effect" or _is_at_exit(hit)):
            hit.survived = True  # the process only cleans up

    def _rank_of_process(self, line: LogLine) -> int | None:
        """Return the rank that a line names as a process; most such numbers are the system's process ids."""
        number = attribution.process_named(line.raw)
        there = number is not None and (number in self.found.ranks or number < self.found.world)
        return number if there and str(number) != line.pid else None


def _is_part_of_another(hit: SignatureMatch, chained: Collection[int]) -> bool:
    """Return whether a hit is part of another exception (`chained`, by id), or was ignored by Python."""
    if hit.raised is None:
        return False
    if hit.raised.passed_on and id(hit.raised) in chained:
        return True
    return hit.raised.ignored or any(one.ignored for one in hit.raised.chain())


def _split_folded_lines(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines, after splitting those that contain several lines, such as JSON records."""
    if not any("\\n  File " in line or (line.startswith('{"') and _COMPLAINS.search(line)) for line in lines):
        return lines
    found: list[str] = []
    for line in lines:
        if line.startswith('{"') and _COMPLAINS.search(line) and (told := _of_json(line)):
            found += told
        else:
            found += line.replace('\\"', '"').split("\\n") if "\\n  File " in line else [line]
    return found


def _of_json(line: str) -> list[str]:
    """Return a JSON record of a logger as lines with the prefixes that correspond to its fields."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return []
    if not isinstance(record, dict):
        return []
    texts = [record[key] for key in _JSON_TEXTS if isinstance(record.get(key), str)]
    rank = next((record[key] for key in ("rank", "global_rank") if isinstance(record.get(key), int)), None)
    node = next((record[key] for key in ("host", "hostname", "node") if isinstance(record.get(key), str)), None)
    prefix = ""
    if node:
        prefix = f"[{node}:{'agent' if rank is None else rank}] "
    elif rank is not None:
        prefix = f"[rank{rank}]: "
    said = [line for text in texts for line in text.rstrip("\n").split("\n")]
    level = str(record.get("level") or record.get("levelname") or record.get("severity") or "")
    is_complaint = level.upper() in ("ERROR", "CRITICAL", "FATAL") and not any("Traceback" in line for line in said)
    lines = []
    for line_said in said:
        mark = "ERROR " if is_complaint and not _SAYS_SO.search(line_said) else ""
        lines.append(f"{prefix}{mark}{line_said}")
    return lines


def collect_log_hits(sources: Iterable[LogSource]) -> LogFindings:
    """Return all findings in the files."""
    scan = _LogScanner()
    for source in sources:
        scan.file(source)
    return scan.finish()


def _resolve_hit_exception(hit: SignatureMatch) -> None:
    raised = hit.raised
    if raised is None:
        return
    explained = exception_classes.explain_exception_chain(raised)
    hit.signature, hit.groups, hit.weight = explained.signature, dict(explained.groups), explained.weight
    hit.line = explained.raised.line
    chain = raised.chain()
    hit.bare = all(one.bare for one in chain)
    ranks = [one.rank for one in chain if one.rank is not None]
    if ranks:
        hit.rank = ranks[0]
    for one in chain:
        hit.node = hit.node or one.node
    if hit.bare and explained.weight == 1:
        hit.weight = 0


def _count_survival_lines(hit: SignatureMatch) -> int:
    """Return the number of later lines after which a hit counts as survived."""
    if hit.signature is COMPLAINT:
        if _complaint_of_nccl(hit.line.raw):
            return LONG_CALM
        return CALM if _LEVEL.search(hit.line.text) else 1
    if _is_unmarked_text(hit):
        return 2
    if _by_a_shell(hit):
        return SCRIPT_GOES_ON
    unlabelled = hit.line.rank is None and (hit.line.pid is not None or (hit.raised is not None and not hit.bare))
    return UNLABELLED if unlabelled else 1


def _complaint_of_nccl(text: str) -> bool:
    """Return whether a line is an unknown warning of NCCL about something that NCCL cannot do without."""
    return "NCCL WARN" in text and not _GOES_ON_WITHOUT.search(text)


def _is_at_exit(hit: SignatureMatch) -> bool:
    return hit.signature.id == "aborted-at-exit" and hit.end is None


def _by_a_shell(hit: SignatureMatch) -> bool:
    return hit.signature.id in BY_A_SHELL and hit.raised is None


def _ended_one_command(hit: SignatureMatch) -> bool:
    """Return whether a line only shows that one command of a script failed."""
    return _by_a_shell(hit) or (hit.signature.id == "bad-arguments" and hit.raised is None)


def _ran_without(missed: SignatureMatch, other: SignatureMatch) -> bool:
    """Return whether a program ran although a command before it had failed, and failed for another reason."""
    return (
        other.uncaught
        and not (missed.signature.id == "bad-arguments" and (is_of_a_parent(other) or other.rank is not None))
        and other.line.file == missed.line.file
        and other.line.number > missed.line.number
        and other.signature.id not in _WANTS_THE_ENVIRONMENT
    )


def _is_unmarked_text(hit: SignatureMatch) -> bool:
    """Return whether a known text is in a line without a mark of an error, after which the program may continue."""
    return hit.weight == 0 and hit.raised is None and hit.signature.role == "cause"


def _mark_survived_hits(line: LogLine, state: _FileState, *, ordinary: bool) -> None:
    """Mark hits of a rank that has trained on or ended well since."""
    text = line.text
    ended = _ENDED_WELL.search(text) is not None
    progress = PROGRESS.search(text) is not None and _NOT_A_NUMBER.search(text) is None
    state.after_end = 0 if ended else state.after_end + progress
    state.ended = (state.ended or ended) and state.after_end < STEPS_OF_ANOTHER
    if ended:
        state.ended_at = line.number
    state.starts.steps += progress
    if ended or progress:
        state.starts.went_on = line.number
    if not (ended or progress or state.complaining) or not text.strip():
        return
    ended_by_script = ended and _BY_A_SCRIPT.search(text) is not None
    kept: list[tuple[SignatureMatch, int]] = []
    for hit, needed in state.open:
        is_same_rank = hit.line.rank is None or hit.line.rank == line.rank
        has_ended = is_same_rank and ended and not (ended_by_script and hit.uncaught)
        has_progress = is_same_rank and progress
        if has_ended or (has_progress and _is_weak(hit)):
            step = needed
        else:
            step = int(ordinary if _is_weak(hit) else has_progress)
        if needed > step:
            kept.append((hit, needed - step))
        else:
            hit.survived = True
    state.open = kept[-OPEN_HITS:]
    state.complaining = any(_is_weak(hit) for hit, _ in state.open)


def _is_weak(hit: SignatureMatch) -> bool:
    """Return whether a program often continues after such a line, so that ordinary output shows that it did."""
    return hit.signature is COMPLAINT or _is_unmarked_text(hit) or _by_a_shell(hit)


def _of_exit(end: ReportedExit, line: LogLine) -> SignatureMatch:
    by_signal = {
        9: "killed", 11: "segfault", 7: "bus-error", 6: "aborted", 15: "stopped", 2: "stopped", 1: "hangup",
        4: "crashed",
    }  # fmt: skip
    if end.out_of_memory:
        id_ = "oom-killer"
    elif end.signal:
        id_ = by_signal.get(end.signal, "signalled")
    else:
        id_ = "worker-failed"
    hit = _build_hit(
        signatures.by_id(id_),
        line,
        {
            "code": str(end.code),
            "signal": launchers.format_signal_name(end.signal) if end.signal else "",
            "meaning": launchers.MEANINGS.get(end.signal, "these logs do not show which process sent it"),
        },
    )
    hit.end, hit.root, hit.ranks = end, end.root, end.ranks
    hit.node = end.node or hit.node
    if len(end.ranks) == 1:
        hit.rank = end.ranks[0]
    return hit


def _build_hit(signature: Signature, line: LogLine, groups: dict[str, str]) -> SignatureMatch:
    node = line.node if line.node is not None else attribution.node_named(line.raw)
    rank = line.rank if line.rank is not None else attribution.rank_named(line.raw)
    return SignatureMatch(signature=signature, line=line, groups=groups, rank=rank, node=node, time=None)
