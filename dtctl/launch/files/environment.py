"""The environment of `job.environment`: its lock, the files that are brought to nodes, and the order to make it.

The lock is a file of requirements with hashes, which uv makes of the user's own and nodes install without resolving
anything again. What goes to a node that has not made the environment yet is one tree: the lock, the wheels that only
this machine has.
"""

from __future__ import annotations

import hashlib
import os
import platform as machines
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dtctl import names
from dtctl.errors import PlanError, UsageError
from dtctl.launch.control.link import NodeLink
from dtctl.launch.files import push
from dtctl.launch.files.data import CACHE_DIR, scan_data
from dtctl.launch.files.relay import Relay
from dtctl.launch.files.tree import Tree, tree_digest
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.spec.model import Spec
from dtctl.supervisor.messages.setup import EnvironmentOrder

FOLDER: Final = "environment"
LOCK_SUFFIX: Final = ".dtctl.lock"
_MADE: Final = "# Made by dtctl from "
_HEAD: Final = _MADE + "{source}, and made again when that changes. Keep it with your code.\n# source: {digest}\n"
_INCLUDED: Final = re.compile(r"(?:-r|-c|--requirement|--constraint)[ =]*(\S+)")
_HASH: Final = re.compile(r"--hash[ =]sha256:")
_HASH_LINE: Final = re.compile(r"[ ]*\\\n[ ]*--hash[ =]sha256:[0-9a-f]+")
_WHEEL: Final = re.compile(r"(?:\S+\s*@\s*)?(?:file://)?(?P<path>\S+\.whl)(?P<rest>\s.*|)\Z", re.DOTALL)
"""A line with a wheel of this machine: `./x-1.0-py3-none-any.whl \\`."""
_SOURCE: Final = re.compile(r"(?:-e\s+|--editable[ =])?(?:\S+\s*@\s*)?(?:file:|\.{1,2}/|/)\S*")
_CONTINUED: Final = " \\"
_PLATFORMS: Final = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedEnvironment:
    """Packages that the nodes install."""

    digest: str
    """Digest of all fields that follow; name of the folder on nodes."""
    source: str
    """Name of the file with the requirements."""
    lock: str
    """Text of the lock as nodes get it, with the lines of the file that a user sees."""
    lock_name: str
    """Name of that file."""
    python: str
    machine: str
    wheels: tuple[Path, ...]
    """Wheels of this machine that the lock names."""
    is_new: bool
    """True if the lock had to be made again."""

    @property
    def package_count(self) -> int:
        """Number of packages."""
        return len(list(_requirements(self.lock)))

    @property
    def short_summary(self) -> str:
        """Return a summary in words: `12 packages of requirements.txt for Python 3.12 on x86_64`."""
        count = f"{self.package_count} package{'' if self.package_count == 1 else 's'}"
        return f"{count} of {self.source} for Python {self.python} on {self.machine} ({self.digest[:8]})"


def lock_environment(spec: Spec, *, write: bool) -> LockedEnvironment:
    """Return the environment of a spec that has one, with its lock, which is made where it is missing or old.

    Args:
        spec: the checked spec.
        write: whether a new lock is kept next to the spec.

    Raises:
        PlanError: a file is missing, or its requirements are not available.
        UsageError: uv is needed and not installed.
    """
    source = _Source(spec)
    text = source.read_lock()
    return source.lock_to(text, is_new=False) if text else source.lock_to(source.make_lock(write=write), is_new=True)


def describe_environment(spec: Spec) -> str:
    """Return what nodes would install, as far as it is locked; empty without an environment.

    Raises:
        PlanError: a file is missing.
    """
    if spec.job.environment is None:
        return ""
    source = _Source(spec)
    if text := source.read_lock():
        return source.lock_to(text, is_new=False).short_summary
    return f"{source.name} has no lock yet, or was changed since; a launch makes it"


