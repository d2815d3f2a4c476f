"""The command line, in processes forked from one that has imported it: `python -m dtctl` without the start.

    done = command_line.dtctl("validate", "--json", cwd=folder)

Who tests the start itself (imports, signals, a full disk) runs `python -m dtctl`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

LIMIT_S: Final = 900.0
"""Ends what would wait for ever, on however busy a machine."""

_CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "tests.command_line", "typer", "typer.main", "dtctl.cli.app", "dtctl.cli.launch", "dtctl.cli.common.run_display",
    "dtctl.cli.logs", "dtctl.cli.report", "dtctl.cli.runs", "dtctl.cli.snapshot", "dtctl.cli.status", "dtctl.cli.stop",
    "dtctl.cli.doctor", "dtctl.launch.control.run", "dtctl.launch.files.tree",
    "dtctl.lint.engine", "dtctl.render.templates", "dtctl.sandbox.control", "dtctl.spec.load", "dtctl.transport.local",
    "dtctl.transport.ssh",
])  # fmt: skip


def dtctl(
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = LIMIT_S,
    before: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one command.

    Args:
        arguments: as after `dtctl`.
        cwd: the folder in which it runs.
        env: added to the environment of the tests.
        stdin: its standard input.
        timeout: seconds after which it is ended, and the test with it.
        before: called in its process first, such as `partial(os.umask, 0)`.
    """
    with tempfile.TemporaryDirectory() as folder:
        # No sandbox that somebody has up on this machine has a say.
        environ = {"DTCTL_SANDBOX_DIR": f"{folder}/sandboxes", **os.environ, **(env or {})}
        return dtctl_in(environ, *arguments, cwd=cwd, stdin=stdin, timeout=timeout, before=before)


def dtctl_in(
    environ: Mapping[str, str],
    *arguments: str,
    cwd: Path,
    stdin: str = "",
    timeout: float = LIMIT_S,
    before: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one command with these variables and no others; else as `dtctl`."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("in", "out", "err")]
        streams[0].write_text(stdin)
        process = _CONTEXT.Process(target=_run, args=(arguments, str(cwd), dict(environ), streams, before))
        process.start()
        try:
            process.join(timeout)
            ended = process.exitcode is not None
        finally:  # also when pytest ends the test
            if process.exitcode is None:
                process.kill()
                process.join()
        if not ended:
            raise subprocess.TimeoutExpired(["dtctl", *arguments], timeout)
        return subprocess.CompletedProcess(
            ["dtctl", *arguments], process.exitcode, streams[1].read_text(), streams[2].read_text()
        )


def _run(
    arguments: tuple[str, ...], cwd: str, env: dict[str, str], streams: list[Path], before: Callable[[], object] | None
) -> None:
    if before is not None:
        before()
    for number, (path, flags) in enumerate(zip(streams, (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT] * 2), strict=True)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115
    sys.argv = ["dtctl", *arguments]
    from dtctl.cli.main import main

    main()
