"""A launch on a node, until its run starts, and from the last process of the run on. Stdlib only, Python 3.8.

Until then this is a plain question-and-answer over the link: hello, push, prepare. `start` forks: the child is the
supervisor, and this process stays as its guard, which ends the run's processes if the supervisor is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from dtctl import folders, node_facts
from dtctl.schema import InvalidMessage
from dtctl.supervisor import facts, frames, output_log, processes, work
from dtctl.supervisor.messages.attempt import (
    RUN_REQUESTS,
    Attach,
    AttemptStopped,
    PortProbed,
    ProbePorts,
    StartAttempt,
)
from dtctl.supervisor.messages.base import Message, Working, by_op
from dtctl.supervisor.messages.setup import DataLink, Hello, NodeDescription, Prepare, PushTree, Ready, Sweep, Swept
from dtctl.supervisor.records import EXIT_RECORD, STOP_REQUEST, write_atomically
from dtctl.supervisor.requests import CannotDo, NodeRequests

REPORT_S = 1.0
"""Seconds between two signs of life while the code is brought and checked."""
MIN_FREE_BYTES = 16 << 20
SOCKET = "control.sock"
SETUP_REQUESTS = {**RUN_REQUESTS, **by_op(Hello, PushTree, Prepare, Sweep)}
RUNS_LOOKED_AT = 64
"""Each costs a few reads, and a node may keep the folders of thousands."""


class Reporting:
    """Reports every second that this node is at work, while it does what has no other sign of life."""

    def __init__(self, link: frames.FdLink) -> None:
        """Report over a link to the control machine."""
        import threading  # slow to import, and not needed for the first answer

        self._link = link
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _report(self) -> None:
        while not self._done.wait(REPORT_S):
            try:
                self._link.send_json(Working())
            except OSError:
                return  # the link is gone, which the other thread finds, too


class SetupRequests(NodeRequests):
    """Whatever a launch asks of a node, until the run starts and this process serves that."""

    KINDS = SETUP_REQUESTS
    IDLE_LIMIT_S = 120.0
    """The control machine pings nodes that are ready."""

    def __init__(self, link: frames.FdLink, workdir: str) -> None:
        """See `NodeRequests`.

        Raises:
            CannotDo: the workdir cannot be made.
            Foreign: others may write to one of its folders.
        """
        super().__init__(link, workdir)
        claim(workdir)

    def answer(self, request: Message) -> int | None:
        """Answer one request; the first attempt's and that of a new link are the last ones."""
        link, runs = self.link, os.path.join(self.workdir, "runs")
        if isinstance(request, Hello):
            link.send_json(describe_node(self.workdir, request))
            from dtctl.supervisor import supervisor  # noqa: F401 - imported while the control machine continues
        elif isinstance(request, PushTree):
            from dtctl.supervisor import receive

            try:
                with Reporting(link):
                    receive.receive(link, self.workdir, request.tree, request.store)
            except receive.Refused:
                return 1  # the control machine has received the reason
        elif isinstance(request, Prepare):
            with Reporting(link):
                if request.environment is not None:
                    from dtctl.supervisor import environments

                    environments.make_environment(link, self.workdir, request.environment)
                prepare(self.workdir, request)
            link.send_json(Ready())
        elif isinstance(request, ProbePorts):
            link.send_json(PortProbed(port=node_facts.first_free(request.ports)))
        elif isinstance(request, StartAttempt):
            return run(link, self.workdir, request)
        elif isinstance(request, Attach):
            return attach(link, os.path.join(runs, request.run), request)
        elif isinstance(request, Sweep):
            with Reporting(link):
                swept = sweep(os.path.join(runs, request.run), request)
            link.send_json(swept)
        return None


def claim(workdir: str) -> None:
    """Make the workdir, and check that no other user can put files into it or into a folder of ours below it.

    Raises:
        CannotDo: it cannot be made.
        Foreign: others may write to one of the folders.
    """
    try:
        folders.make_private(workdir)
    except folders.Foreign:
        raise
    except OSError as exc:
        code = facts.code_of(exc)
        raise CannotDo(
            code if code == "disk-full" else "workdir", f"{exc.filename or workdir}: {exc.strerror}"
        ) from exc
    for name in ("code", "data", "envs", "runs"):
        folders.check_private(os.path.join(workdir, name))