class _Source:
    """The user's files, and what uv is asked to make of them."""

    def __init__(self, spec: Spec) -> None:
        wanted = spec.job.environment
        if wanted is None:
            raise ValueError("the job has no environment")
        self.base_dir = spec.base_dir
        self.wanted = wanted
        self.where = spec.written_at("job.environment")
        self.python = wanted.python or "{}.{}".format(*sys.version_info)
        self.machine = wanted.platform or machines.machine()
        self.path = spec.base_dir / (wanted.requirements or wanted.project or Path()).expanduser()
        self.is_project = wanted.project is not None
        self.name = "uv.lock" if self.is_project else self.path.name
        self.folder = self.path if self.is_project else self.path.parent
        self.files = (
            [self.path / "pyproject.toml", self.path / "uv.lock"]
            if self.is_project
            else [*_with_included(self.path, self.where)]
        )
        digest = self._digest()
        self._has_hashes = (
            not self.is_project and len(self.files) == 1 and bool(_HASH.search(self.path.read_text(encoding="utf-8")))
        )
        self._lock = self.base_dir / f"{self.name}{LOCK_SUFFIX}"
        self._head = _HEAD.format(source=self.name, digest=digest)
        if self.is_project:  # whose own lock is kept with the code
            self._lock = self.base_dir / names.STATE_DIR / FOLDER / "uv.lock.txt"

    def lock_to(self, text: str, *, is_new: bool) -> LockedEnvironment:
        """Return the environment with this lock.

        Raises:
            PlanError: the lock names files that are no wheels.
        """
        lines, wheels = _with_own_wheels(text, self)
        lock = "".join([*lines, *(f"\n{option}" for option in _index_options(self)), "\n"])
        facts = (lock, self.python, self.machine)
        return LockedEnvironment(
            digest=hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32],
            source=self.name,
            lock=lock,
            lock_name=self.path.name if self._has_hashes else self._lock.name,
            python=self.python,
            machine=self.machine,
            wheels=tuple(wheels),
            is_new=is_new,
        )

    def read_lock(self) -> str:
        """Return the text of the lock; empty if it has to be made.

        Raises:
            PlanError: it cannot be read.
        """
        if self._has_hashes:
            return self.path.read_text(encoding="utf-8")
        text = self._read()
        # Without lines about the source: the same packages are the same environment.
        return text.replace(self._head, "#\n" * self._head.count("\n"), 1) if text.startswith(self._head) else ""

    def _read(self) -> str:
        try:
            return self._lock.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as exc:
            raise PlanError(f"the lock of the environment cannot be read: {exc}", where=str(self._lock)) from exc

    def make_lock(self, *, write: bool) -> str:
        """Return the text of a new lock.

        Raises:
            PlanError: the requirements are not available, or something else is in the place of the lock.
            UsageError: uv is not installed.
        """
        old = self._read()
        if old and not old.startswith(_MADE):
            raise PlanError(
                "a file is in the place of the lock, and dtctl has not made it",
                where=str(self._lock),
                hint="move it elsewhere",
            )
        with tempfile.TemporaryDirectory(prefix="dtctl-lock-") as scratch:
            made = Path(scratch) / "lock.txt"
            if old and not self.is_project:
                # uv keeps to what is locked as far as it can: to versions, and not to the hashes of what may now be
                # another file of the same version.
                made.write_text(_HASH_LINE.sub("", old), encoding="utf-8")
            run_uv([*(self._export_words() if self.is_project else self._compile_words()), str(made)], self)
            text = made.read_text(encoding="utf-8") or "\n"
        if write:
            self._lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(self._lock, (self._head + text).encode())
        return "#\n" * self._head.count("\n") + text

    def _compile_words(self) -> list[str]:
        words = ["pip", "compile", str(self.path), "--generate-hashes", "--no-header", "--only-binary", ":all:"]
        words += ["--python-version", self.python]
        if sys.platform == "linux" or self.wanted.platform is not None:
            words += ["--python-platform", _PLATFORMS.get(self.machine, self.machine)]
        words += [] if self.wanted.index else ["--emit-index-url", "--emit-find-links"]
        return [*words, "--output-file"]

    def _export_words(self) -> list[str]:
        words = ["export", "--frozen", "--project", str(self.path), "--no-emit-project", "--no-dev", "--no-header"]
        return [*words, "--format", "requirements-txt", "--output-file"]

    def _digest(self) -> str:
        """Return the digest of all that the lock depends on, but for what the index has."""
        total = hashlib.sha256(repr((self.python, self.machine, self.wanted.index)).encode())
        for path in self.files:
            try:
                data = path.read_bytes()
            except OSError as exc:
                hint = "make it with `uv lock`" if path.name == "uv.lock" else "correct `job.environment`"
                raise PlanError(f"{path} cannot be read: {exc.strerror}", where=self.where, hint=hint) from exc
            total.update(b"%d\0%s\0" % (len(data), data))
            for word in data.decode(errors="replace").split():
                if word.endswith(".whl") and (wheel := path.parent / word.removeprefix("file://")).is_file():
                    total.update(hashlib.sha256(wheel.read_bytes()).digest())
        return total.hexdigest()


