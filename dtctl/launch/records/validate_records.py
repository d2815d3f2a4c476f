"""Checks of the files of a run before they are used: a job, a full disk or a person may have written them.

Each file has one schema; for events see events.py. Versions of dtctl record different keys, so missing keys are
allowed, and unused keys are not checked.
"""

from __future__ import annotations

from typing import Final

from dtctl.schema import (
    check_flag,
    check_moment,
    list_of,
    make_integer_check,
    make_nullable_check,
    make_object_check,
    make_text_check,
    mapping_of,
)
from dtctl.schema import check_number as finite
from dtctl.supervisor.messages.base import COUNT, WORKERS

_WORD: Final = make_text_check(4096)
_TEXT: Final = make_text_check(1 << 20)
_NODE: Final = make_object_check(
    name=_WORD,
    optional={
        "address": _WORD, "node_rank": COUNT, "slots": make_integer_check(0, WORKERS), "first_rank": COUNT,
        "workdir": _WORD, "python": make_nullable_check(_WORD), "argv": list_of(_TEXT), "setup": list_of(_TEXT),
        "processes": COUNT, "gres": make_nullable_check(_WORD), "host": _WORD,
        "env": list_of(make_object_check(name=_WORD, value=_TEXT, origin=_WORD)),
    },
)  # fmt: skip
PLAN: Final = make_object_check(
    optional={
        "nodes": list_of(_NODE), "run": _WORD, "job": _WORD, "kind": _WORD, "transport": _WORD, "attempt": COUNT,
        "max_restarts": finite, "rendezvous": make_object_check(address=_WORD, port=make_integer_check(0, 65_535)),
        "world_size": COUNT, "grace_s": finite, "secrets": list_of(_WORD), "notes": list_of(_TEXT),
        "threads": make_nullable_check(make_object_check(number=make_integer_check(1, 1 << 16), reason=_TEXT)),
    },
)  # fmt: skip
"""Schema of a plan: nodes with names, numbers of workers and variables."""
INFO: Final = make_object_check(
    run=_WORD, token=_WORD, pid=make_integer_check(-(1 << 63)), started=check_moment, spec=_WORD,
    command=list_of(_TEXT), detached=check_flag,
    optional={
        "pid_started": COUNT, "boot": _WORD, "slurm": check_flag, "snapshots": mapping_of(_WORD, _WORD),
        "sweep": mapping_of(_WORD, _TEXT), "environment": _WORD,
        "removed": mapping_of(_WORD, check_moment),
    },
)  # fmt: skip
"""Schema of run.json, the facts about a run's launcher."""
