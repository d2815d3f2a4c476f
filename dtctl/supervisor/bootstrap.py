"""Transfer of dtctl's program to a node: one command and the first bytes of its standard input.

Nothing has to be installed on the node. The command is a line of Python that reads a loader from its input; the loader
reads the modules of this package, compiled for the Python of this machine, and calls `main`. All of this is sent
without a round trip; only a node with another Python requests the modules as text. The node reads no code from its
disk, so it runs exactly the code that was sent, regardless of the users who may write to its folders.

Each node gets the program over its own connection, so its size counts as often as there are nodes. It is therefore
packed for its size, which takes longer than a launch may, and kept in a file of this user.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import io
import json
import marshal
import os
import sys
import threading
import tokenize
import types
import zlib
from importlib import resources
from typing import TYPE_CHECKING, Any

from dtctl import folders, shell

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import Traversable

MAIN = "dtctl.supervisor.main"
PACKAGES = ("dtctl", "dtctl.supervisor", "dtctl.supervisor.messages", "dtctl.supervisor.probe")
SENT_AS_TEXT = frozenset(
    f"dtctl.supervisor.{name}"
    for name in ("environments", "fork_server_main", "hmac_socket", "index_hosts", "relay", "stacks")
)
"""Modules that few runs import. Compressed text is half as long as code, and a node compiles it when it is imported."""
MAX_PACKED_BYTES = 4 << 20
MAX_KEPT_VERSIONS = 4
"""Number of versions of dtctl whose packed files are kept."""

# This is one line, because some login shells (csh) do not accept a newline inside quotes.
_FIRST = (
    "import os,zlib;dtctl=b'';exec('while len(dtctl)<6:dtctl+=os.read(0,6-len(dtctl)) or os._exit(1)');"
    "n=int(dtctl);dtctl=b'';exec('while len(dtctl)<n:dtctl+=os.read(0,n-len(dtctl)) or os._exit(1)');"
    "exec(zlib.decompress(dtctl))"
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
import os, sys, zlib
def take(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data
class Sent:
    def __init__(self, modules):
        self.modules = modules
    def find_spec(self, name, path=None, target=None):
        if name not in self.modules and name not in PACKAGES:
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
        code = self.modules[name]
        if isinstance(code, str):
            code = compile(code, name.replace(".", "/") + ".py", "exec", 0, True)
        exec(code, module.__dict__)
    def get_data(self, path):
        return self.modules[path[:-3].replace("/", ".")].encode()
sizes = take(24)
workdir = os.path.expanduser(take(int(sizes[:8])).decode())
texts = take(int(sizes[8:16]))
codes = take(int(sizes[16:]))
check_version()
if not os.path.isabs(workdir):
    workdir = os.path.join(os.path.expanduser("~"), workdir)
os.environ.setdefault("DTCTL_UMASK", "%03o" % os.umask(0o077))
os.umask(0o077)
try:
    import _frozen_importlib_external
    from _lzma import LZMADecompressor
    same = _frozen_importlib_external.MAGIC_NUMBER.hex() + sys.implementation.cache_tag == COMPILED_FOR
except (ImportError, AttributeError, TypeError):
    same = False
early = b""
if same:
    import marshal
    modules = marshal.loads(LZMADecompressor().decompress(codes))
else:
    import json
    import struct
    header = struct.Struct("!cii")
    if not texts:
        os.write(1, header.pack(b"T", -1, 0))
    while not texts:
        head = take(header.size)
        body = take(header.unpack(head)[2])
        if head[:1] == b"T":
            texts = body
        else:
            early += head + body
    modules = json.loads(zlib.decompress(texts).decode())
sys.meta_path.insert(0, Sent(modules))
from dtctl.supervisor.main import main
os._exit(main(workdir, early))
"""


def _locate_package(package: str) -> Traversable:
    # `resources.files(package)` would import the package, and a launch needs no module of the probe.
    return resources.files("dtctl").joinpath(*package.split(".")[1:])


def _read_module_text(name: str) -> str:
    package, _, leaf = name.rpartition(".")
    return _locate_package(package).joinpath(f"{leaf}.py").read_text(encoding="utf-8")


_packing = threading.Lock()
"""Lock for packing, since sessions with all nodes need the modules at the same time and would otherwise each do it."""


def _load_modules(answering: str, form: str) -> bytes:
    """Return the modules of a program as `codes` or as `texts`, packed by this launch or an earlier one."""
    with _packing:
        return _load_packed_modules(answering, form)


@functools.cache
def _load_packed_modules(answering: str, form: str) -> bytes:
    def pack_form() -> bytes:
        return _pack_codes(answering) if form == "codes" else _pack_texts(answering)

    return load_kept_file(f"{answering}.{sys.implementation.cache_tag}.{form}", _digest_sources(), pack_form)


