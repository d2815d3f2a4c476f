"""A command next to a run on one of its nodes: in the run's working folder, with the variables of its workers.

This module only makes the shell text and passes bytes on. The command does not have the values that workers get only
over the link: their ranks and the values of secrets.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from dtctl import names, shell
from dtctl.errors import ConnectError
from dtctl.transport.base import ByteStream, Connection

PIECE_BYTES = 1 << 16
END_S = 10.0
"""Seconds that the exit status may take once the output has ended."""
_ENTER = r"""
cd {run_dir} || {{ echo "the node has no folder of the run" >&2; exit 7; }}
export {run_var}=$PWD {metrics_var}=$PWD/metrics.jsonl {snapshots_var}=$PWD/snapshots
if [ -f attempt-{attempt}/node.sh ]; then
  eval "$(sed '/^# Last, and with exec/,$d' attempt-{attempt}/node.sh)"
  set +e +o pipefail
fi
work=$PWD/work
if grep -q '"how":"overlay"' work.json 2>/dev/null; then
  # An overlay, which only the run's own processes see; through one of them others do, too.
  pid=$(sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' supervisor.json)
  [ -d "/proc/$pid/root$work" ] && work=/proc/$pid/root$work
fi
cd "$work" || exit 7
exec {command}
"""


def build_inside_command(
    argv: Sequence[str], *, run_dir: str, attempt: int, window: tuple[int, int] | None = None
) -> str:
    """Return the shell text that runs a command next to the workers of a run.

    Args:
        argv: the command; a single word with blanks or operators in it is a line for a shell.
        run_dir: folder of the run on the node.
        attempt: attempt that provides the variables of the command.
        window: columns and rows of the command's terminal; None: the command has no terminal.
    """
    command = format_command_line(argv, window)
    script = _ENTER.format(
        run_dir=shell.quote_program(run_dir), run_var=names.RUN_DIR, metrics_var=names.METRICS,
        snapshots_var=names.SNAPSHOT_DIR, attempt=attempt, command=command,
    )  # fmt: skip
    return shell.join_command(["bash", "-c", script])


def format_command_line(argv: Sequence[str], window: tuple[int, int] | None) -> str:
    """Return a command as shell text, in a terminal of so many columns and rows unless `window` is None."""
    words = list(argv)
    if len(words) == 1 and (shell.find_shell_syntax(words[0]) or " " in words[0].strip()):
        words = ["bash", "-c", words[0]]
    command = shell.join_command(words)
    if window is None:
        return command
    columns, rows = window
    inner = f"stty columns {columns} rows {rows}; exec {command}"
    return shell.join_command(["script", "--quiet", "--return", "--flush", "--command", inner, "/dev/null"])


def run_command(
    connection: Connection,
    text: str,
    *,
    stdin_fd: int | None,
    out: Callable[[bytes], None],
    err: Callable[[bytes], None],
) -> int | None:
    """Run shell text on a node and pass its input and output on; return its exit status, None if the link was lost."""
    stream = connection.open(text)
    if stdin_fd is None:
        stream.close_stdin()
    else:
        threading.Thread(target=_forward_input, args=(stdin_fd, stream), daemon=True).start()
    ended = threading.Event()
    errors = threading.Thread(target=_forward_stderr, args=(stream, err, ended), daemon=True)
    errors.start()
    try:
        while data := stream.read(PIECE_BYTES):
            out(data)
        status = stream.exit_status(END_S)
    finally:
        ended.set()
        errors.join(1.0)
        stream.close()
    return status


def _forward_input(fd: int, stream: ByteStream) -> None:
    """Pass input on; Python's file object is not used, since a thread that waits for a key would keep its lock."""
    try:
        while data := os.read(fd, PIECE_BYTES):
            stream.write(data)
        stream.close_stdin()
    except (ConnectError, OSError):
        return  # The command has ended.


def _forward_stderr(stream: ByteStream, err: Callable[[bytes], None], ended: threading.Event) -> None:
    over = False
    while not over:
        over = ended.wait(0.05)
        if data := stream.read_stderr():
            err(data)
