"""A launch on a node before the start and after the end of its run. Stdlib only, Python 3.8.

Before the start, this process answers requests over the link one after another: hello, push, prepare. At the start it
forks: the child is the supervisor, and this process becomes its guard, which ends the run's processes if the supervisor
is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from dtctl import folders, node_facts
from dtctl.schema import InvalidMessage
from dtctl.supervisor import facts, frames, output_log, processes, run_workdir
from dtctl.supervisor.messages.attempt import (
    RUN_REQUESTS,
    Attach,
    AttemptStopped,
    PortProbed,
    ProbePorts,
    StartAttempt,
)
from dtctl.supervisor.messages.base import Message, StillWorking, index_message_types
from dtctl.supervisor.messages.setup import (
    DataLink,
    EndOrphanedRun,
    Hello,
    NodeDescription,
    NodeReady,
    OrphanedRunEnded,
    Prepare,
    PushTree,
)
from dtctl.supervisor.records import EXIT_RECORD, STOP_REQUEST, write_atomically
from dtctl.supervisor.requests import NodeRequests, RequestFailed

REPORT_S = 1.0
"""Seconds between two heartbeats while the code is brought and checked."""
MIN_FREE_BYTES = 16 << 20
SOCKET = "control.sock"
SETUP_REQUESTS = {**RUN_REQUESTS, **index_message_types(Hello, PushTree, Prepare, EndOrphanedRun)}
RUNS_LOOKED_AT = 64
"""Most runs that are checked, since each needs a few reads, and a node may have the folders of thousands."""


class WorkReporter:
    """Heartbeat of a node during work that sends no other messages."""

    def __init__(self, link: frames.FdLink) -> None:
        """Report over a link to the control machine."""
        import threading  # This import is slow, and not needed for the first answer.

        self._link = link
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._send_working_reports, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _send_working_reports(self) -> None:
        while not self._done.wait(REPORT_S):
            try:
                self._link.send_json(StillWorking())
            except OSError:
                return  # The link is gone, which the main thread detects, too.


class SetupRequests(NodeRequests):
    """Answers to the requests of a launch, until this process serves the run."""

    KINDS = SETUP_REQUESTS
    IDLE_LIMIT_S = 120.0
    """Seconds for which the control machine may be silent; it pings nodes that are ready."""

    def __init__(self, link: frames.FdLink, workdir: str) -> None:
        """Make the workdir, and prepare to answer, see `NodeRequests`.

        Raises:
            RequestFailed: the workdir cannot be made.
            NotPrivateError: others may write to one of its folders.
        """
        super().__init__(link, workdir)
        claim_workdir(workdir)

    def answer(self, request: Message) -> int | None:
        """Answer one request; the last one starts the first attempt or reattaches to a run."""
        link, runs = self.link, os.path.join(self.workdir, "runs")
        if isinstance(request, Hello):
            link.send_json(describe_node(self.workdir, request))
            from dtctl.supervisor import supervisor  # noqa: F401 - the import overlaps work of the control machine
        elif isinstance(request, PushTree):
            from dtctl.supervisor import receive

            try:
                with WorkReporter(link):
                    receive.receive_tree(link, self.workdir, request.tree, request.store)
            except receive.PushRefused:
                return 1  # The control machine has received the reason.
        elif isinstance(request, Prepare):
            with WorkReporter(link):
                if request.environment is not None:
                    from dtctl.supervisor import environments

                    environments.make_environment(link, self.workdir, request.environment)
                check_start_conditions(self.workdir, request)
            link.send_json(NodeReady())
        elif isinstance(request, ProbePorts):
            link.send_json(PortProbed(port=node_facts.find_free_port(request.ports)))
        elif isinstance(request, StartAttempt):
            return run(link, self.workdir, request)
        elif isinstance(request, Attach):
            return attach_to_supervisor(link, os.path.join(runs, request.run), request)
        elif isinstance(request, EndOrphanedRun):
            with WorkReporter(link):
                swept = sweep_run(os.path.join(runs, request.run), request)
            link.send_json(swept)
        return None


def claim_workdir(workdir: str) -> None:
    """Make the workdir, and check that no other user can write to it or to one of dtctl's folders below it.

    Raises:
        RequestFailed: the workdir cannot be made.
        NotPrivateError: others may write to one of the folders.
    """
    try:
        folders.make_private(workdir)
    except folders.NotPrivateError:
        raise
    except OSError as exc:
        code = facts.choose_hint_code(exc)
        raise RequestFailed(
            code if code == "disk-full" else "workdir", f"{exc.filename or workdir}: {exc.strerror}"
        ) from exc
    for name in ("code", "data", "envs", "runs"):
        folders.check_private(os.path.join(workdir, name))


def describe_node(workdir: str, request: Hello) -> NodeDescription:
    """Return this node's description of itself."""
    has_environment = has_uv = False
    has_glibc, free_bytes = True, None
    if request.environment:
        from dtctl.supervisor import environments

        has_environment = environments.is_ready(workdir, request.environment)
        if not has_environment:
            has_uv, has_glibc = bool(environments.find_node_uv()), environments.has_glibc()
            disk = os.statvfs(workdir)
            free_bytes = disk.f_bavail * disk.f_frsize
    return NodeDescription(
        gpus=node_facts.count_gpus(os.environ),
        cores=node_facts.count_usable_cores(),
        address=facts.find_server_address(),
        port=node_facts.find_free_port(request.ports),
        python=".".join(str(part) for part in sys.version_info[:3]),
        host=os.uname().nodename[:255],
        workdir=workdir,
        running=list_running_runs(os.path.join(workdir, "runs")),
        machine=os.uname().machine,
        has_environment=has_environment,
        has_uv=has_uv,
        has_glibc=has_glibc,
        free_bytes=free_bytes,
    )