def describe_node(workdir: str, request: Hello) -> NodeDescription:
    """Return this node's description of itself."""
    has_environment = has_uv = False
    has_glibc = True
    if request.environment:
        from dtctl.supervisor import environments

        has_environment = environments.is_ready(workdir, request.environment)
        if not has_environment:
            has_uv, has_glibc = bool(environments.find_uv()), environments.has_glibc()
    return NodeDescription(
        gpus=node_facts.count_gpus(os.environ),
        cores=node_facts.usable_cores(),
        address=facts.server_address(),
        port=node_facts.first_free(request.ports),
        python=".".join(str(part) for part in sys.version_info[:3]),
        host=os.uname().nodename[:255],
        workdir=workdir,
        running=runs_under_way(os.path.join(workdir, "runs")),
        machine=os.uname().machine,
        has_environment=has_environment,
        has_uv=has_uv,
        has_glibc=has_glibc,
    )


def runs_under_way(runs_dir: str) -> list[str]:
    """Runs that are under way on this node, of the newest in the folder."""
    try:
        with os.scandir(runs_dir) as entries:
            ages = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries)
    except OSError:  # another process removes runs meanwhile; this is for information only
        return []
    names = [name for _, name in ages[-RUNS_LOOKED_AT:]]
    return [name for name in names if processes.living_supervisor(os.path.join(runs_dir, name)) is not None]


def _absent(path: str, kind: str) -> str:
    """Return why something cannot be used as a folder or a file."""
    return f"{path} is not a {kind}" if os.path.exists(path) else f"{path} does not exist"


def prepare(workdir: str, message: Prepare) -> None:
    """Check now, before any node has started anything, for whatever would make the start fail.

    Raises:
        CannotDo: the run exists already, the disk is full, or a file or program that the job needs is missing.
    """
    run_dir = os.path.join(workdir, "runs", message.run)
    if message.fresh and os.path.exists(run_dir) and not work.holds_copies_alone(run_dir):
        raise CannotDo("run-exists", f"{run_dir} already exists")
    stat = os.statvfs(workdir)
    if stat.f_bavail * stat.f_frsize < MIN_FREE_BYTES:
        raise CannotDo("disk-full", f"{stat.f_bavail * stat.f_frsize >> 20} MiB are left on the disk of {workdir}")
    folders.make_private(run_dir)
    cwd = os.path.expanduser(message.cwd)
    if not os.path.isdir(cwd):
        raise CannotDo("missing-folder", _absent(cwd, "folder"))
    for path in message.files:
        if not os.path.isfile(os.path.join(cwd, path)):
            code = "missing-file" if message.pushed else "missing-there"
            raise CannotDo(code, _absent(os.path.join(cwd, path), "file"))
    for program in ["bash", *message.programs]:
        if not which(program, cwd, message.path):
            raise CannotDo("missing-program", program)
    if message.pushed:
        from dtctl.supervisor import receive

        receive.hold(cwd)  # this process may not be the one that has taken the push
    data = [(link.to, _locate_data(workdir, link)) for link in message.data]
    if message.shared:
        work.share(run_dir, cwd)
        return
    earlier_dir = os.path.join(workdir, "runs", message.earlier) if message.earlier else ""
    try:
        work.prepare(
            run_dir, cwd, message.outputs, earlier_dir, message.pushed, data=data, replicated=message.replicated
        )
    except work.TooLarge as exc:
        raise CannotDo("too-large", f"{cwd} cannot be copied into the working folder of the run: {exc}") from exc


def _locate_data(workdir: str, link: DataLink) -> str:
    """Return the place of files in addition to the code on this node; a tree stays there while this process lives.

    Raises:
        CannotDo: they are missing.
    """
    path = os.path.expanduser(link.path)
    if link.tree:
        from dtctl.supervisor import receive

        folder = receive.find(workdir, link.tree, "data")
        if not folder:
            raise CannotDo("missing-data", "the files of %s are not here" % link.to)
        path = os.path.join(folder, link.path) if link.path else folder
    elif not os.path.exists(path):
        raise CannotDo("missing-data", "%s does not exist" % path)
    return path


