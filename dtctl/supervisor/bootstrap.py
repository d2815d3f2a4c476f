"""Transfer of dtctl's program to a node: one command and the first bytes of its standard input.

Nothing has to be installed on the node. The command is a line of Python that reads a loader from its input; the loader
reads the modules of this package, compiled for the Python of this machine and as text for any other, and calls `main`.
All of this is sent without a round trip. The node reads no code from its disk, so it runs exactly the code that was
sent, regardless of the users who may write to its folders.
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

# This is one line, because some login shells (csh) do not accept a newline inside quotes.
_FIRST = (
    "import os;dtctl=b'';exec('while len(dtctl)<6:dtctl+=os.read(0,6-len(dtctl)) or os._exit(1)');"
    "n=int(dtctl);dtctl=b'';exec('while len(dtctl)<n:dtctl+=os.read(0,n-len(dtctl)) or os._exit(1)');exec(dtctl)"
)

# This has to run on every Python, so that an old version is reported by an answer and not by a syntax error.
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
        self.texts = None
    def text(self, name):
        if self.texts is None:
            import json
            self.texts = json.loads(zlib.decompress(self.packed).decode())
        return self.texts[name]
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


def _read_module_text(name: str) -> str:
    package, _, leaf = name.rpartition(".")
    return (resources.files(package) / f"{leaf}.py").read_text(encoding="utf-8")


_bundling = threading.Lock()
"""Lock for the bundle, since sessions with all nodes need it at the same time and would otherwise each make it."""


@functools.cache
def _bundle_modules(answering: str) -> tuple[tuple[str, ...], bytes, bytes]:
    """Return the names of the modules, and the modules as text and as code of this Python, both compressed."""
    codes = _collect_module_codes([MAIN, answering])
    texts = json.dumps({name: _read_module_text(name) for name in codes}).encode()
    return tuple(codes), zlib.compress(texts, 6), zlib.compress(marshal.dumps(codes), 1)


def _collect_module_codes(names: list[str]) -> dict[str, types.CodeType]:
    """Return the code of some modules of dtctl, and of all modules that they import at any place."""
    codes: dict[str, types.CodeType] = {}
    while names:
        name = names.pop()
        if name not in codes:
            codes[name] = _compile_module(name, names)
    return codes


def _find_dtctl_imports(code: types.CodeType) -> list[str]:
    """Return all modules of dtctl that code imports, such as by `from dtctl.supervisor import frames`."""
    packages = [name for name in code.co_names if name.startswith("dtctl")]
    if not packages:
        return []
    listed = {each for constant in code.co_consts if isinstance(constant, tuple) for each in constant}
    found = [name for name in packages if name not in PACKAGES]
    return found + [
        f"{name}.{leaf}"
        for name in packages
        if name in PACKAGES
        for leaf in sorted(_list_package_modules(name) & listed)
    ]


@functools.cache
def _list_package_modules(package: str) -> frozenset[str]:
    return frozenset(each.name[:-3] for each in resources.files(package).iterdir() if each.name.endswith(".py"))


def _compile_module(name: str, imports: list[str]) -> types.CodeType:
    """Return a module's code without file names of this machine; add the modules that it imports to `imports`."""
    spec = importlib.util.find_spec(name)
    loader = spec.loader if spec is not None else None
    # This uses the file that Python has compiled already, if there is one.
    code = loader.get_code(name) if isinstance(loader, importlib.abc.InspectLoader) else None
    file_name = f"{name.replace('.', '/')}.py"
    return _rename_code_file(
        code or compile(_read_module_text(name), file_name, "exec", dont_inherit=True), file_name, imports
    )


def _rename_code_file(code: types.CodeType, file_name: str, imports: list[str]) -> types.CodeType:
    imports += _find_dtctl_imports(code)
    inner = tuple(
        _rename_code_file(constant, file_name, imports) if isinstance(constant, types.CodeType) else constant
        for constant in code.co_consts
    )
    return code.replace(co_filename=file_name, co_consts=inner)


def _compiled_for() -> str:
    """Return the properties that a Python must share with this one to run its compiled code."""
    return importlib.util.MAGIC_NUMBER.hex() + str(sys.implementation.cache_tag)


def build_bootstrap_argv(python: str) -> list[str]:
    """Return the command that starts the program; `python` is a program name or path on the node."""
    # With -I and -S, Python does not search the user's and the site's packages, which would take time.
    return [python, "-I", "-S", "-c", _FIRST]


def format_bootstrap_command(python: str) -> str:
    """Return the command that starts the program as text for a shell."""
    # Without exec, dash would stay as a separate process.
    return "exec " + shell.join_command(build_bootstrap_argv(python))


def build_opening_bytes(workdir: str, answering: str) -> bytes:
    """Return the first bytes to send; frames follow directly.

    Args:
        workdir: the node's folder; may begin with `~`.
        answering: module that answers the first request, by requests.py; modules for other requests are not sent.
    """
    with _bundling:
        modules, texts, codes = _bundle_modules(answering)
    facts = {"MODULES": modules, "PACKAGES": PACKAGES, "COMPILED_FOR": _compiled_for()}
    loader = "".join([*(f"{name} = {value!r}\n" for name, value in facts.items()), _REPORT_ERROR, _LOADER]).encode()
    folder = workdir.encode()
    sizes = b"%08d%08d%08d" % (len(folder), len(texts), len(codes))
    return b"%06d" % len(loader) + loader + sizes + folder + texts + codes
