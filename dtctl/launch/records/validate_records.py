"""Checks of the files of a run before they are used: a job, a full disk or a person may have written them.

One schema per file; for events see events.py. Versions of dtctl differ in what they record, so missing keys are
allowed, and unused keys are not checked.
"""

from __future__ import annotations

from typing import Final

from dtctl.schema import flag, form, integer, list_of, mapping_of, moment, nullable, text
from dtctl.schema import number as finite
from dtctl.supervisor.messages.base import COUNT, WORKERS

_WORD: Final = text(4096)
_TEXT: Final = text(1 << 20)
_NODE: Final = form(
    name=_WORD,
    optional={
        "address": _WORD, "node_rank": COUNT, "slots": integer(0, WORKERS), "first_rank": COUNT, "workdir": _WORD,
        "python": nullable(_WORD), "argv": list_of(_TEXT), "setup": list_of(_TEXT), "processes": COUNT,
        "gres": nullable(_WORD), "host": _WORD, "env": list_of(form(name=_WORD, value=_TEXT, origin=_WORD)),
    },
)  # fmt: skip
PLAN: Final = form(
    optional={
        "nodes": list_of(_NODE), "run": _WORD, "job": _WORD, "kind": _WORD, "transport": _WORD, "attempt": COUNT,
        "max_restarts": finite, "rendezvous": form(address=_WORD, port=integer(0, 65_535)), "world_size": COUNT,
        "grace_s": finite, "secrets": list_of(_WORD), "notes": list_of(_TEXT),
        "threads": nullable(form(number=integer(1, 1 << 16), reason=_TEXT)),
    },
)  # fmt: skip
"""A plan: nodes with names, numbers of workers and variables."""
INFO: Final = form(
    run=_WORD, token=_WORD, pid=integer(-(1 << 63)), started=moment, spec=_WORD, command=list_of(_TEXT), detached=flag,
    optional={
        "pid_started": COUNT, "boot": _WORD, "slurm": flag, "snapshots": mapping_of(_WORD, _WORD),
        "sweep": mapping_of(_WORD, _TEXT), "environment": _WORD,
    },
)  # fmt: skip
"""Schema of the launcher of a run."""
