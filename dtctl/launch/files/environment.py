"""The environment of `job.environment`: its lock, the files that are brought to nodes, and the order to make it.

The lock is a file of requirements with hashes, which uv makes from the user's file and which nodes install without
resolving it again. A node that has not made the environment yet gets one tree: the lock, and the wheels that only this
machine has.
"""

from __future__ import annotations

import functools
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from dtctl import names, shell
from dtctl.errors import NodeError, PlanError, UsageError
from dtctl.launch import trust
from dtctl.launch.control.link import HINTS, NodeLink, quote_node_value
from dtctl.launch.files import conda, push, source_packages, wheels
from dtctl.launch.files.data import CACHE_DIR, scan_data
from dtctl.launch.files.package_sources import (
    FIND_LINKS,
    build_index_options,
    collect_credentials,
    list_named_indexes,
    list_registry_options,
    list_uv_configurations,
)
from dtctl.launch.files.relay import BlockRelay
from dtctl.launch.files.static_uv import find_static_uv
from dtctl.launch.files.tree import FileTree, compute_tree_digest
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.launch.records.run_writer import prepare_state_folder
from dtctl.spec.model import Spec
from dtctl.supervisor.environments import INDEX_VARIABLES
from dtctl.supervisor.index_hosts import describe_unreachable_host
from dtctl.supervisor.messages.setup import EnvironmentOrder, NodeDescription

FOLDER: Final = "environment"
SIZES_NEEDED: Final = 3
"""Space needed on a node's disk, in sizes of the wheels: the wheels, and their contents of about twice the size."""
LOCK_SUFFIX: Final = ".dtctl.lock"
_MADE: Final = "# Made by dtctl from "
_HEAD: Final = _MADE + "{source}, and made again when that changes. Keep it with your code.\n# source: {digest}\n"
_INCLUDED: Final = re.compile(r"(?:-r|-c|--requirement|--constraint)[ =]*(\S+)")
_HASH: Final = re.compile(r"--hash[ =]sha256:")
_HASH_LINE: Final = re.compile(r"[ ]*\\\n[ ]*--hash[ =]sha256:[0-9a-f]+")
_OPTION_LINE: Final = re.compile(r"^--.*\n?", re.MULTILINE)
_WHEEL: Final = re.compile(r"(?:\S+\s*@\s*)?(?:file://)?(?P<path>\S+\.whl)(?P<rest>\s.*|)\Z", re.DOTALL)
"""Line with a wheel of this machine: `./x-1.0-py3-none-any.whl \\`."""
_SOURCE: Final = re.compile(r"(?:-e\s+|--editable[ =])?(?:\S+\s*@\s*)?(?:file:|\.{1,2}/|/)\S*")
_CONTINUED: Final = " \\"
_NO_DIGESTS: Final = re.compile(r"^(?!\S+\.whl\b)[A-Za-z0-9][^#\n]*(?<!\\)$", re.MULTILINE)
"""Line of a package without the digests of its files; uv.lock has none for packages from a folder of wheels."""
_OLD_LOCK: Final = "needs to be updated"
"""Part of uv's message about a uv.lock that does not fit pyproject.toml; the exit status is that of any other error."""
_RESOLUTION_VARIABLES: Final = (
    "UV_CONFIG_FILE", "UV_CONSTRAINT", "UV_EXCLUDE", "UV_EXCLUDE_NEWER", "UV_FORK_STRATEGY", "UV_INDEX_STRATEGY",
    "UV_NO_CONFIG", "UV_NO_SOURCES", "UV_OVERRIDE", "UV_PRERELEASE", "UV_RESOLUTION", "UV_TORCH_BACKEND",
)  # fmt: skip
"""Other variables by which uv chooses packages; if a variable names a file, the contents of the file count, too."""
_ONLY_WHEELS: Final = ("--only-binary", ":all:")
_WITH_BUILDS: Final = "# packages without a wheel may be built\n"
"""Line of a lock for which versions without a wheel were considered; of another one, versions are not kept."""
ALLOW_BUILDS: Final = "`dtctl launch --yes` lets this machine build packages that have no wheel, which runs their code"
_AS_LOCKED: Final = ("--no-deps", "--index-strategy", "unsafe-best-match")
"""Options to look up locked packages: a lock does not name the index of each package, so uv searches all of them."""
_NOT_BUILT: Final = re.compile("[Ff]ailed to (?:download and )?build|[Bb]uild backend|have to be compiled")
"""Part of a message about a package whose sources cannot be built here."""
_Chosen: TypeAlias = tuple[list[str], list[wheels.RelayedWheel]]
_PLATFORMS: Final = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedEnvironment:
    """Packages that the nodes install."""

    digest: str
    """Digest of the lock, the version of Python and the processor; name of the folder on nodes."""
    source: str
    """Name of the file with the requirements, and the chosen extras and groups: `uv.lock with gpu`."""
    lock: str
    """Text of the lock for nodes, with the same lines as the file that a user sees."""
    lock_name: str
    """Name of the file that a user sees."""
    python: str
    machine: str
    wheels: tuple[Path, ...]
    """Wheels of this machine that the lock names, also those that were downloaded for the nodes."""
    is_offline: bool
    """True if nodes install only these wheels."""
    is_new: bool
    """True if the lock had to be made again."""
    built: tuple[str, ...]
    """Names of the packages whose wheels were built on this machine."""
    doubt: str
    """Sentence about a property of the lock that could not be checked; empty: all were."""
    credentials: Mapping[str, str] = field(repr=False)
    """Variables with users and passwords of package indexes, for uv on nodes."""
    index_bytes: int = 0
    """Least number of bytes that a node downloads from an index; 0 where uv.lock does not have the sizes."""

    @property
    def package_count(self) -> int:
        """Return the number of packages in the lock."""
        return len(list(_list_lock_requirements(self.lock)))

    @property
    def short_summary(self) -> str:
        """Return a summary in words: `12 packages of requirements.txt for Python 3.12 on x86_64`."""
        count = f"{self.package_count} package{'' if self.package_count == 1 else 's'}"
        text = f"{count} of {self.source} for Python {self.python} on {self.machine} ({self.digest[:8]})"
        if self.built:
            noun = "its" if len(self.built) == 1 else "their"
            text += f", {len(self.built)} of them built here from {noun} sources ({', '.join(self.built)})"
        return f"{text}, whose wheels this machine downloads and sends" if self.is_offline else text


