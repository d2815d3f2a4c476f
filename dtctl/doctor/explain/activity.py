"""Last activity of a program before its output stopped, from the last lines of that output. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dtctl.doctor.explain.lines import parse_log_line

LOOK_BACK = 60
"""Number of lines before a failure that are searched."""
_DOING = (
    ("saving a checkpoint", re.compile(r"(?i)\bsav(?:ing|e[ds]?|e_)\b.*|checkpoint(?:ing)?\b.*(?:sav|writ)|"
                                       r"(?:writing|wrote) .*(?:checkpoint|\.pt|\.safetensors)"),
     "let all ranks take part in saving sharded state, write to fast storage or asynchronously, and raise "
     "timeout= of init_process_group above the time that it takes"),
    ("evaluating", re.compile(r"(?i)\b(?:evaluat\w*|validat(?:ion|ing)|running (?:eval|test)|eval(?:_| "
                              r")?(?:step|loop|batch)|generat(?:ing|ion)|computing metrics|rollout)\b"),
     "let all ranks evaluate the same number of batches (or none but rank 0, without collectives), or raise timeout="),
    ("skipping batches after a resume", re.compile(r"(?i)\b(?:skip(?:ping|ped)?\b.*(?:batch|step|sample|epoch|"
                                                   r"data)|resum(?:ing|ed) (?:from|training)|will skip|"
                                                   r"fast[- ]forward)"),
     "resume the position of the data loader instead of reading through it (ignore_data_skip, "
     "StatefulDataLoader), or raise timeout="),
    ("loading or preparing data", re.compile(r"(?i)\b(?:map|filter)(?:ping)?\b.*(?:examples|%|num_proc)|"
                                             r"tokeniz|preprocess|generating \w+ split|loading (?:\w+ "
                                             r")*(?:data|dataset|index|shards?)|building (?:\w+ )*(?:index|"
                                             r"dataset|vocab)|download|packing|shuffl\w+ indices|dataset"),
     "prepare the data on one rank before init_process_group (or with a longer timeout=) and let the others "
     "read the cache"),
    ("compiling", re.compile(r"(?i)\b(?:compil(?:e|ing|ation)|autotun\w*|inductor|building extension|"
                             r"jit[- ]?(?:load|compil)\w*|ninja|warming up|warmup|CUDA graphs?|tracing)\b"),
     "compile before the first collective, share the cache of compiled kernels, or raise timeout= for the first step"),
    ("loading the model", re.compile(r"(?i)loading (?:\w+ )*(?:model|weights|checkpoint|shards|pretrained|"
                                     r"state)|from_pretrained|initializ\w+ (?:model|weights)"),
     "load the weights from local storage and at the same time on all ranks, or raise timeout="),
)  # fmt: skip
_NOT_OWN = re.compile(
    r"NCCL (?:INFO|WARN)|ProcessGroup|c10d|socket\.cpp|TCPStore|Traceback|^\s+File \"|^\s*$|^[=*_-]{4,}|"
    r"\[[IWEF]\d{3,4} |\[[IWEF] |^[IWEF]\d{4} |Warning:|warnings\.warn|"
    r"Watchdog caught|workMetaList|flight recorder|terminate called|what\(\):|client socket|SocketImpl|gai "
    r"error|exitcode|Terminating|ERROR\b|CRITICAL\b|Killing |Process group|heartbeat|hostname of the client|"
    r"^\W+$|^\[\d+\]:$|^(?:rank|time|host|error_file|traceback) +: |^Root Cause |^Failures:|NO_OTHER_FAILURES|"
    r"frame #\d+|OMP_NUM_THREADS|^\s{4,}|elastic|torchrun|^\w*(?:Error|Exception)\b|slurmstepd|srun:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramActivity:
    """Last line that the program itself printed, and the activity that the line shows."""

    line: str
    doing: str = ""
    fix: str = ""


def find_last_activity(lines: Sequence[str], index: int) -> ProgramActivity | None:
    """Return the program's activity before a line of a file; None if the program has printed nothing of its own."""
    last = ""
    for raw in reversed(lines[max(0, index - LOOK_BACK) : index]):
        text = parse_log_line(raw[:400], file="", number=0, rank=None, node=None).text.strip()
        if not text or _NOT_OWN.search(text):
            continue
        for doing, words, fix in _DOING:
            if words.search(text):
                return ProgramActivity(line=(last or text)[:200], doing=doing, fix=fix)
        if last:  # earlier lines only count if they show an activity
            break
        last = text
    return ProgramActivity(line=last[:200]) if last else None
