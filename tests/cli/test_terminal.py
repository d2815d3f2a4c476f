"""What commands show in a terminal of 80 columns: no line is longer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

LIMIT_S = 300.0
"""Without a word; ends what would wait for ever, on however busy a machine."""


def on_terminal(folder: Path, *arguments: str, columns: int = 80, typed: bytes = b"") -> list[str]:
    """The lines that a command shows on a terminal, without colours."""
    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    argv = [sys.executable, "-m", "dtctl", *arguments]
    stdin = other if typed else None
    process = subprocess.Popen(argv, cwd=folder, stdin=stdin, stdout=other, stderr=other, env={**env, "TERM": "xterm"})
    os.close(other)
    os.write(own, typed)
    data = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([own], [], [], LIMIT_S)[0] and (piece := os.read(own, 1 << 16)):
            data += piece
    try:
        process.wait(LIMIT_S)
    finally:
        process.kill()
        os.close(own)
    return [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in data.decode().replace("\r", "").split("\n")]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_choices_of_the_advisor_fit(tmp_path: Path, columns: int) -> None:
    model = ["--params", "7B", "--gpus", "16", "--gpu", "A100", "--batch", "64"]
    lines = on_terminal(tmp_path, "advise", *model, columns=columns)
    begin = lines.index("")
    table = lines[begin + 1 :]
    assert len(table) > 8
    assert max(map(len, table)) <= columns


def test_runs_fit(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(
        f"cluster: {{workdir: {tmp_path}/node, slots: 1}}\njob: {{command: ['true']}}\n"
    )
    on_terminal(tmp_path, "launch", "--set", f"job.env.LONG={'x' * 100}")
    lines = on_terminal(tmp_path, "runs")
    assert len(lines) >= 2
    assert max(map(len, lines)) <= 80
    assert "succeeded" in lines[1]


def test_names_can_be_written_in_any_locale(tmp_path: Path) -> None:
    folder = tmp_path / "prüfung"
    folder.mkdir()
    (folder / "träin.py").write_text("print('done')\n")
    (folder / "dtctl.yaml").write_text(
        f"cluster: {{workdir: {tmp_path}/node, transport: local, slots: 1}}\n"
        "job: {script: träin.py, kind: direct, preload: []}\n",
        encoding="utf-8",
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [sys.executable, "-m", "dtctl", "launch"]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"done" in done.stdout


def test_a_sandbox_that_holds_what_runs_wrote_is_removed_after_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTCTL_SANDBOX_DIR", str(tmp_path))
    run = tmp_path / "own" / "hosts" / "node1" / "home" / ".dtctl" / "node" / "runs" / "gpt-1122-1"
    (run / "snapshots" / "step-10").mkdir(parents=True)
    (tmp_path / "own" / "sandbox.json").write_text("{}")
    assert "nothing was removed" in on_terminal(tmp_path, "sandbox", "down", "--name", "own", typed=b"n\n")
    assert run.exists()
    on_terminal(tmp_path, "sandbox", "down", "--name", "own", typed=b"y\n")
    assert not run.exists()


def test_runs_give_up_columns_before_their_cause(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(f"cluster: {{workdir: {tmp_path}/node}}\njob: {{command: ['false']}}\n")
    on_terminal(tmp_path, "launch")
    wide, narrow = (on_terminal(tmp_path, "runs", columns=columns) for columns in (200, 80))
    assert wide[0].split()[:6] == ["RUN", "STATUS", "STARTED", "DURATION", "NODES", "CODE"]
    assert narrow[0].endswith("COMMAND, OR WHY IT FAILED")
    assert "NODES" not in narrow[0]
    assert narrow[1].endswith("rank 0 on localhost: failed")


def test_a_sentence_is_folded_at_words(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(
        "cluster: {transport: ssh, nodes: [a, b]}\njob: {command: ['true'], max_restarts: 1}\n"
    )
    lines = on_terminal(tmp_path, "validate")
    told = [line for line in lines if line.startswith(("note:", "  "))]
    assert sum(line.startswith("  ") for line in told) > 1, lines
    assert max(map(len, told)) <= 80


def test_sentences_are_folded_at_words(tmp_path: Path) -> None:
    """The cause and the failure of a run, its status and the advisor's reasons; words stay whole."""
    (tmp_path / "t.py").write_text("import quite_unknown\n")
    (tmp_path / "dtctl.yaml").write_text(
        f"cluster: {{workdir: {tmp_path}/node, transport: local, slots: 1}}\njob: {{script: t.py, kind: direct}}\n"
    )
    # A table and a bar are redrawn.
    shown = [line for line in on_terminal(tmp_path, "launch") if " localhost  " not in line and "━" not in line]
    shown += on_terminal(tmp_path, "status")
    shown += on_terminal(tmp_path, "advise", "--params", "7B", "--gpus", "16", "--gpu", "A100", "--batch", "64")
    long = [line for line in shown if len(line) > 80 and " " in line.strip() and not line.startswith(("  |", "["))]
    assert not long
    assert any(line.startswith("cause: ") for line in shown)