def lock_environment(spec: Spec, *, write: bool, report: Callable[[str], None] = lambda _: None) -> LockedEnvironment:
    """Return the environment of a spec, and make its lock if it is missing or old.

    Args:
        spec: the checked spec.
        write: whether a new lock is kept next to the spec, and wheels for the nodes are downloaded.
        report: called with the progress of downloads.

    Raises:
        PlanError: a file is missing, or its requirements are not available.
        UsageError: uv is needed and not installed.
    """
    source = _EnvironmentSource(spec)
    text = source.read_lock()
    is_new = not text
    text = text or source.make_lock(write=write, report=report)
    text = source_packages.name_built_wheels(text, _build_wheels(source, text, report))
    if not source.is_offline:
        return source.lock_to(text, is_new=is_new)
    wheel_list = _WheelList(source, text)
    listing = wheel_list.read_wheel_list() or wheel_list.make_wheel_list()
    chosen = wheel_list.choose_wheels(listing)
    if write:
        wheels.download_wheels(chosen[1], source.cache, report)
        wheel_list.keep_wheel_list(listing)  # The list is kept only after its addresses have worked.
    return source.lock_to(text, chosen, is_new=is_new)


def describe_environment(spec: Spec) -> str:
    """Describe the packages that nodes would install, as far as they are locked; empty without an environment.

    Raises:
        PlanError: a file is missing.
    """
    if spec.job.environment is None:
        return ""
    source = _EnvironmentSource(spec)
    if text := source.read_lock():
        unbuilt = source_packages.read_source_packages(text)
        found = {wheels.normalize_package_name(each.name): each.locate_wheel(source.state) for each in unbuilt}
        built = {name: wheel for name, wheel in found.items() if wheel is not None}
        if len(built) < len(found):
            return f"{source.name} is locked; a launch builds the wheels of packages that have none, and sends them"
        text = source_packages.name_built_wheels(text, built)
        if not source.is_offline:
            return source.lock_to(text, is_new=False).short_summary
        wheel_list = _WheelList(source, text)
        if listing := wheel_list.read_wheel_list():
            return source.lock_to(text, wheel_list.choose_wheels(listing), is_new=False).short_summary
        return f"{source.name} is locked; a launch chooses the wheels, downloads them and sends them"
    return f"{source.name} has no lock yet, or was changed since; a launch makes it"


