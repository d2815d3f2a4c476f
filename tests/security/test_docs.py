"""docs/security.md: every promise has a test, and its limits are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from dtctl.doctor.explain import content
from dtctl.launch import snapshot_answers, snapshots
from dtctl.launch.control import node_sessions, session
from dtctl.launch.records import logs, record
from dtctl.lint import source
from dtctl.metrics import follow
from dtctl.render import limited, templates
from dtctl.runtime.snapshot.format import layout
from dtctl.slurm import answers
from dtctl.spec import load
from dtctl.supervisor import frames

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text()


def test_every_promise_names_a_test_that_is_there() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and "---" not in line]
    promises = [row for row in rows if row.count("|") >= 4 and not row.rstrip(" |").endswith("test")]
    assert len(promises) > 20
    for row in promises:
        named = re.findall(r"`(test_\w+\.py)`", row)
        assert named, row
        for name in named:
            found = [path for path in (ROOT / "tests").rglob(name) if "def test_" in path.read_text()]
            assert found, f"{name} is gone"


def test_the_limits_are_those_of_the_code() -> None:
    mib = 1 << 20
    said = {
        "a frame of a node | 1 MiB": mib == frames.MAX_FRAME,
        "an answer about snapshots | 64 MiB; silence 60 s, 1 h": (
            (64 * mib, 60.0, 3600.0) == (snapshot_answers.ANSWER_BYTES, snapshots.SILENCE_S, snapshots.READING_S)
        ),
        "an answer of Slurm's machine | 256 MiB": 256 * mib == answers.BYTES,
        "120 s of silence, then 30 s": (
            node_sessions.START_SILENCE_S,
            node_sessions.PUSH_SILENCE_S,
            node_sessions.WORK_LIMIT_S,
        )
        == (120, 30, 600),
        "a spec | 4 MiB": 4 * mib == load.MAX_BYTES,
        "commit record of a snapshot | 64 MiB": 64 * mib == layout.RECORD_BYTES,
        "32 MiB from its beginning and 32 MiB from its end": content.HEAD_BYTES == content.TAIL_BYTES == 32 * mib,
        "for 5 s": content.PATIENCE_S == 5.0,
        "a logged step, for metrics | 1 MiB, 100 names": (mib, 100) == (follow.LINE_BYTES, follow.KEYS),
        "a file for the linter | 32 MiB": 32 * mib == source.MAX_BYTES,
        "4 Mi characters; whatever they compute takes no more than 1 GiB and 10 s of processor time": (
            (4 * mib, 1 << 30, 10) == (templates.MAX_CHARACTERS, limited.MEMORY_BYTES, limited.LIMIT_S)
        ),
        "a run's records | 4 MiB, its plan 64 MiB, of its events 32 MiB from the beginning and 32 MiB": (
            (4 * mib, 64 * mib, 64 * mib) == (record.RUN_BYTES, record.PLAN_BYTES, record.EVENTS_BYTES)
        ),
        "no more than 1 MiB of memory for what was not dealt with": mib == session.MAX_QUEUED_BYTES,
        "at most 64 KiB of memory": logs.LONGEST_BYTES == 64 << 10,
    }
    for words, right in said.items():
        assert words in TEXT, words
        assert right, words
