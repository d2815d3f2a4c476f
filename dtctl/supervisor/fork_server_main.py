"""A Python process on a node that imports the workers' modules and forks each worker from itself.

Importing torch takes seconds, forking a process that has imported it milliseconds: there is one import per node and not
per worker, and none at a restart. The node script starts this process in place of the program, so setup lines,
variables and Python (3.8 or newer) are the job's own. This file imports nothing of dtctl, since its process becomes the
user's program.

    from the supervisor, with a descriptor              to the supervisor
                                                        {"ready": true, "argv", "env"} or {"ready": false, "why"}, once
    {"argv": [...], "env": {...}} and the pipe for the  {"pid": N} of the worker, now a child of the supervisor
        output: become this worker
    {"standby": true} and a socket: serve on it after   {"pid": N} of the standby, a copy of this process, likewise
        the end of this process

The end of the supervisor's socket ends this process. No worker is forked from a process with threads or an initialized
GPU: then the supervisor starts a new Python for each worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

VIA_FD = "DTCTL_WARM_FD"
PRELOAD = "DTCTL_WARM_MODULES"
LOOKS_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
DEFERRED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main() -> list[str]:
    """Import modules, then serve until the supervisor is gone; in a forked worker, return the arguments to run."""
    link = socket.socket(fileno=int(os.environ.pop(VIA_FD)))
    supervisor = int(os.environ.pop("DTCTL_WARM_PARENT"))
    modules = os.environ.pop(PRELOAD).split(",")
    sys.path[0] = ""  # In the folder of this file, modules may have the same names as a user's.
    # These signals are for the workers; this process ends with its supervisor. They are blocked and not ignored, so
    # that a signal before the first worker reaches that one, and a signal to a forked process reaches it as a worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED_SIGNALS)
    by_nvml = LOOKS_BY_NVML in os.environ
    obstacle = load(modules)
    env = dict(os.environ)  # This includes variables that the modules have set.
    if not by_nvml:
        env.pop(LOOKS_BY_NVML, None)
    send_reply_line(link, {"ready": not obstacle, "why": obstacle, "argv": ["", *sys.argv[1:]], "env": env})
    has_forked = False
    while True:
        message, fd = receive_fork_request(link)
        if message is None:
            os._exit(0)
        pending = [] if has_forked else sorted(signal.sigpending())
        intermediate = os.fork()
        if intermediate:
            os.close(fd)
            os.waitpid(intermediate, 0)
            has_forked = has_forked or "argv" in message
            continue
        child = os.fork()
        if child:
            send_reply_line(link, {"pid": child})
            os._exit(0)  # The supervisor is a subreaper, so it now becomes the parent of the child.
        link.close()
        await_adoption(supervisor)
        if "argv" not in message:
            link, has_forked = socket.socket(fileno=fd), True
            continue
        set_up_worker_process(message, fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DEFERRED_SIGNALS)
        for number in pending:
            os.kill(os.getpid(), number)
        return list(message["argv"])


def load(modules: list[str]) -> str:
    """Import modules; return the reason why workers cannot be forked after that, or an empty text."""
    import gc
    import importlib

    # Importing makes half a million objects and hardly any garbage; collecting it would take a third of the time.
    gc.disable()
    # With this variable, torch looks for GPUs without starting CUDA, which does not work after a fork.
    os.environ.setdefault(LOOKS_BY_NVML, "1")
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as exc:  # noqa: BLE001 - the program gets the same error and reports it
            return "import %s: %s: %s" % (name, type(exc).__name__, exc)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing has initialized the GPU"
    # The first fork has two purposes. Some threads, such as those of NumPy's OpenBLAS, end before a fork and start
    # again only when needed. And a query may have started CUDA, which `is_initialized` does not report but a child can.
    child = os.fork()
    if not child:
        os._exit(1 if torch is not None and torch.cuda._is_in_bad_fork() else 0)
    if os.waitpid(child, 0)[1]:
        return "importing has started CUDA: a module has asked for GPUs"
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return "importing has started %d threads" % (threads - 1)
    gc.freeze()  # Pages whose objects do not change then stay shared between the processes.
    gc.enable()
    return ""


def receive_fork_request(link: socket.socket) -> tuple[dict | None, int]:  # type: ignore[type-arg]
    """Return the next message and the descriptor that came with it; (None, -1) at the end."""
    import array

    fds = array.array("i")
    data, ancillary, _, _ = link.recvmsg(8, socket.CMSG_SPACE(fds.itemsize))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        return None, -1
    while len(data) < 8:
        data += link.recv(8 - len(data))
    size, body = int(data), b""
    while len(body) < size:
        data_part = link.recv(size - len(body))
        if not data_part:
            return None, -1
        body += data_part
    return json.loads(body.decode("utf-8", "surrogateescape")), fds[0]


def send_reply_line(link: socket.socket, message: dict) -> None:  # type: ignore[type-arg]
    """Send one line; ignore a closed link."""
    try:
        link.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass


def await_adoption(supervisor: int) -> None:
    """Give this process its own session, and return once it is a child of the supervisor."""
    import time

    os.setsid()
    intermediate = os.getppid()
    while intermediate != supervisor and os.getppid() == intermediate:
        time.sleep(0.0005)
    if os.getppid() != supervisor:
        os._exit(1)
    end_with_supervisor(supervisor)


def set_up_worker_process(message: dict, output: int) -> None:  # type: ignore[type-arg]
    """Make this process the worker: its output, environment and random state."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, fd in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, fd)
    os.close(null)
    os.close(output)
    os.environ.clear()
    os.environ.update(message["env"])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # Python reseeds its own generator after a fork, and torch's has a fixed seed.


def end_with_supervisor(supervisor: int) -> None:
    """End this process when the supervisor does."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    except (ImportError, AttributeError, OSError):
        pass
    if os.getppid() != supervisor:
        os._exit(1)


def name_as(name: str) -> None:
    """Set the name of this process for `ps`, `top` and `pkill`, since its command line is that of its parent."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(15, name.encode(errors="replace")[:15], 0, 0, 0)  # PR_SET_NAME
    except (ImportError, AttributeError, OSError):
        pass


def run(argv: list[str]) -> None:
    """Run a program as `python ARGV` does: a script and its arguments, or -m, a module and its arguments."""
    sys.excepthook = print_user_traceback
    name_as(os.path.basename(argv[1] if argv[0] == "-m" else argv[0]))
    if argv[0] == "-m":
        import runpy

        sys.argv = argv[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    import builtins
    import types

    path = os.path.abspath(argv[0])
    sys.argv = list(argv)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = types.ModuleType("__main__")
    file_name = path if sys.version_info >= (3, 9) else argv[0]  # Python itself uses this form.
    module.__dict__.update(__file__=file_name, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), file_name, "exec")
    exec(code, module.__dict__)  # noqa: S102 - this is the user's program


def print_user_traceback(kind, error, trace) -> None:  # type: ignore[no-untyped-def]
    """Print a traceback that begins with the user's program."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    run(main())
