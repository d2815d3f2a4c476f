"""Transfer of dtctl's program to a node: one command and the first bytes of its standard input.

Nothing has to be installed there. The command is a line of Python that reads a loader from its input; the loader reads
the modules of this package, compiled for the Python of this machine and as text for any other, and calls `main`. No
round trip is needed: all of it is sent in one go. Nothing of it is read from a disk there, so what runs is what was
sent, regardless of which users may write to the node's folders.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import marshal
import sys
import threading
import types
import zlib
from importlib import resources

from dtctl import shell

MAIN = "dtctl.supervisor.main"
PACKAGES = ("dtctl", "dtctl.supervisor", "dtctl.supervisor.messages", "dtctl.supervisor.probe")

# On one line, because some login shells (csh) do not accept a newline inside quotes.
_FIRST = (
    "import os;dtctl=b'';exec('while len(dtctl)<6:dtctl+=os.read(0,6-len(dtctl)) or os._exit(1)');"
    "n=int(dtctl);dtctl=b'';exec('while len(dtctl)<n:dtctl+=os.read(0,n-len(dtctl)) or os._exit(1)');exec(dtctl)"
)

# Has to run on any Python that may be found, so that an old one is named in an answer instead of in a syntax error.
_REPORT_ERROR = """
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
class Sent:
    def __init__(self, packed, codes):
        self.packed = packed
        self.codes = codes
    def text(self, name):
        import json
        return json.loads(zlib.decompress(self.packed).decode())[name]
    def find_spec(self, name, path=None, target=None):
        if name not in MODULES and name not in PACKAGES:
            return None
        import _frozen_importlib
        origin = name.replace(".", "/") + ".py"
        spec = _frozen_importlib.ModuleSpec(name, self, origin=origin, is_package=name in PACKAGES)
        spec.has_location = True
        return spec
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        if name in PACKAGES:
            return
        code = self.codes.get(name) or compile(self.text(name), name.replace(".", "/") + ".py", "exec", 0, True)
        exec(code, module.__dict__)
    def get_data(self, path):
        return self.text(path[:-3].replace("/", ".")).encode()
sizes = take(24)
workdir = os.path.expanduser(take(int(sizes[:8])).decode())
texts = take(int(sizes[8:16]))
codes = take(int(sizes[16:]))
check_version()
if not os.path.isabs(workdir):
    workdir = os.path.join(os.path.expanduser("~"), workdir)
os.environ.setdefault("DTCTL_UMASK", "%03o" % os.umask(0o077))
os.umask(0o077)
import zlib
try:
    import _frozen_importlib_external
    same = _frozen_importlib_external.MAGIC_NUMBER.hex() + sys.implementation.cache_tag == COMPILED_FOR
except (ImportError, AttributeError, TypeError):
    same = False
if same:
    import marshal
sys.meta_path.insert(0, Sent(texts, marshal.loads(zlib.decompress(codes)) if same else {}))
from dtctl.supervisor.main import main
os._exit(main(workdir))
"""


def _text(name: str) -> str:
    package, _, leaf = name.rpartition(".")
    return (resources.files(package) / f"{leaf}.py").read_text(encoding="utf-8")


_bundling = threading.Lock()
"""Sessions with all nodes need the bundle at the same moment, and with a cache alone each of them would make it."""


@functools.cache
def _bundle(answering: str) -> tuple[tuple[str, ...], bytes, bytes]:
    """Return the names of the modules, and the modules as text and compiled by this Python; both compressed."""
    codes = _reached([MAIN, answering])
    texts = json.dumps({name: _text(name) for name in codes}).encode()
    return tuple(codes), zlib.compress(texts, 6), zlib.compress(marshal.dumps(codes), 1)


def _reached(names: list[str]) -> dict[str, types.CodeType]:
    """Return the code of some modules of dtctl, and of all those that they import, wherever they do so."""
    codes: dict[str, types.CodeType] = {}
    while names:
        name = names.pop()
        if name not in codes:
            codes[name] = _compiled(name, names)
    return codes


def _imports(code: types.CodeType) -> list[str]:
    """Return modules of dtctl, all of those that code imports: `from dtctl.supervisor import frames` and the like."""
    packages = [name for name in code.co_names if name.startswith("dtctl")]
    if not packages:
        return []
    listed = {each for constant in code.co_consts if isinstance(constant, tuple) for each in constant}
    found = [name for name in packages if name not in PACKAGES]
    return found + [
        f"{name}.{leaf}" for name in packages if name in PACKAGES for leaf in sorted(_modules_of(name) & listed)
    ]


@functools.cache
def _modules_of(package: str) -> frozenset[str]:
    return frozenset(each.name[:-3] for each in resources.files(package).iterdir() if each.name.endswith(".py"))


def _compiled(name: str, imports: list[str]) -> types.CodeType:
    """A module's code, which names no file of this machine; the modules that it imports are added to `imports`."""
    spec = importlib.util.find_spec(name)
    loader = spec.loader if spec is not None else None
    # From the file that Python has compiled already, when it has.
    code = loader.get_code(name) if isinstance(loader, importlib.abc.InspectLoader) else None
    file_name = f"{name.replace('.', '/')}.py"
    return _renamed(code or compile(_text(name), file_name, "exec", dont_inherit=True), file_name, imports)


def _renamed(code: types.CodeType, file_name: str, imports: list[str]) -> types.CodeType:
    imports += _imports(code)
    inner = tuple(
        _renamed(constant, file_name, imports) if isinstance(constant, types.CodeType) else constant
        for constant in code.co_consts
    )
    return code.replace(co_filename=file_name, co_consts=inner)


def _compiled_for() -> str:
    """Return what a Python must have in common with this one to run its compiled code."""
    return importlib.util.MAGIC_NUMBER.hex() + str(sys.implementation.cache_tag)


def arguments(python: str) -> list[str]:
    """Return the command that starts the program; `python` is a program name or path on the node."""
    # -I and -S: the user's and the site's packages are not ours, and reading them costs time.
    return [python, "-I", "-S", "-c", _FIRST]


def command(python: str) -> str:
    """Return the same for a shell."""
    # exec: dash would otherwise stay as a process of its own.
    return "exec " + shell.join(arguments(python))


def opening(workdir: str, answering: str) -> bytes:
    """Return the first bytes to send; frames follow directly.

    Args:
        workdir: the node's folder; may begin with `~`.
        answering: the module that answers the first request, by requests.py; those of other requests stay here.
    """
    with _bundling:
        modules, texts, codes = _bundle(answering)
    facts = {"MODULES": modules, "PACKAGES": PACKAGES, "COMPILED_FOR": _compiled_for()}
    loader = "".join([*(f"{name} = {value!r}\n" for name, value in facts.items()), _REPORT_ERROR, _LOADER]).encode()
    folder = workdir.encode()
    sizes = b"%08d%08d%08d" % (len(folder), len(texts), len(codes))
    return b"%06d" % len(loader) + loader + sizes + folder + texts + codes