def load_kept_file(name: str, digest: bytes, pack: Callable[[], bytes]) -> bytes:
    """Return a packed file that an earlier launch of this user has kept, or pack it and keep it.

    Args:
        name: name of the file.
        digest: SHA-256 of the sources; a file that was packed from others is packed again.
        pack: makes the file's bytes, at most `MAX_PACKED_BYTES` of them.
    """
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folder = os.path.join(cache, "dtctl", "program")
    # Two versions of dtctl that are used in turn do not overwrite each other's files.
    path = os.path.join(folder, f"{name}.{digest.hex()[:12]}")
    with contextlib.suppress(OSError):  # This includes a folder that others may write to.
        folders.check_private(folder)
        kept = folders.read_regular(path, MAX_PACKED_BYTES)
        if kept[:64] == digest + hashlib.sha256(kept[64:]).digest():
            return kept[64:]
    from dtctl.supervisor.records import write_atomically  # Most launches write nothing.

    packed = pack()
    with contextlib.suppress(OSError):  # Without the file, the next launch packs again.
        folders.make_private(folder)
        write_atomically(path, digest + hashlib.sha256(packed).digest() + packed)
        kept_paths = [entry.path for entry in os.scandir(folder) if entry.name.startswith(f"{name}.")]
        for old in sorted(kept_paths, key=os.path.getmtime)[:-MAX_KEPT_VERSIONS]:
            os.unlink(old)
    return packed


@functools.cache
def _digest_sources() -> bytes:
    """Return the SHA-256 of all modules that may be sent, of this module, and of the version of Python."""
    total = hashlib.sha256(_compiled_for().encode())
    for package in PACKAGES:
        for name in sorted(_list_package_modules(package)):
            total.update(f"\0{package}.{name}\0{_read_module_text(f'{package}.{name}')}".encode())
    return total.digest()


def _pack_codes(answering: str) -> bytes:
    codes = _collect_module_codes([MAIN, answering])
    import lzma  # Most launches find the codes packed.

    sent = {name: _strip_text(name) if name in SENT_AS_TEXT else code for name, code in codes.items()}
    # A node unpacks it in half the time of bz2, and zlib's result is a third longer.
    best = {"preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0, "dict_size": 1 << 19}
    return lzma.compress(marshal.dumps(sent), lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, **best}])


def _pack_texts(answering: str) -> bytes:
    names = _collect_module_codes([MAIN, answering])
    return zlib.compress(json.dumps({name: _strip_text(name) for name in names}).encode(), 9)


def _strip_text(name: str) -> str:
    """Return the text of a module without comments and docstrings; the numbers of its lines stay."""
    text = _read_module_text(name)
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            count = node.value.end_lineno - node.lineno  # type: ignore[operator]  # a parsed node has both
            lines[node.lineno - 1 : node.lineno + count] = [" " * node.col_offset + '""'] + [""] * count
    return "\n".join(lines)


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
    folder = _locate_package(package)
    if not folder.is_dir():  # The launcher of a Slurm job has no probe.
        return frozenset()
    return frozenset(each.name[:-3] for each in folder.iterdir() if each.name.endswith(".py"))


def _compile_module(name: str, imports: list[str]) -> types.CodeType:
    """Return a module's code, as small as possible; add the modules that it imports to `imports`.

    Lines of tracebacks stay. Columns, docstrings and annotations of functions, which nothing on a node reads, go.
    """
    tree = ast.parse(_read_module_text(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword | ast.alias):
            node.end_lineno = node.lineno
            node.col_offset = node.end_col_offset = -1
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return _shorten_code(compile(tree, f"{name.replace('.', '/')}.py", "exec", dont_inherit=True, optimize=2), imports)


def _shorten_code(code: types.CodeType, imports: list[str]) -> types.CodeType:
    imports += _find_dtctl_imports(code)
    inner = tuple(
        _shorten_code(constant, imports) if isinstance(constant, types.CodeType) else constant
        for constant in code.co_consts
    )
    # Names of local variables get short, as minifiers do it; those of arguments and of closures are needed.
    given = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    given += bool(code.co_flags & inspect.CO_VARKEYWORDS)
    local = tuple(
        name if number < given or name in code.co_cellvars else f"v{number}"
        for number, name in enumerate(code.co_varnames)
    )
    # Tracebacks have the short name; a Python before 3.11 keeps no other one.
    short: dict[str, Any] = {"co_qualname": code.co_name} if hasattr(code, "co_qualname") else {}
    return code.replace(co_consts=inner, co_varnames=local, **short)


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


def load_texts(answering: str) -> bytes:
    """Return the modules as text, for a node that requests them."""
    return _load_modules(answering, "texts")


def build_opening_bytes(workdir: str, answering: str, *, has_texts: bool = False) -> bytes:
    """Return the first bytes to send; frames follow directly.

    Args:
        workdir: the node's folder; may begin with `~`.
        answering: module that answers the first request, by requests.py; modules for other requests are not sent.
        has_texts: whether to send the modules as text, too, since the node cannot request them.
    """
    codes = _load_modules(answering, "codes")
    texts = load_texts(answering) if has_texts else b""
    folder = workdir.encode()
    sizes = b"%08d%08d%08d" % (len(folder), len(texts), len(codes))
    return _compress_loader() + sizes + folder + texts + codes


@functools.cache
def _compress_loader() -> bytes:
    """Return the loader with its length, which is the same for all nodes."""
    facts = f"PACKAGES = {PACKAGES!r}\nCOMPILED_FOR = {_compiled_for()!r}\n"
    loader = zlib.compress((facts + _REPORT_ERROR + _LOADER).encode(), 9)
    return b"%06d" % len(loader) + loader