def list_running_runs(runs_dir: str) -> list[str]:
    """Return the runs that run on this node, among the newest in the folder."""
    try:
        with os.scandir(runs_dir) as entries:
            ages = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries)
    except OSError:  # Another process may remove runs meanwhile; the list is only for information.
        return []
    names = [name for _, name in ages[-RUNS_LOOKED_AT:]]
    return [name for name in names if processes.find_living_supervisor(os.path.join(runs_dir, name)) is not None]


def _describe_missing_path(path: str, kind: str) -> str:
    """Return the reason why a path cannot be used as a folder or a file."""
    return f"{path} is not a {kind}" if os.path.exists(path) else f"{path} does not exist"


def check_start_conditions(workdir: str, message: Prepare) -> None:
    """Check that the run can start on this node, before any node has started a process of it.

    Raises:
        RequestFailed: the run exists already, the disk is full, or a file or program that the job needs is missing.
    """
    run_dir = os.path.join(workdir, "runs", message.run)
    if message.fresh and os.path.exists(run_dir) and not run_workdir.holds_copies_alone(run_dir):
        raise RequestFailed("run-exists", f"{run_dir} already exists")
    stat = os.statvfs(workdir)
    if stat.f_bavail * stat.f_frsize < MIN_FREE_BYTES:
        raise RequestFailed("disk-full", f"{stat.f_bavail * stat.f_frsize >> 20} MiB are left on the disk of {workdir}")
    folders.make_private(run_dir)
    cwd = os.path.expanduser(message.cwd)
    if not os.path.isdir(cwd):
        raise RequestFailed("missing-folder", _describe_missing_path(cwd, "folder"))
    for path in message.files:
        if not os.path.isfile(os.path.join(cwd, path)):
            code = "missing-file" if message.pushed else "missing-there"
            raise RequestFailed(code, _describe_missing_path(os.path.join(cwd, path), "file"))
    for program in ["bash", *message.programs]:
        if not find_program(program, cwd, message.path):
            raise RequestFailed("missing-program", program)
    if message.pushed:
        from dtctl.supervisor import receive

        receive.lock_stored_tree(cwd)  # Another process may have received the push.
    data = [(link.to, _locate_data(workdir, link)) for link in message.data]
    if message.shared:
        run_workdir.share_code_folder(run_dir, cwd)
        return
    earlier_dir = os.path.join(workdir, "runs", message.earlier) if message.earlier else ""
    try:
        run_workdir.prepare_working_folder(
            run_dir, cwd, message.outputs, earlier_dir, message.pushed, data=data, replicated=message.replicated
        )
    except run_workdir.WorkdirTooLarge as exc:
        raise RequestFailed("too-large", f"{cwd} cannot be copied into the working folder of the run: {exc}") from exc


def _locate_data(workdir: str, link: DataLink) -> str:
    """Return the path of additional files on this node; a tree is not removed while this process lives.

    Raises:
        RequestFailed: the files are missing.
    """
    path = os.path.expanduser(link.path)
    if link.tree:
        from dtctl.supervisor import receive

        folder = receive.find_stored_tree(workdir, link.tree, "data")
        if not folder:
            raise RequestFailed("missing-data", "the files of %s are not here" % link.to)
        path = os.path.join(folder, link.path) if link.path else folder
    elif not os.path.exists(path):
        raise RequestFailed("missing-data", "%s does not exist" % path)
    return path


def find_program(program: str, cwd: str, first: str = "") -> str:
    """Return the path of the program with this name, searched in the folder `first` before PATH; empty: none."""
    program = os.path.expanduser(program) if program.startswith("~/") else program
    if "/" in program:
        path = os.path.join(cwd, program)
        return path if os.access(path, os.X_OK) and os.path.isfile(path) else ""
    folders_of_path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    for folder in [os.path.expanduser(first), *folders_of_path] if first else folders_of_path:
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return ""