def _with_included(path: Path, where: str) -> Iterator[Path]:
    """Yield a file of requirements, and those that it includes."""
    todo, seen = [path], set[Path]()
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        yield each
        try:
            text = each.read_text(encoding="utf-8")
        except OSError as exc:
            raise PlanError(
                f"{each} cannot be read: {exc.strerror}", where=where, hint="correct `job.environment`"
            ) from exc
        except UnicodeDecodeError as exc:
            raise PlanError(f"{each} is no text in UTF-8", where=where) from exc
        todo += [each.parent / match[1] for line in text.split("\n") if (match := _INCLUDED.match(line.strip()))]


def _requirements(lock: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a lock with a package, and their numbers."""
    for number, line in enumerate(lock.split("\n"), 1):
        if line and not line[0].isspace() and not line.startswith(("#", "--")):
            yield number, line


def _with_own_wheels(text: str, source: _Source) -> tuple[list[str], list[Path]]:
    """Return the lines of a lock as nodes read it, and the wheels of this machine that it names.

    Raises:
        PlanError: it names files that are no wheels.
    """
    lines, wheels = [], []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        is_requirement = bool(line.strip()) and not line[0].isspace() and not line.startswith("#")
        match = _WHEEL.match(line) if is_requirement and "://" not in line.replace("file://", "") else None
        if match:
            path = source.folder / match["path"]
            if not path.is_file():
                raise PlanError(f"{path} does not exist", where=f"{source.path.name}:{number}")
            wheels.append(path)
            line = f"./{path.name}{match['rest']}"
        elif is_requirement and _SOURCE.match(line):
            raise PlanError(
                f"{line.strip().strip(_CONTINUED)} is no wheel, and nodes install wheels alone",
                where=source.path.name,
                hint="`uv build --wheel FOLDER`, and name the file; what the job itself consists of is copied anyway",
            )
        lines.append(line)
    return lines, wheels


def _index_options(source: _Source) -> list[str]:
    """Return the lines of a lock with the sources of packages; none where nodes use their own settings."""
    places = source.wanted.index
    if not places:
        return []
    urls = [place for place in places if "://" in place]
    options = [f"--extra-index-url {url}" for url in urls[1:]]
    options += [f"--find-links {_folder_of(source, place)}" for place in places if "://" not in place]
    return [f"--index-url {urls[0]}" if urls else "--no-index", *options]


def _folder_of(source: _Source, place: str) -> str:
    return str((source.base_dir / Path(place).expanduser()).absolute())


def find_uv() -> str:
    """Return the path of uv on this machine.

    Raises:
        UsageError: it is not installed.
    """
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise UsageError("job.environment needs uv on this machine", hint="pip install uv")
    return found


def run_uv(words: Sequence[str], source: _Source) -> None:
    """Run uv for the user's files.

    Raises:
        PlanError: it has failed.
    """
    env = {name: text for name, text in os.environ.items() if name != "VIRTUAL_ENV"}
    places = source.wanted.index
    if places:
        urls = [place for place in places if "://" in place]
        folders_here = [_folder_of(source, place) for place in places if "://" not in place]
        env |= {"UV_FIND_LINKS": ",".join(folders_here), "UV_INDEX": " ".join(urls[1:])}
        env |= {"UV_DEFAULT_INDEX": urls[0]} if urls else {"UV_NO_INDEX": "1"}
        if not urls:
            env.pop("UV_DEFAULT_INDEX", None)
    try:
        done = subprocess.run(
            [find_uv(), "--no-progress", *words], cwd=source.folder, env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    except OSError as exc:
        raise UsageError(f"uv cannot be started: {exc.strerror}", hint="pip install uv") from exc
    if done.returncode:
        lines = [re.sub(r"^[\s×╰├─▶│]+", "", line).strip() for line in done.stderr.split("\n")]
        text = " ".join(line for line in lines if line)
        raise PlanError(f"uv: {text}", where=_place_of(text, source.files) or source.where, hint=_hint_of(text))


def _hint_of(text: str) -> str | None:
    if "no wheels" in text or "building source distributions is disabled" in text.lower():
        return "nodes install wheels alone: build one, and name its folder in `job.environment.index`"
    return None


def _place_of(text: str, files: Iterable[Path]) -> str:
    """Return the line of the user's files with the package in uv's message; empty where that is not known."""
    words = {_normal(word) for word in re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*", text)}
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            match = re.match(r"\s*(?:\./\S*/)?([A-Za-z0-9][A-Za-z0-9._-]*)", line)
            name = _normal(re.split(r"-\d", match[1])[0]) if match else ""
            if name and name in words:
                return f"{path.name}:{number}"
    return ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower().strip("-")


class EnvironmentPush:
    """Brings to every node that has not made the environment what it needs to make it."""

    def __init__(self, spec: Spec, locked: LockedEnvironment) -> None:
        self.locked = locked
        self._folder = spec.base_dir / names.STATE_DIR / FOLDER
        self._cache = spec.base_dir / names.STATE_DIR / CACHE_DIR
        self._lock = threading.Lock()
        self._payloads = push.Payloads()
        self._uv_payloads = push.Payloads()
        self._tree: Tree | None = None
        self._uv_tree: Tree | None = None

    def make_order(self) -> EnvironmentOrder:
        """Return the order for a node; complete once a node was found that lacks the environment."""
        return EnvironmentOrder(
            digest=self.locked.digest,
            tree=self._tree.digest if self._tree is not None else "",
            uv=self._uv_tree.digest if self._uv_tree is not None else "",
            lock=self.locked.lock_name,
            python=self.locked.python,
            machine=self.locked.machine,
        )

    def expect_nodes(self, count: int) -> None:
        """Set the number of nodes that will need it."""
        self._payloads, self._uv_payloads = push.Payloads(Relay(count)), push.Payloads(Relay(count))

    def __call__(self, link: NodeLink, progress: PushReport) -> PushProgress:
        """Bring what a node lacks."""
        node = link.description
        if node is None or node.has_environment:
            return PushProgress(files=0, bytes=0, state="have")
        result = push.push(link, self._tree_of_lock(), store="data", shared=self._payloads, progress=progress)
        files, sent, state = result.files_sent, result.bytes_sent, result.state
        if not node.has_uv:
            later = push.report_after(sent, progress)
            of_uv = push.push(link, self._tree_of_uv(), store="data", shared=self._uv_payloads, progress=later)
            files, sent = files + of_uv.files_sent, sent + of_uv.bytes_sent
            state = of_uv.state if state == "have" else state
        return PushProgress(files=files, bytes=sent, state=state)

    def _tree_of_lock(self) -> Tree:
        with self._lock:
            if self._tree is None:
                folder = self._folder / self.locked.digest
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(folder / self.locked.lock_name, self.locked.lock.encode())
                for wheel in self.locked.wheels:
                    _write(folder / wheel.name, wheel.read_bytes())
                self._tree = scan_data(folder, self._cache)
            return self._tree

    def _tree_of_uv(self) -> Tree:
        with self._lock:
            if self._uv_tree is None:
                tree = scan_data(Path(os.path.realpath(find_uv())), self._cache)
                files = tuple(file._replace(mode=0o700) for file in tree.files)
                self._uv_tree = Tree(tree.root, files, tree_digest(files), withheld=(), skipped=())
            return self._uv_tree


def _write(path: Path, data: bytes) -> None:
    if path.is_file() and path.read_bytes() == data:
        return
    draft = path.with_name(f"..{secrets.token_hex(4)}")
    draft.write_bytes(data)
    draft.replace(path)