class _EnvironmentSource:
    """The user's files of requirements, and the commands by which uv locks them."""

    def __init__(self, spec: Spec) -> None:
        wanted = spec.job.environment
        if wanted is None:
            raise ValueError("the job has no environment")
        self.spec = spec
        self.base_dir = spec.base_dir
        self.wanted = wanted
        self.where = spec.written_at("job.environment")
        self.python = wanted.python or "{}.{}".format(*sys.version_info)
        self.machine = wanted.platform or machines.machine()
        self.path = spec.base_dir / (wanted.requirements or wanted.project or Path()).expanduser()
        self.is_project = wanted.project is not None
        self.is_offline = wanted.wheels == "relay"
        self.may_build = trust.may_build_packages(spec)
        """True if packages without a wheel may be built here, which runs their code."""
        self.state = spec.base_dir / names.STATE_DIR / FOLDER
        self.cache = spec.base_dir / names.STATE_DIR / CACHE_DIR
        self.name = "uv.lock" if self.is_project else self.path.name
        self.folder = self.path if self.is_project else self.path.parent
        self.files = (
            [self.path / "pyproject.toml", self.path / "uv.lock"]
            if self.is_project
            else [*_with_included(self.path, self.where)]
        )
        digest = self._compute_lock_digest()
        self._has_hashes = (
            not self.is_project and len(self.files) == 1 and bool(_HASH.search(self.path.read_text(encoding="utf-8")))
        )
        self.doubt = ""
        self._lock = self.base_dir / f"{self.name}{LOCK_SUFFIX}"
        self._head = _HEAD.format(source=self.name, digest=digest)
        if self.is_project:  # The user's uv.lock stays with the code.
            self._lock = self.state / "uv.lock.txt"

    def lock_to(self, text: str, chosen: _Chosen | None = None, *, is_new: bool) -> LockedEnvironment:
        """Return the environment with this lock.

        Args:
            text: the lock.
            chosen: a lock that names the wheels which are sent to nodes, and these wheels.
            is_new: whether the lock was just made.

        Raises:
            PlanError: the lock names files that are not wheels.
        """
        lines, own_wheels = _with_own_wheels(text, self)
        options = self.list_lock_options(text)
        if chosen is not None:
            lines = chosen[0]
            own_wheels += [wheels.locate_wheel(wheel, self.cache) for wheel in chosen[1]]
            options = ["--no-index"]
        lock = "".join([*lines, *(f"\n{option}" for option in options), "\n"])
        facts = (lock, self.python, self.machine)
        return LockedEnvironment(
            digest=hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32],
            source=" with ".join(filter(None, (self.name, ", ".join((*self.wanted.extras, *self.wanted.groups))))),
            lock=lock,
            lock_name=self.lock_name,
            python=self.python,
            machine=self.machine,
            wheels=tuple(own_wheels),
            is_offline=self.is_offline,
            is_new=is_new,
            built=tuple(each.name for each in source_packages.read_source_packages(text)),
            doubt=self.doubt,
            index_bytes=0 if chosen is not None else _sum_index_sizes(self, lock),
            credentials={} if self.is_offline or "--index-url http" not in lock else self.credentials,
        )

    @property
    def lock_name(self) -> str:
        """Name of the file that a user sees as the lock."""
        return self.path.name if self._has_hashes else self._lock.name

    def list_lock_options(self, text: str) -> list[str]:
        """Return options for the end of the lock: sources of packages that the lock does not name itself."""
        if self.wanted.index:
            return self.index_options
        if self.is_project:
            return list_registry_options(self.path / "uv.lock")
        # uv writes `--index-url` for each index that it used, also for PyPI, but writes nothing if it used none.
        if not self._has_hashes and text.strip("#\n") and not re.search("^--index-url ", text, re.MULTILINE):
            return ["--no-index"]
        return []

    @functools.cached_property
    def index_options(self) -> list[str]:
        """Options for uv, here and on nodes, that name the sources of `job.environment.index`; empty without it."""
        return build_index_options(self.wanted.index, self.base_dir)

    @functools.cached_property
    def credentials(self) -> dict[str, str]:
        """Variables by which uv finds users and passwords of the named indexes (`UV_INDEX_NAME_PASSWORD`)."""
        return collect_credentials(list_named_indexes(self.wanted.index, self.folder), os.environ)

    def read_lock(self) -> str:
        """Return the text of the lock; empty if it has to be made.

        Raises:
            PlanError: the lock cannot be read.
        """
        if self._has_hashes:
            return self.path.read_text(encoding="utf-8")
        text = self._read_lock_text()
        # Lines about the source do not count: the same packages are the same environment.
        return text.replace(self._head, "#\n" * self._head.count("\n"), 1) if text.startswith(self._head) else ""

    def _read_lock_text(self) -> str:
        try:
            return self._lock.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as exc:
            raise PlanError(f"the lock of the environment cannot be read: {exc}", where=str(self._lock)) from exc

    def make_lock(self, *, write: bool, report: Callable[[str], None]) -> str:
        """Return the text of a new lock.

        Raises:
            PlanError: the requirements are not available, or another file has the name of the lock.
            UsageError: uv is not installed.
        """
        old = self._read_lock_text()
        if old and not old.startswith(_MADE):
            raise PlanError(
                "a file is in the place of the lock, and dtctl has not made it",
                where=str(self._lock),
                hint="move it elsewhere",
            )
        if self.is_project:
            self.doubt = self._check_project_lock()
            text = _export_project(self, self._export_words())
        else:
            text, self.doubt = _resolve_requirements(self, old, report)
        if write:
            drafts = prepare_state_folder(self.base_dir, FOLDER)
            _write_changed_file(self._lock, (self._head + text).encode(), drafts=drafts)
        return "#\n" * self._head.count("\n") + text

    def build_compile_words(self, path: str) -> list[str]:
        """Return the command that makes a lock from a file of requirements; `-`: from standard input."""
        words = ["pip", "compile", path, "--generate-hashes", "--no-header"]
        # No Python of that version is needed here. An attempt to download it would take seconds, and its warning would
        # look like the reason of another error.
        words += ["--no-python-downloads", "--quiet"]
        words += ["--python-version", self.python]
        if sys.platform == "linux" or self.wanted.platform is not None or self.is_offline:
            words += ["--python-platform", _PLATFORMS.get(self.machine, self.machine)]
        return words if self.wanted.index or self.is_project else [*words, "--emit-index-url", "--emit-find-links"]

    def _check_project_lock(self) -> str:
        """Refuse a uv.lock that does not fit pyproject.toml; return a sentence if uv cannot check that.

        Raises:
            PlanError: pyproject.toml was changed after uv.lock.
        """
        # The lock may have been made with the sources that it names, or with those of the user's settings. Offline, uv
        # can accept a lock that fits; with the network, it can also report that a lock does not fit.
        sources = [list(options) for options in dict.fromkeys((tuple(self.list_lock_options("")), ()))]
        words = ["lock", "--locked", "--no-python-downloads", "--project", str(self.path)]
        for mode in (["--offline"], []):
            answers = []
            for options in sources:
                done = call_uv([*words, *mode], self, options)
                if not done.returncode:
                    return ""
                answers.append(done.stderr)
            if all(_OLD_LOCK in answer for answer in answers):
                break
        if any(_OLD_LOCK in answer for answer in answers):
            raise PlanError(
                "uv.lock does not fit pyproject.toml, which was changed after it",
                where=str(self.path / "uv.lock"),
                hint=f"run `{self.lock_command}` in that folder",
            )
        return f"it is not known whether uv.lock fits pyproject.toml: uv: {_join_uv_lines(answers[0])}"

    @property
    def lock_command(self) -> str:
        """Return the command that makes uv.lock."""
        return shell.join_command(["uv", "lock", *_split_options(self.index_options)])

    def _export_words(self) -> list[str]:
        words = ["export", "--frozen", "--project", str(self.path), "--no-emit-project", "--no-header"]
        words += [f"--extra={name}" for name in self.wanted.extras]
        words += [f"--group={name}" for name in self.wanted.groups]
        if "dev" not in self.wanted.groups:
            words.append("--no-dev")
        return [*words, "--format", "requirements-txt"]

    def _compute_lock_digest(self) -> str:
        """Return the digest of everything that the lock depends on, except the contents of indexes."""
        facts = repr((self.python, self.machine, self.wanted.index))
        if self.wanted.extras or self.wanted.groups:
            facts += repr((self.wanted.extras, self.wanted.groups))
        if settings := self._collect_uv_settings():
            facts += repr(settings)
        if self.may_build:
            facts += repr("builds")
        total = hashlib.sha256(facts.encode())
        for path in self.files:
            try:
                data = path.read_bytes()
            except OSError as exc:
                hint = f"make it with `{self.lock_command}`" if path.name == "uv.lock" else "correct `job.environment`"
                raise PlanError(f"{path} cannot be read: {exc.strerror}", where=self.where, hint=hint) from exc
            total.update(b"%d\0%s\0" % (len(data), data))
            for word in data.decode(errors="replace").split():
                if word.endswith(".whl") and (wheel := path.parent / word.removeprefix("file://")).is_file():
                    total.update(hashlib.sha256(wheel.read_bytes()).digest())
        return total.hexdigest()

    def _collect_uv_settings(self) -> list[tuple[str, str]]:
        """Return the variables that the lock depends on, and digests of the files that contain uv's settings."""
        names_of_variables = _RESOLUTION_VARIABLES if self.wanted.index else (*INDEX_VARIABLES, *_RESOLUTION_VARIABLES)
        rows = [(name, text) for name in names_of_variables if (text := os.environ.get(name))]
        paths = [self.folder / word for _, text in rows for word in text.split()]
        return rows + [
            ("", hashlib.sha256(path.read_bytes()).hexdigest())
            for path in (*paths, *list_uv_configurations(self.folder))
            if path not in self.files and path.is_file()
        ]