def run(link: frames.FdLink, workdir: str, message: StartAttempt) -> int:
    """Fork a supervisor and become its guard; return in the guard, after the end of the supervisor."""
    run_dir = os.path.join(workdir, "runs", message.run)
    listener = listen_for_links(run_dir) if message.keep else None
    processes.become_subreaper()
    from dtctl.supervisor import receive

    # All nodes have the code, and this process must have no other threads when it forks.
    receive.stop_serving()
    guard_pid = os.getpid()
    supervisor = os.fork()
    if supervisor:
        return wait_for_supervisor(supervisor, message.token)
    status = 1
    try:
        from dtctl.supervisor.supervisor import Supervisor

        # The link may have received further messages together with this one.
        server = Supervisor(message, run_dir, link, listener, guard_pid)
        server.start(message)
        server.serve()
        status = 0
    finally:
        if status:
            import traceback

            traceback.print_exc()
        os._exit(status)


def wait_for_supervisor(supervisor: int, token: str) -> int:
    """Wait for the supervisor; if it did not exit by itself, end the remaining processes of the run."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: processes.send_process_signal([supervisor], number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    while True:
        pid, status = os.waitpid(-1, 0)  # After the supervisor's end, orphans of the run become children, too.
        if pid == supervisor:
            break
    if status != 0:
        processes.kill_run_processes(token)
    return 0 if status == 0 else 1


def listen_for_links(run_dir: str) -> int:
    """Return the descriptor of a unix socket in the run's folder, on which a kept run accepts new links."""
    path = os.path.join(run_dir, SOCKET)
    if os.path.exists(path):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous_folder = os.open(".", os.O_RDONLY)
    os.chdir(run_dir)  # The address of a unix socket has at most 107 bytes, but a run folder's path may be longer.
    try:
        server.bind(SOCKET)
        os.chmod(SOCKET, 0o600)
        server.listen(4)
    finally:
        os.fchdir(previous_folder)
        os.close(previous_folder)
    fd = server.detach()
    os.set_blocking(fd, False)
    return int(fd)


def attach_to_supervisor(link: frames.FdLink, run_dir: str, message: Attach) -> int:
    """Pass bytes between the link and a kept run's supervisor; report the end of the run if it has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            os.chdir(run_dir)
            server.connect(SOCKET)
            was_answered = _pass_bytes(link, server.fileno(), message)
        except OSError:
            was_answered = False
    # A supervisor that just ended may not have read the connection or the request.
    if not was_answered:
        send_ended_run(link, run_dir, message.offsets)
    return 0


def _pass_bytes(link: frames.FdLink, fd: int, message: Attach) -> bool:
    """Pass bytes in both directions until one end is gone; return whether the supervisor has sent anything."""
    import select

    has_answered = False
    destination = {link.read_fd: fd, fd: link.write_fd}
    poll = select.poll()
    for source in destination:
        poll.register(source, select.POLLIN)
    try:
        _write_all_bytes(fd, frames.pack_json(message))
        while True:
            for source, _ in poll.poll():
                data = os.read(source, 1 << 16)
                if not data:
                    return has_answered or source == link.read_fd
                has_answered = has_answered or source == fd
                _write_all_bytes(destination[source], data)
    except OSError:
        return has_answered


def send_ended_run(link: frames.FdLink, run_dir: str, offsets: dict[str, int]) -> None:
    """Send the unseen output of an ended run's last attempt, and its exit record."""
    attempts = [name for name in os.listdir(run_dir) if name.startswith("attempt-")] if os.path.isdir(run_dir) else []
    attempts.sort(key=lambda name: int(name[8:]))
    if not attempts:
        raise RequestFailed("no-run", f"{run_dir} does not exist")
    folder = os.path.join(run_dir, attempts[-1])
    try:
        with open(os.path.join(folder, EXIT_RECORD), "rb") as file:
            record = AttemptStopped.parse(frames.decode_message(file.read()))
    except (OSError, frames.BrokenFrame, InvalidMessage):
        record = AttemptStopped(left=0, exits=[])
    output_log.send_stored(link, folder, offsets, record.segments)
    link.send_json(
        AttemptStopped(
            left=record.left,
            exits=record.exits,
            log_bytes_lost=record.log_bytes_lost,
            log_bytes_unstored=record.log_bytes_unstored,
            outputs=record.outputs,
            met=record.met,
            gone=True,
        )
    )


def sweep_run(run_dir: str, message: EndOrphanedRun) -> OrphanedRunEnded:
    """End a run whose launcher is gone: first the supervisor, which ends the others, then any remaining process."""
    deadline = time.monotonic() + message.grace_s + 3
    record = processes.find_living_supervisor(run_dir)
    if record is not None and record.get("token") == message.token:
        supervisor = int(record["pid"])
        if message.by:
            write_atomically(os.path.join(run_dir, STOP_REQUEST), message.by.encode())
        processes.send_process_signal([supervisor], signal.SIGTERM)
        while time.monotonic() < deadline and os.path.exists(f"/proc/{supervisor}"):
            time.sleep(0.02)
    running = len(processes.find_run_processes(message.token))
    swept = OrphanedRunEnded(found=running, left=processes.kill_run_processes(message.token))
    folders.remove_folder_tree(folders.choose_memory_folder(run_dir))
    return swept


def _write_all_bytes(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
