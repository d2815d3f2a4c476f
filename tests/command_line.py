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
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

_CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["dtctl.cli.main", "dtctl.spec.load", "dtctl.render.templates", "dtctl.lint.engine"])


def dtctl(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run one command.

    Args:
        arguments: as after `dtctl`.
        cwd: the folder in which it runs.
        env: added to the environment of the tests.
        stdin: its standard input.
        timeout: seconds after which it is ended, and the test with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("in", "out", "err")]
        streams[0].write_text(stdin)
        process = _CONTEXT.Process(target=_run, args=(arguments, str(cwd), {**os.environ, **(env or {})}, streams))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["dtctl", *arguments], timeout)
        return subprocess.CompletedProcess(
            ["dtctl", *arguments], process.exitcode, streams[1].read_text(), streams[2].read_text()
        )


def _run(arguments: tuple[str, ...], cwd: str, env: dict[str, str], streams: list[Path]) -> None:
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