def _call_with_output(
    source: _EnvironmentSource, words: Sequence[str], options: Sequence[str] = (), *, text: str = "", old: str = ""
) -> str:
    """Return the file that a command of uv writes; `old` is there before, and uv keeps its versions where possible.

    Raises:
        PlanError: uv has failed.
    """
    with tempfile.TemporaryDirectory(prefix="dtctl-lock-") as scratch:
        made = Path(scratch) / "lock.txt"
        if old:
            made.write_text(old, encoding="utf-8")
        run_uv([*words, "--output-file", str(made)], source, options, text=text)
        return made.read_text(encoding="utf-8") or "\n"


def _export_project(source: _EnvironmentSource, words: Sequence[str]) -> str:
    """Return the lock of a project, made from its uv.lock.

    Raises:
        PlanError: uv cannot read the lock, or does not find its packages.
    """
    text = _call_with_output(source, words)
    if _NO_DIGESTS.search(text):
        # uv.lock has no digests of files in a folder of wheels, so uv adds them for the versions of uv.lock.
        words = [*source.build_compile_words("-"), "--no-annotate"]
        text = _call_with_output(source, words, source.list_lock_options(text), text=text)
    return _with_source_packages(source, text) if source.may_build else text


def _resolve_requirements(source: _EnvironmentSource, old: str, report: Callable[[str], None]) -> tuple[str, str]:
    """Return a lock of the requirements, and a sentence if packages were left out because they could not be built.

    Raises:
        PlanError: the requirements are not available.
    """
    # Hashes are removed, since a version may have another file now, and options, since their relative folders would
    # begin in the scratch folder.
    old = _OPTION_LINE.sub("", _HASH_LINE.sub("", old))
    words = source.build_compile_words(str(source.path))
    if not source.may_build:
        text = _call_with_output(source, [*words, *_ONLY_WHEELS], source.index_options, old=old)
        return text, f"only versions with a wheel were considered; {ALLOW_BUILDS}"
    old = old if _WITH_BUILDS in old else ""
    try:
        text = _with_source_packages(source, _call_with_output(source, words, source.index_options, old=old))
        _build_wheels(source, text, report)
        return text + _WITH_BUILDS, ""
    except PlanError as exc:
        if not _NOT_BUILT.search(exc.message):
            raise
        # An older version may have a wheel.
        text = _call_with_output(source, [*words, *_ONLY_WHEELS], source.index_options, old=old)
        return text, f"only versions with a wheel were considered, since sources cannot be built here: {exc.message}"


