"""Start, search, use and end of sandboxes, from outside of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dtctl import children, folders, names, node_facts, shell
from dtctl.errors import SandboxError
from dtctl.printable import format_count
from dtctl.sandbox import layout, slurm
from dtctl.sandbox.layout import Sandbox, SandboxNode, choose_default_name

__all__ = [
    "choose_default_name",
    "enter_argv",
    "find_running_sandbox",
    "list_host_processes",
    "remove_sandbox",
    "start_sandbox",
]

UP_LIMIT_S = 60.0
_STATE_FILES = (
    "id", "id.pub", "known_hosts", "xtables.lock", "sandbox.json", "sandbox.partial", "keeper.sock", "keeper.log",
    "keeper.pid", "hosts", "self", "slurm",
)  # fmt: skip
"""Files in a sandbox's folder."""
PACKAGES = {
    "/usr/sbin/sshd": "openssh-server",
    "ip": "iproute2",
    "nsenter": "util-linux",
}


def check_sandbox_requirements() -> None:
    """Check that this machine can have a sandbox.

    Raises:
        SandboxError: it cannot; the error names what is missing and how to install it.
    """
    hint = "or use `transport: local`, which needs no packages"
    if not sys.platform.startswith("linux"):
        raise SandboxError(
            "a sandbox needs Linux: its hosts are network namespaces", hint=f"use a Linux machine, {hint}"
        )
    missing = [package for tool, package in PACKAGES.items() if not (Path(tool).exists() or shutil.which(tool))]
    if missing:
        raise SandboxError(
            f"a sandbox needs {', '.join(missing)}", hint=f"sudo apt-get install {' '.join(missing)}, {hint}"
        )
    if os.getuid() == 0:
        return
    probe = ["unshare", "--user", "--map-root-user", "--net", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(
            f"this system does not let ordinary users make namespaces: {done.stderr.strip()}",
            hint=f"sysctl kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns=0 "
            f"(Ubuntu), or root; {hint}",
        )


def find_running_sandbox(name: str) -> Sandbox | None:
    """Return the sandbox of this name if it is up."""
    sandbox = layout.load(layout.build_state_dir(name))
    if sandbox is None or node_facts.start_ticks(sandbox.keeper) != sandbox.keeper_started:
        return None
    return sandbox


def start_sandbox(name: str, *, nodes: int, with_slurm: bool = False) -> Sandbox:
    """Start a sandbox; the remains of an earlier one of this name are removed first.

    Args:
        name: of the sandbox.
        nodes: how many hosts.
        with_slurm: True starts Slurm on them.

    Raises:
        SandboxError: it is up already, or cannot be made here. In that case no process or file is left.
    """
    if not 1 <= nodes <= layout.MAX_NODES:
        raise SandboxError(f"a sandbox has 1 to {layout.MAX_NODES} hosts, not {nodes}")
    with _lock_sandbox_name(name):
        return _start_locked_sandbox(name, nodes, with_slurm=with_slurm)


def ensure_sandbox_up(name: str, *, nodes: int) -> Sandbox:
    """Return the sandbox of this name, started if it is not up; concurrent callers get the same one.

    Raises:
        SandboxError: as `start_sandbox`.
    """
    with _lock_sandbox_name(name):
        return find_running_sandbox(name) or _start_locked_sandbox(name, nodes, with_slurm=False)


@contextmanager
def _lock_sandbox_name(name: str) -> Iterator[None]:
    """Lock the start of sandboxes of this name."""
    state = layout.build_state_dir(name)
    try:
        state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(state.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise SandboxError(
            f"the sandbox's folder cannot be made: {exc.strerror}", where=str(state), hint="set DTCTL_SANDBOX_DIR"
        ) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _start_locked_sandbox(name: str, nodes: int, *, with_slurm: bool) -> Sandbox:
    running = find_running_sandbox(name)
    if running is not None:
        raise SandboxError(
            f"sandbox {name} is already up, with {format_count(len(running.nodes), 'host')}",
            hint="`dtctl sandbox down` ends it",
        )
    check_sandbox_requirements()
    if with_slurm:
        slurm.check_slurm_requirements()
    state = layout.build_state_dir(name)
    try:
        remove_sandbox(name)
        state.mkdir(mode=0o700, parents=True)
        folders.mark_own_folder(str(state), lambda _: False)
    except OSError as exc:
        raise SandboxError(
            f"the sandbox's folder cannot be made: {exc.strerror}", where=str(state), hint="set DTCTL_SANDBOX_DIR"
        ) from exc
    try:
        _start_keeper(state, name, nodes, with_slurm=with_slurm)
    except BaseException:
        remove_sandbox(name)
        raise
    sandbox = find_running_sandbox(name)
    if sandbox is None:
        remove_sandbox(name)
        raise SandboxError("the sandbox started, and stopped again at once", where=str(state))
    if with_slurm:
        try:
            slurm.wait_ready(sandbox)
        except BaseException:
            remove_sandbox(name)
            raise
    return sandbox


def _start_keeper(state: Path, name: str, nodes: int, *, with_slurm: bool) -> None:
    log = state / "keeper.log"
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as errors:
        keeper = subprocess.Popen(
            children.build_module_argv(
                sys.executable,
                "dtctl.sandbox.keeper",
                str(state),
                name,
                str(nodes),
                *(["slurm"] if with_slurm else []),
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    (state / "keeper.pid").write_text(
        f"{keeper.pid} {node_facts.start_ticks(keeper.pid)} {node_facts.read_boot_id()}\n"
    )
    if keeper.stdout is None:
        raise SandboxError("the keeper has no output")
    with keeper.stdout as stdout:
        readable, _, _ = select.select([stdout], [], [], UP_LIMIT_S)
        answer = json.loads(stdout.readline() or b"{}") if readable else {"error": f"not up after {UP_LIMIT_S:g} s"}
    if not answer.get("ok"):
        error_lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = answer.get("error") or (error_lines[-1] if error_lines else "its keeper exited without a message")
        raise SandboxError(
            f"the sandbox cannot be made: {reason}", hint="or use `transport: local`, which needs no packages"
        )
    keeper.returncode = 0  # the keeper continues to run; without this, Popen would warn about it


def list_sandbox_runs(name: str) -> list[str]:
    """Return the runs with snapshots or a working folder on the hosts of a sandbox, in order of their names."""
    folders_of_runs = (layout.build_state_dir(name) / "hosts").glob("*/home/.dtctl/node/runs/*")
    held = {run.name for run in folders_of_runs if any((run / "snapshots").glob("*")) or (run / "work").exists()}
    return sorted(held)


def list_running_runs(name: str) -> list[str]:
    """Return the runs with processes on the hosts of a sandbox, in order of their names."""
    sandbox = find_running_sandbox(name)
    mark = f"{names.RUN_ID}=".encode()
    found = set[str]()
    for pid in [pid for node in (sandbox.nodes if sandbox else ()) for pid in list_host_processes(node)]:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended
            continue
        found |= {pair[len(mark) :].decode(errors="replace") for pair in environ.split(b"\0") if pair.startswith(mark)}
    return sorted(found)


def remove_sandbox(name: str) -> bool:
    """End a sandbox and remove everything of it, even if it is damaged; return True if there was anything.

    Raises:
        SandboxError: something could not be removed.
    """
    state = layout.build_state_dir(name)
    if not state.exists():
        return False
    if state.is_symlink() or not folders.mark_own_folder(str(state), lambda name: name in _STATE_FILES):
        raise SandboxError(
            "this folder does not belong to a sandbox, so nothing in it is removed",
            where=str(state),
            hint="choose another name (--name), or another folder (DTCTL_SANDBOX_DIR)",
        )
    sandbox = layout.load(state)
    _kill_keeper(state)
    nodes = sandbox.nodes if sandbox else ()
    for node in nodes:
        _wait_gone(node.pid, node.started)
    if os.getuid() == 0:
        # The kernel removes the cables of dead hosts some time later; when this function returns, they must be gone.
        links = [layout.build_bridge_name(state), *(layout.link_name(state, node.index) for node in nodes)]
        commands = "".join(f"link del {link}\n" for link in links)
        subprocess.run(["ip", "-force", "-batch", "-"], input=commands, capture_output=True, text=True, check=False)
    not_removed = folders.remove_folder_tree(str(state))
    if not_removed:
        raise SandboxError(
            "the sandbox's folder cannot be removed completely: something is mounted there or belongs to another user",
            where=not_removed[0],
            hint=f"umount {shell.quote_word(not_removed[0])}, then `dtctl sandbox down` again",
        )
    return True


def _kill_keeper(state: Path) -> None:
    _kill_recorded_keeper(state)
    # A process that an older version has started, or that has lost its record, is found by its arguments: a sandbox
    # only counts as gone after this search.
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            is_own = entry.stat().st_uid == os.getuid()
        except OSError:
            continue
        if is_own and b"dtctl.sandbox.keeper" in arguments and os.fsencode(state) in arguments:
            started = node_facts.start_ticks(int(entry.name))
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)
            _wait_gone(int(entry.name), started)


def _kill_recorded_keeper(state: Path) -> None:
    try:
        number, ticks, boot = (state / "keeper.pid").read_text().split()
        pid, started = int(number), int(ticks)
    except (OSError, ValueError):
        return
    if started and boot == node_facts.read_boot_id() and node_facts.start_ticks(pid) == started:
        os.kill(pid, signal.SIGKILL)  # the kernel ends its hosts with it
        _wait_gone(pid, started)


def _wait_gone(pid: int, started: int, limit_s: float = 10.0) -> None:
    """Wait until a process that began at `started` has ended. If it is a child of this process, reap it."""
    deadline = time.monotonic() + limit_s
    while pid and node_facts.start_ticks(pid) == started != 0 and time.monotonic() < deadline:
        time.sleep(0.005)


def build_namespace_flags(sandbox: Sandbox, *, mounts: bool = True) -> list[str]:
    """Return the options of nsenter(1) that enter a host's namespaces."""
    flags = ["--net", "--uts", "--ipc"]
    if mounts:
        flags += ["--mount", "--pid"]
    return ["--user", "--preserve-credentials", *flags] if sandbox.rootless else flags


def enter_argv(sandbox: Sandbox, node: SandboxNode, command: Sequence[str]) -> list[str]:
    """Return the argv that runs `command` on a host as its login user, in its home.

    Raises:
        SandboxError: the host is switched off.
    """
    check_on(node)
    # In the sandbox's user namespace this user is root; the command is to run as the ordinary user, as over SSH.
    as_user = ["unshare", "--user", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}"]
    home_folder = str(sandbox.home)
    return [
        "nsenter",
        "--target",
        str(node.pid),
        *build_namespace_flags(sandbox),
        *(as_user if sandbox.rootless else ()),
        "env",
        # A login over SSH has none of these variables, and a folder below this machine's /tmp does not exist on a host.
        *(word for name in ("TMPDIR", "TEMP", "TMP") for word in ("-u", name)),
        "-C",
        home_folder,
        f"HOME={home_folder}",
        f"USER={sandbox.user}",
        *(f"{key}={value}" for key, value in slurm.build_slurm_environment(sandbox).items()),
        *command,
    ]


def is_host_running(node: SandboxNode) -> bool:
    """Return whether a host runs. Another process may have got the id of its init, and must not be touched."""
    return bool(node.pid) and node_facts.start_ticks(node.pid) == node.started


def check_on(node: SandboxNode) -> None:
    """Refuse a host that is switched off.

    Raises:
        SandboxError: it is.
    """
    if not is_host_running(node):
        raise SandboxError(f"host {node.name} is switched off", hint=f"dtctl sandbox heal {node.name}")


def list_host_processes(node: SandboxNode) -> dict[int, str]:
    """Return the processes of a host, its init included: id on this machine -> command line."""
    namespace = _pid_namespace(node.pid) if is_host_running(node) else None
    commands = {}
    for name in os.listdir("/proc") if namespace else ():  # noqa: PTH208 - hundreds of paths, looked at often
        if name.isdigit() and _pid_namespace(int(name)) == namespace:
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if node_facts.start_ticks(int(name)):
                commands[int(name)] = line.strip()
    return commands


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - the same
    except OSError:
        return None