def which(program: str, cwd: str, first: str = "") -> str:
    """Path of the program that this name starts, looked for in the folder `first` before PATH; empty without one."""
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
    """Become a supervisor and its guard; returns in the guard, when all is over."""
    run_dir = os.path.join(workdir, "runs", message.run)
    listener = listen(run_dir) if message.keep else None
    processes.become_subreaper()
    from dtctl.supervisor import receive

    receive.stop_serving()  # all nodes have the code; and nothing but this thread may be here when it forks
    guard_pid = os.getpid()
    supervisor = os.fork()
    if supervisor:
        return guard(supervisor, message.token)
    status = 1
    try:
        from dtctl.supervisor.supervisor import Supervisor

        # A message may have come with the one that started us.
        server = Supervisor(message, run_dir, link, listener, guard_pid)
        server.start(message)
        server.serve()
        status = 0
    finally:
        if status:
            import traceback

            traceback.print_exc()
        os._exit(status)


def guard(supervisor: int, token: str) -> int:
    """Wait for the supervisor; if it did not end by itself, end what it has left behind."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: processes.send([supervisor], number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    while True:
        pid, status = os.waitpid(-1, 0)  # orphans of the run are handed to us when the supervisor dies
        if pid == supervisor:
            break
    if status != 0:
        processes.kill(token)
    return 0 if status == 0 else 1


def listen(run_dir: str) -> int:
    """Return a unix socket in the run's folder on which a kept run takes a new link; its descriptor."""
    path = os.path.join(run_dir, SOCKET)
    if os.path.exists(path):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous_folder = os.open(".", os.O_RDONLY)
    os.chdir(run_dir)  # the address of a unix socket is at most 107 bytes long, a run folder's path may be longer
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


def attach(link: frames.FdLink, run_dir: str, message: Attach) -> int:
    """Pass bytes between the link and a kept run's supervisor; report the end of the run if that is over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            os.chdir(run_dir)
            server.connect(SOCKET)
            was_answered = _pass_bytes(link, server.fileno(), message)
        except OSError:
            was_answered = False
    if not was_answered:  # also by a supervisor that ended just now, with the connection or the request unread
        replay(link, run_dir, message.offsets)
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
        _write_all(fd, frames.pack_json(message))
        while True:
            for source, _ in poll.poll():
                data = os.read(source, 1 << 16)
                if not data:
                    return has_answered or source == link.read_fd
                has_answered = has_answered or source == fd
                _write_all(destination[source], data)
    except OSError:
        return has_answered


def replay(link: frames.FdLink, run_dir: str, offsets: dict[str, int]) -> None:
    """Send what an ended run has left in its folder: the unseen part of its last logs, and its exit record."""
    attempts = [name for name in os.listdir(run_dir) if name.startswith("attempt-")] if os.path.isdir(run_dir) else []
    attempts.sort(key=lambda name: int(name[8:]))
    if not attempts:
        raise CannotDo("no-run", f"{run_dir} does not exist")
    folder = os.path.join(run_dir, attempts[-1])
    try:
        with open(os.path.join(folder, EXIT_RECORD), "rb") as file:
            record = AttemptStopped.parse(frames.decode(file.read()))
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


def sweep(run_dir: str, message: Sweep) -> Swept:
    """End a run whose launcher is gone: its supervisor first, which ends the rest, then any process that remains."""
    deadline = time.monotonic() + message.grace_s + 3
    record = processes.living_supervisor(run_dir)
    if record is not None and record.get("token") == message.token:
        supervisor = int(record["pid"])
        if message.by:
            write_atomically(os.path.join(run_dir, STOP_REQUEST), message.by.encode())
        processes.send([supervisor], signal.SIGTERM)
        while time.monotonic() < deadline and os.path.exists(f"/proc/{supervisor}"):
            time.sleep(0.02)
    running = len(processes.find(message.token))
    swept = Swept(found=running, left=processes.kill(message.token))
    folders.remove_tree(folders.memory_folder(run_dir))
    return swept


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