def _with_source_packages(source: _EnvironmentSource, text: str) -> str:
    """Return a lock with comments about its packages that have sources and no wheel."""
    words = [*source.build_compile_words("-"), *_AS_LOCKED, "--format", "pylock.toml"]
    with tempfile.TemporaryDirectory(prefix="dtctl-lock-") as scratch:
        made = Path(scratch) / "pylock.toml"
        done = call_uv([*words, "--output-file", str(made)], source, source.list_lock_options(text), text=text)
        # A package with neither is reported with its line, where wheels are chosen or installed.
        listing = made.read_text(encoding="utf-8") if not done.returncode and made.is_file() else ""
        packages = source_packages.list_packages_without_wheel(listing, Path(scratch))
    return text + source_packages.format_comments(packages)


def _build_wheels(source: _EnvironmentSource, text: str, report: Callable[[str], None]) -> dict[str, Path]:
    """Return the wheels of the packages that a lock has as sources, by the name of the package.

    Raises:
        PlanError: a package cannot be built.
    """
    packages = source_packages.read_source_packages(text)
    if packages and not source.may_build:
        raise PlanError(
            f"{packages[0].name} {packages[0].version} has no wheel, and the lock names its sources",
            where=source.where,
            hint=ALLOW_BUILDS,
        )
    options = source.list_lock_options(text)
    return source_packages.build_wheels(
        packages, source.state, source.cache, lambda words: run_uv(words, source, options), report
    )


def _sum_index_sizes(source: _EnvironmentSource, lock: str) -> int:
    """Return the least number of bytes that nodes download for a lock; 0 if that is not known."""
    if not source.is_project:
        return 0
    text = (source.path / "uv.lock").read_text(encoding="utf-8", errors="replace")
    pinned = (re.split(r"[\s=\[;@]", line, maxsplit=1)[0] for _, line in _list_lock_requirements(lock))
    packages = {wheels.normalize_package_name(name) for name in pinned}
    return wheels.sum_wheel_sizes(text, packages, source.python, source.machine)


