"""How the node's half of dtctl gets onto a node: one command and the first bytes of its standard input.

Nothing has to be installed there. The command is a line of Python that reads a loader from its input; the loader reads
the modules of this package as one compressed bundle, keeps them below the workdir under their digest (so that Python
compiles them once, not at every launch), and calls `main`. No round trip is needed: all of it is sent in one go.

What was kept is checked against the digest each time, and written again if a full disk or a crash has damaged it.
Compiled files that cannot be read are thrown away.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Sequence
from importlib import resources

from dtctl import shell

MODULES = (
    "autopsy", "births", "environment", "facts", "frames", "group", "lean", "link", "main", "metrics", "nursery",
    "processes", "progress", "receive", "stacks", "supervisor", "warm",
)  # fmt: skip

# On one line, because some login shells (csh) do not accept a newline inside quotes.
_FIRST = (
    "import os;dtctl=b'';exec('while len(dtctl)<6:dtctl+=os.read(0,6-len(dtctl)) or os._exit(1)');"
    "n=int(dtctl);dtctl=b'';exec('while len(dtctl)<n:dtctl+=os.read(0,n-len(dtctl)) or os._exit(1)');exec(dtctl)"
)

# Has to run on any Python that may be found, so that an old one is named in an answer instead of in a syntax error.
_ANSWER = """
import os, sys
def answer(code, text):
    import json, struct
    body = json.dumps({"op": "error", "code": code, "message": text}).encode()
    os.write(1, struct.pack("!cii", b"J", -1, len(body)) + body)
    os._exit(1)
def check_version():
    if sys.version_info < (3, 8):
        answer("old-python", "%s is Python %d.%d" % (sys.executable, sys.version_info[0], sys.version_info[1]))
"""
_LOADER = """
import os, sys
def take(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data
def load(digest, workdir, bundle):
    os.umask(0o077)
    lib = os.path.join(workdir, "lib")
    home = os.path.join(lib, digest)
    folder = os.path.join(home, "dtctl", "supervisor")
    if not whole(folder, digest):
        import zlib, json, shutil
        new = not os.path.isdir(home)
        os.makedirs(folder, exist_ok=True)
        for name, text in json.loads(zlib.decompress(bundle).decode()).items():
            part = os.path.join(folder, "%s.%d.part" % (name, os.getpid()))
            with open(part, "wb") as file:
                file.write(text.encode())
            os.rename(part, os.path.join(folder, name))
        old = [os.path.join(lib, name) for name in os.listdir(lib) if new and name != digest]
        for path in sorted(old, key=os.path.getmtime)[:-2]:
            shutil.rmtree(path, ignore_errors=True)
    sys.path.insert(0, home)
    return folder
def whole(folder, digest):
    try:
        from _blake2 import blake2b
    except ImportError:
        from hashlib import blake2b
    found = blake2b(digest_size=16)
    try:
        for name in MODULES:
            with open(os.path.join(folder, name + ".py"), "rb") as file:
                data = file.read()
            found.update(b"%d:" % len(data) + data)
    except OSError:
        return False
    return found.hexdigest() == digest
sizes = take(16)
digest = take(32).decode()
workdir = os.path.expanduser(take(int(sizes[:8])).decode())
bundle = take(int(sizes[8:]))
check_version()
if not os.path.isabs(workdir):
    workdir = os.path.join(os.path.expanduser("~"), workdir)
try:
    folder = load(digest, workdir, bundle)
except OSError as exc:
    import errno
    code = "disk-full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "workdir"
    answer(code, "%s: %s" % (exc.filename or workdir, exc.strerror))
try:
    from dtctl.supervisor.main import main
except Exception:
    import shutil
    for name in [name for name in sys.modules if name.startswith("dtctl")]:
        del sys.modules[name]
    shutil.rmtree(os.path.join(folder, "__pycache__"), ignore_errors=True)
    from dtctl.supervisor.main import main
os._exit(main(workdir))
"""

_IN_MEMORY = """
check_version()
import types
for name, text in SOURCES:
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = []
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
    setattr(sys.modules[name.rpartition(".")[0]], parts[-1], module)
os._exit(sys.modules[name].main())
"""


@functools.cache
def _bundle() -> tuple[bytes, bytes]:
    """The digest (32 bytes of ASCII) and the compressed modules."""
    folder = resources.files("dtctl.supervisor")
    files = {f"{name}.py": (folder / f"{name}.py").read_bytes() for name in MODULES}
    digest = hashlib.blake2b(digest_size=16)
    for data in files.values():
        digest.update(b"%d:" % len(data) + data)
    text = json.dumps({name: data.decode() for name, data in files.items()}).encode()
    return digest.hexdigest().encode(), zlib.compress(text, 6)


def command(python: str) -> str:
    """The shell command that starts the node's half; `python` is a program name or path on the node."""
    # -I and -S: the user's and the site's packages are not ours, and reading them costs time.
    # exec: dash would otherwise stay as a process of its own.
    return "exec " + shell.join([python, "-I", "-S", "-c", _FIRST])


def opening(workdir: str) -> bytes:
    """The first bytes to send; frames follow directly. `workdir` may begin with `~`."""
    digest, bundle = _bundle()
    loader = f"MODULES = {MODULES!r}\n{_ANSWER}{_LOADER}".encode()
    folder = workdir.encode()
    sizes = b"%08d%08d" % (len(folder), len(bundle))
    return b"%06d" % len(loader) + loader + sizes + digest + folder + bundle


def in_memory(modules: Sequence[str]) -> bytes:
    """The first bytes to send instead of `opening` when nothing may be written on the node.

    Args:
        modules: full names of modules of dtctl, each after those that it imports; `main()` of the last is called.
    """
    sources = []
    for name in modules:
        package, _, leaf = name.rpartition(".")
        sources.append((name, (resources.files(package) / f"{leaf}.py").read_text(encoding="utf-8")))
    loader = f"SOURCES = {sources!r}\n{_ANSWER}{_IN_MEMORY}".encode()
    return b"%06d" % len(loader) + loader