class _WheelList:
    """List of the wheels that uv chooses for a lock and this machine sends to nodes; kept for the next launch."""

    def __init__(self, source: _EnvironmentSource, lock: str) -> None:
        self._source, self._lock = source, lock
        facts = repr((lock, source.list_lock_options(lock), source.python, source.machine))
        self._path = source.cache / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}-pylock.toml"

    def read_wheel_list(self) -> str:
        """Return the pylock.toml that the last launch has kept; empty if there is none."""
        return self._path.read_text(encoding="utf-8") if self._path.is_file() else ""

    def make_wheel_list(self) -> str:
        """Let uv choose the wheel of each package for the nodes, and return pylock.toml.

        Raises:
            PlanError: a package has no wheel.
        """
        source = self._source
        with tempfile.TemporaryDirectory(prefix="dtctl-lock-") as scratch:
            made = Path(scratch) / "pylock.toml"
            # The lock does not name the index of each package, so uv has to search all indexes, as it does on nodes.
            words = [*source.build_compile_words("-"), *_ONLY_WHEELS, *_AS_LOCKED]
            words += ["--format", "pylock.toml", "--output-file", str(made)]
            try:
                run_uv(words, source, source.list_lock_options(self._lock), text=self._lock)
            except PlanError as exc:
                places = self._list_places()
                named = [wheels.normalize_package_name(name) for name in re.findall(r"([\w.-]+)==", exc.message)]
                exc.where = next((places[name] for name in named if name in places), exc.where)
                raise
            return made.read_text(encoding="utf-8")

    def keep_wheel_list(self, listing: str) -> None:
        """Keep a list for the next launch."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_changed_file(self._path, listing.encode(), drafts=self._path.parent)

    def choose_wheels(self, listing: str) -> _Chosen:
        """Return a lock that names the wheels of a list, and these wheels.

        Raises:
            PlanError: a package has no wheel.
        """
        lines, _ = _with_own_wheels(self._lock, self._source)
        return wheels.choose_relayed_wheels(lines, listing, self._list_places())

    def _list_places(self) -> dict[str, str]:
        """Return the place of each package in the lock, or in the user's uv.lock if there is one."""
        if not self._source.is_project:
            return wheels.list_package_places(Path(self._source.lock_name), self._lock)
        path = self._source.path / "uv.lock"
        return wheels.list_package_places(path, path.read_text(encoding="utf-8", errors="replace"))


def _with_included(path: Path, where: str) -> Iterator[Path]:
    """Yield a file of requirements, and the files that it includes."""
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
            raise PlanError(f"{each} is not text in UTF-8", where=where) from exc
        conda.refuse_conda_file(each, text, where)
        todo += [each.parent / match[1] for line in text.split("\n") if (match := _INCLUDED.match(line.strip()))]


def _list_lock_requirements(lock: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a lock with a package, and their numbers."""
    for number, line in enumerate(lock.split("\n"), 1):
        if line and not line[0].isspace() and not line.startswith(("#", "--")):
            yield number, line


def _with_own_wheels(text: str, source: _EnvironmentSource) -> tuple[list[str], list[Path]]:
    """Return the lines of a lock for nodes, and the wheels of this machine that the lock names.

    Raises:
        PlanError: the lock names files that are not wheels.
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
        elif line.startswith(FIND_LINKS) and "://" not in line:
            # On nodes, a relative path would begin in the folder with the lock.
            line = f"{FIND_LINKS}{(source.folder / line[len(FIND_LINKS) :].strip()).absolute()}\n"
        elif is_requirement and _SOURCE.match(line):
            raise PlanError(
                f"{line.strip().strip(_CONTINUED)} is not a wheel, and nodes install only wheels",
                where=source.path.name,
                hint="`uv build --wheel FOLDER`, and name the file; what the job itself consists of is copied anyway",
            )
        lines.append(line)
    return lines, wheels


def _split_options(options: Iterable[str]) -> list[str]:
    """Return lines with options as words of a command."""
    return [word for option in options for word in option.split(" ", 1)]


def require_local_uv() -> str:
    """Return the path of uv on this machine.

    Raises:
        UsageError: uv is not installed.
    """
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise UsageError("job.environment needs uv on this machine", hint="pip install uv")
    return found


def call_uv(
    words: Sequence[str], source: _EnvironmentSource, options: Sequence[str] = (), *, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run uv for the user's files, and wait until it exits.

    Args:
        words: the command.
        source: the files.
        options: lines that name sources of packages, as in the lock for nodes.
        text: standard input.

    Raises:
        UsageError: uv cannot be started.
    """
    try:
        return subprocess.run(
            [require_local_uv(), "--no-progress", *words, *_split_options(options)], cwd=source.folder,
            env=_collect_uv_variables(source, options), input=text, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as exc:
        raise UsageError(f"uv cannot be started: {exc.strerror}", hint="pip install uv") from exc


def read_uv_version(source: _EnvironmentSource) -> str:
    """Return the version of this machine's uv.

    Raises:
        UsageError: uv does not print its version.
    """
    # uv prints a line such as `uv 0.13.9 (x86_64-unknown-linux-gnu)`.
    said = call_uv(["--version"], source).stdout.split()
    if len(said) < 2:
        raise UsageError("uv on this machine does not print its version", hint="pip install --upgrade uv")
    return said[1]


def _collect_uv_variables(source: _EnvironmentSource, options: Sequence[str]) -> dict[str, str]:
    """Return the environment variables for uv with these options."""
    # Sources are passed as options, because the known variables depend on uv's version, and uv ignores others silently.
    dropped = ("VIRTUAL_ENV", *(INDEX_VARIABLES if options else ()))
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return env | source.credentials if options else env


def run_uv(words: Sequence[str], source: _EnvironmentSource, options: Sequence[str] = (), *, text: str = "") -> None:
    """Run uv like `call_uv`, and check its exit status.

    Raises:
        PlanError: uv has failed.
    """
    done = call_uv(words, source, options, text=text)
    if not done.returncode:
        return
    sources = "\n".join((*options, *(path.read_text(encoding="utf-8", errors="replace") for path in source.files)))
    if unreachable := describe_unreachable_host(done.stderr, sources, _collect_uv_variables(source, options)):
        raise PlanError(
            f"this machine, which makes the lock, cannot reach {unreachable}",
            where=source.spec.written_at("job.environment.index"),
            hint="set `job.environment.index` to an index that is reached from here and from the nodes, or to a folder "
            "of wheels that all have (only from here with `job.environment.wheels: relay`); behind a proxy set "
            "HTTPS_PROXY",
        )
    said = _join_uv_lines(done.stderr)
    raise PlanError(f"uv: {said}", where=_place_of(said, source.files) or source.where, hint=_hint_of(said))


def _join_uv_lines(text: str) -> str:
    """Return uv's message as one line, without its box-drawing characters."""
    lines = [re.sub(r"^[\s×╰├─▶│]+", "", line).strip() for line in text.split("\n")]
    return " ".join(line for line in lines if line)


def _hint_of(text: str) -> str | None:
    if re.search("no (usable )?wheels|building (source distributions|from source) is disabled", text, re.IGNORECASE):
        return "nodes install only wheels: build one, and name its folder in `job.environment.index`"
    if re.search("^error: (Extra|Group) ", text):
        return "correct `job.environment.extras` and `groups`; after a change in pyproject.toml run `uv lock`"
    return None


def _place_of(text: str, files: Iterable[Path]) -> str:
    """Return the line of the user's files with the package that uv's message names; empty if it is not found."""
    words = {wheels.normalize_package_name(word) for word in re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*", text)}
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            match = re.match(r"\s*(?:\./\S*/)?([A-Za-z0-9][A-Za-z0-9._-]*)", line)
            name = wheels.normalize_package_name(re.split(r"-\d", match[1])[0]) if match else ""
            if name and name in words:
                return f"{path.name}:{number}"
    return ""


class EnvironmentPush:
    """Push of the lock, the wheels and uv to every node that has not made the environment."""

    def __init__(self, spec: Spec, locked: LockedEnvironment) -> None:
        self.locked = locked
        self._spec = spec
        # The launcher connects to the machine with Slurm's commands, but other machines make the environment.
        self._is_for_others = spec.cluster.transport == "slurm"
        # Nodes that install wheels from here ignore their own variables about indexes, too.
        self._has_index = locked.is_offline or (spec.job.environment is not None and bool(spec.job.environment.index))
        self._folder = spec.base_dir / names.STATE_DIR / FOLDER
        self._cache = spec.base_dir / names.STATE_DIR / CACHE_DIR
        self._lock = threading.Lock()
        self._payloads = push.PayloadCache()
        self._uv_payloads = push.PayloadCache()
        self._tree: FileTree | None = None
        self._uv_tree: FileTree | None = None
        self._static_tree: FileTree | None = None
        # This is known even if no node with that processor has reported.
        self._has_other_machines = sys.platform != "linux" or locked.machine != machines.machine()

    def make_order(self, workdir: str = "") -> EnvironmentOrder:
        """Return the order for a node; its digests of trees are known once a node without the environment was found.

        Args:
            workdir: folder with the environments on a disk that all nodes share; empty: each node has its own.
        """
        return EnvironmentOrder(
            digest=self.locked.digest,
            tree=self._tree.digest if self._tree is not None else "",
            uv=self._uv_tree.digest if self._uv_tree is not None else "",
            static_uv=self._static_tree.digest if self._static_tree is not None else "",
            lock=self.locked.lock_name,
            python=self.locked.python,
            machine=self.locked.machine,
            own_index=self._has_index,
            offline=self.locked.is_offline,
            workdir=workdir,
            # A job of Slurm keeps its order in a file, so its launcher adds the credentials later.
            credentials={} if workdir else {**self.locked.credentials},
        )

    def expect_nodes(self, count: int) -> None:
        """Set the number of nodes that will need the environment."""
        self._payloads, self._uv_payloads = push.PayloadCache(BlockRelay(count)), push.PayloadCache(BlockRelay(count))

    def __call__(self, link: NodeLink, progress: PushReport) -> PushProgress:
        """Bring the files that a node lacks for the environment to it."""
        node = link.description
        if node is None or node.has_environment:
            return PushProgress(files=0, bytes=0, state="have")
        self.check_space(link.node, node)
        result = push.push_tree_to_node(link, self.make_tree(), store="data", shared=self._payloads, progress=progress)
        files, sent, of, state = result.files_sent, result.bytes_sent, result.content_bytes, result.state
        if not node.has_uv or self._is_for_others:
            later = push.report_after(of, progress)
            runs_ours = node.has_glibc and not self._has_other_machines
            tree = self._tree_of_uv() if runs_ours else self._tree_of_static_uv()
            of_uv = push.push_tree_to_node(link, tree, store="data", shared=self._uv_payloads, progress=later)
            files, sent, of = files + of_uv.files_sent, sent + of_uv.bytes_sent, of + of_uv.content_bytes
            state = of_uv.state if state == "have" else state
        return PushProgress(files=files, bytes=sent, of=of, state=state)

    def check_space(self, name: str, node: NodeDescription) -> None:
        """Refuse a node whose disk does not have room for its wheels, from here or an index, and the environment.

        Raises:
            NodeError: the disk has too little space.
        """
        sent = sum(wheel.stat().st_size for wheel in self.locked.wheels)
        needed = SIZES_NEEDED * (sent + self.locked.index_bytes)
        if node.free_bytes is not None and node.free_bytes < needed:
            raise NodeError(
                f"{node.free_bytes >> 20} MiB are free on the disk of {quote_node_value(node.workdir)}, and the "
                f"environment needs {-(-needed >> 20)} MiB, {SIZES_NEEDED} times the size of its wheels",
                node=name,
                hint=HINTS["disk-full"],
            )

    def make_tree(self) -> FileTree:
        """Return the tree with the lock and the wheels.

        Raises:
            PlanError: a downloaded wheel has changed since.
        """
        with self._lock:
            if self._tree is None:
                folder = prepare_state_folder(self._spec.base_dir, FOLDER) / self.locked.digest
                folder.mkdir(mode=0o700, exist_ok=True)
                lock = self.locked.lock.encode()
                _write_changed_file(folder / self.locked.lock_name, lock, drafts=self._folder)
                for wheel in self.locked.wheels:
                    _link_file(folder / wheel.name, wheel.absolute(), drafts=self._folder)
                tree = scan_data(folder, self._cache)
                self._check_downloads(tree)
                self._tree = tree
            return self._tree

    def _check_downloads(self, tree: FileTree) -> None:
        """Refuse a download that has changed since, and remove it.

        Raises:
            PlanError: a download has changed.
        """
        digests = {os.fsdecode(file.path): file.digest for file in tree.files}
        for wheel in self.locked.wheels:
            if self._cache in wheel.parents and digests[wheel.name] != wheel.parent.name:
                wheel.unlink(missing_ok=True)
                raise PlanError(
                    "a downloaded wheel has changed on this machine's disk, and was removed", where=str(wheel),
                    hint="launch again, which downloads it",
                )  # fmt: skip

    def _tree_of_uv(self) -> FileTree:
        with self._lock:
            if self._uv_tree is None:
                self._uv_tree = self._scan_program(Path(os.path.realpath(require_local_uv())))
            return self._uv_tree

    def _tree_of_static_uv(self) -> FileTree:
        """Return the tree with a uv for nodes with another processor or without glibc.

        Raises:
            PlanError: no source of packages has this uv.
        """
        with self._lock:
            if self._static_tree is None:
                source = _EnvironmentSource(self._spec)
                path = find_static_uv(
                    read_uv_version(source), self.locked.machine, self._cache,
                    lambda words, text: run_uv(words, source, source.index_options, text=text),
                )  # fmt: skip
                self._static_tree = self._scan_program(path)
            return self._static_tree

    def _scan_program(self, path: Path) -> FileTree:
        """Return the tree with one program."""
        tree = scan_data(path, self._cache)
        files = tuple(file._replace(mode=0o700) for file in tree.files)
        return FileTree(tree.root, files, compute_tree_digest(files), withheld=(), skipped=())


def _write_changed_file(path: Path, data: bytes, *, drafts: Path) -> None:
    """Replace a file in one step, unless it has these bytes.

    `drafts` is a folder of the same file system that no launch scans: one at the same time would send the draft.
    """
    if path.is_file() and path.read_bytes() == data:
        return
    draft = drafts / f"..{secrets.token_hex(4)}"
    draft.write_bytes(data)
    draft.replace(path)


def _link_file(path: Path, target: Path, *, drafts: Path) -> None:
    """Make or replace a link in one step, so that other launches can do the same at the same time."""
    if path.is_symlink() and path.readlink() == target:
        return
    draft = drafts / f"..{secrets.token_hex(4)}"
    draft.symlink_to(target)
    draft.replace(path)
