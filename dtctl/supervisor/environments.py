"""The Python environment of a job on a node, which uv makes once in its final place.

    WORKDIR/envs/DIGEST             the environment, which is never moved, since its programs contain its path
    WORKDIR/envs/DIGEST/dtctl.json  written last; without it, the build of the environment was killed
    WORKDIR/envs/DIGEST.claim       the process that makes the environment, with its start; touched every second
    WORKDIR/envs/cache              uv's cache, on the same file system, so that files are linked and not copied

Nodes may share the folder on a file system without locks: one of them claims the work by creating a file that must not
exist before, and the others wait until the environment is complete or the claim is no longer touched. Stdlib only,
Python 3.8.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time

from dtctl import folders, node_facts
from dtctl.supervisor import frames, index_hosts, processes, records
from dtctl.supervisor.messages.setup import EnvironmentOrder, EnvironmentProgress
from dtctl.supervisor.requests import RequestFailed

FOLDER = "envs"
CACHE = "cache"
MARKER = "dtctl.json"
CLAIM = ".claim"
ORDER_FILE = "environment.json"
"""File with the order in the folder of a job of Slurm; while the file exists, its environment, lock and uv are used."""
PLACES_OF_UV = ("~/.local/bin", "~/.cargo/bin")
"""Folders that are searched in addition to PATH, which is short in logins without a terminal."""
TOUCH_S = 1.0
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX", "UV_INDEX_URL")
"""Variables by which uv finds packages; `job.environment.index` replaces them here and on the control machine."""
STALE_S = 15.0
"""Seconds without a touch after which the process that claimed the work counts as dead, since file servers may show a
touch seconds later."""
REPORT_S = 60.0
PAUSE_S = 1.0
"""Most seconds between two checks of a waiting node: a thousand nodes may check one folder of a file server."""


def locate_environment_python(workdir: str, digest: str) -> str:
    """Return the path of an environment's interpreter."""
    return os.path.join(workdir, FOLDER, digest, "bin", "python")


def is_ready(workdir: str, digest: str) -> bool:
    """Return whether an environment is complete and its interpreter can still be started."""
    marker = os.path.join(workdir, FOLDER, digest, MARKER)
    return os.path.isfile(marker) and os.access(locate_environment_python(workdir, digest), os.X_OK)


def find_node_uv() -> str:
    """Return the path of this node's own uv; empty without one."""
    for folder in [*os.environ.get("PATH", os.defpath).split(os.pathsep), *map(os.path.expanduser, PLACES_OF_UV)]:
        path = os.path.join(folder, "uv")
        if os.path.isabs(path) and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def has_glibc() -> bool:
    """Return whether programs for glibc run here."""
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):
        return False


def make_environment(link: frames.FdLink, workdir: str, order: EnvironmentOrder) -> None:
    """Make an environment unless it exists.

    Raises:
        RequestFailed: the environment cannot be made; the next launch starts again from an empty folder.
    """
    if not _is_digest(order.digest):
        raise RequestFailed("environment", "%r is not the digest of an environment" % order.digest)
    workdir = order.workdir or workdir
    if is_ready(workdir, order.digest):
        os.utime(os.path.join(workdir, FOLDER, order.digest, MARKER))
        return
    if not order.tree:
        raise RequestFailed("no-environment", "the environment %s is no longer here" % order.digest[:8])
    machine = os.uname().machine
    if order.machine and order.machine != machine:
        raise RequestFailed(
            "platform", "its processor is %s, and the packages are locked for %s" % (machine, order.machine)
        )
    top = os.path.join(workdir, FOLDER)
    folders.make_private(top)
    claim = _BuildClaim(os.path.join(top, order.digest + CLAIM))
    told, pause_s = 0.0, 0.05
    while not claim.try_to_claim():
        if is_ready(workdir, order.digest):
            return
        if time.monotonic() - told > REPORT_S:
            told = time.monotonic()
            link.send_json(EnvironmentProgress(text="waits for %s, which makes the environment" % claim.name_holder()))
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, PAUSE_S)
    try:
        if not is_ready(workdir, order.digest):
            _EnvironmentBuild(link, workdir, order, claim).run()
    finally:
        claim.release()


def list_environments(workdir: str) -> list[tuple[str, str]]:
    """Return names and paths of this node's environments, including unfinished ones, and of uv's cache."""
    top = os.path.join(workdir, FOLDER)
    names = os.listdir(top) if os.path.isdir(top) else []
    return [(name, os.path.join(top, name)) for name in names if name == CACHE or _is_digest(name)]


def list_ordered_names(workdir: str) -> set[str]:
    """Return the environments and trees that jobs of Slurm name: other nodes may need them, now or later."""
    ordered = set()
    for path in glob.glob(os.path.join(glob.escape(workdir), "slurm", "*", ORDER_FILE)):
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
            ordered |= {str(document.get(key)) for key in ("digest", "tree", "uv", "static_uv")}
        except (OSError, ValueError, AttributeError):
            continue  # The file is being removed, or is not a file of dtctl.
    return ordered


def is_used(path: str) -> bool:
    """Return whether an environment is being made, or a process of this node runs in it."""
    if os.path.basename(path) == CACHE:
        return any(name.endswith(CLAIM) for name in os.listdir(os.path.dirname(path)))
    if os.path.exists(path + CLAIM):
        return True
    folder = os.path.join(path, "bin").encode()  # Every process that runs in the environment has this folder in PATH.
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/environ" % name, "rb") as file:
                    if folder in file.read(1 << 20):
                        return True
            except OSError:
                continue  # The process has ended meanwhile, or belongs to another user.
    return False


def read_last_use(path: str) -> float:
    """Return the time when a launch last used an environment; 0: not known."""
    try:
        return os.stat(os.path.join(path, MARKER)).st_mtime
    except OSError:
        return 0.0


def remove_environment(workdir: str, name: str) -> bool:
    """Remove an environment, or uv's cache; return whether it is gone."""
    path = os.path.join(workdir, FOLDER, name)
    if not (name == CACHE or _is_digest(name)) or is_used(path):
        return False
    marker = os.path.join(path, MARKER)
    if os.path.isfile(marker):
        os.unlink(marker)  # The marker goes first, so that a partly removed folder is no environment.
    return not folders.remove_folder_tree(path)


def _is_digest(name: str) -> bool:
    return len(name) == 32 and not name.strip("0123456789abcdef")


class _BuildClaim:
    """File that identifies the process that makes an environment."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen = (0, 0)
        """Inode and time of another process's claim at the last check."""
        self._seen_at = 0.0
        namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
        self._place = "%s %s" % (node_facts.read_boot_id(), namespace)
        self._text = json.dumps(
            {
                "node": os.uname().nodename, "place": self._place, "pid": os.getpid(),
                "process": processes.read_process_identity(os.getpid()), "nonce": os.urandom(8).hex(),
            }
        ).encode()  # fmt: skip

    def try_to_claim(self) -> bool:
        """Try to claim the work; return False while another process has claimed it."""
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if self._is_stale():
                self._remove_stale()
            return False
        with open(fd, "wb") as file:
            file.write(self._text)
        return True

    def is_held(self) -> bool:
        """Return whether this process still holds the claim, after touching it."""
        if self._read_claim_bytes() != self._text:
            return False
        os.utime(self.path)
        return True

    def name_holder(self) -> str:
        """Return the name of the node that holds the claim."""
        return str(self._read_other_claim().get("node") or "another node")

    def release(self) -> None:
        """Give up the claim, so that another node can claim the work."""
        if self._read_claim_bytes() == self._text:
            os.unlink(self.path)

    def _read_claim_bytes(self) -> bytes:
        try:
            return folders.read_regular(self.path, 1 << 16)
        except OSError:
            return b""

    def _read_other_claim(self) -> dict:  # type: ignore[type-arg]
        try:
            document = json.loads(self._read_claim_bytes().decode())
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    def _is_stale(self) -> bool:
        """Return whether the holder is gone, by its process on this machine, otherwise by the age of the claim."""
        other = self._read_other_claim()
        pid = other.get("pid")
        if other.get("place") == self._place and isinstance(pid, int):
            return processes.read_process_identity(pid) != other.get("process")
        try:
            info = os.stat(self.path)
        except OSError:
            return False
        seen = (info.st_ino, info.st_mtime_ns)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > STALE_S

    def _remove_stale(self) -> None:
        """Remove a stale claim; only one of several processes succeeds, since a file can be renamed only once."""
        aside = "%s.%s" % (self.path, os.urandom(4).hex())
        try:
            os.rename(self.path, aside)
            os.unlink(aside)
        except FileNotFoundError:
            pass


class _EnvironmentBuild:
    """Build of an environment by uv."""

    def __init__(self, link: frames.FdLink, workdir: str, order: EnvironmentOrder, claim: _BuildClaim) -> None:
        from dtctl.supervisor import receive

        self.link, self.order, self.claim = link, order, claim
        self.path = os.path.join(workdir, FOLDER, order.digest)
        self.cache = os.path.join(workdir, FOLDER, CACHE)
        self.tree = receive.find_stored_tree(workdir, order.tree, "data")
        if not self.tree:
            raise RequestFailed("environment", "the lock of the environment is not here")
        brought = [receive.find_stored_tree(workdir, tree, "data") for tree in (order.static_uv, order.uv) if tree]
        of_uv = next(filter(None, brought), "")
        self.uv = os.path.join(of_uv, "uv") if of_uv else find_node_uv()
        if not self.uv:
            raise RequestFailed("no-uv", "there is no uv on the node, and none was sent")

    def run(self) -> None:
        """Make the environment.

        Raises:
            RequestFailed: the environment cannot be made.
        """
        begun = time.monotonic()
        if folders.remove_folder_tree(self.path):
            raise RequestFailed(
                "environment", "%s has the remains of an environment that cannot be removed" % self.path
            )
        with open(os.path.join(self.tree, self.order.lock), encoding="utf-8") as file:
            lines = file.read().split("\n")
        for folder in [line[13:] for line in lines if line.startswith("--find-links /")]:
            if not os.path.isdir(folder):
                raise RequestFailed("no-folder", "%s, a folder of wheels, does not exist" % folder)
        count = len([line for line in lines if _parse_requirement_name(line)])
        what = "%d package%s" % (count, "" if count == 1 else "s")
        self.link.send_json(EnvironmentProgress(text="uv installs %s for Python %s" % (what, self.order.python)))
        is_own = "%d.%d" % sys.version_info[:2] == self.order.python
        python = sys.executable if is_own and sys.executable else self.order.python
        try:
            self._run_uv_command(["venv", "--no-project", "--python", python, self.path], lines)
        except RequestFailed as exc:
            if not self.order.offline or exc.code != "environment":
                raise
            text = "the node has no Python %s that uv can use: %s" % (self.order.python, exc)
            raise RequestFailed("no-python", text) from exc
        # Modules are compiled once now, and not by all workers at the same time. uv searches all indexes, since the
        # lock does not name the index of a package; its digests exclude other files.
        sync = ["pip", "sync", "--require-hashes", "--no-build", "--compile-bytecode", "--allow-empty-requirements"]
        sync += ["--index-strategy", "unsafe-best-match"]
        self._run_uv_command([*sync, "--python", os.path.join(self.path, "bin", "python"), self.order.lock], lines)
        if not self.claim.is_held():
            raise RequestFailed("environment", "%s was taken over by another node" % self.path)
        made = {"python": self.order.python, "packages": count, "lock": self.order.tree}
        records.write_atomically(os.path.join(self.path, MARKER), json.dumps(made).encode())
        took = time.monotonic() - begun
        self.link.send_json(EnvironmentProgress(text="uv has installed %s in %.1f s" % (what, took)))

    def _run_uv_command(self, arguments: list[str], lock: list[str]) -> None:
        """Run uv, and keep the claim fresh meanwhile.

        Raises:
            RequestFailed: uv has failed.
        """
        dropped = ("VIRTUAL_ENV", "PYTHONPATH", *(INDEX_VARIABLES if self.order.own_index else ()))
        env = {name: text for name, text in os.environ.items() if name not in dropped}
        env.setdefault("UV_CACHE_DIR", self.cache)
        env.update(self.order.credentials)
        here = os.getpid()
        log = self.claim.path + ".log"
        with open(log, "wb") as output:
            try:
                process = subprocess.Popen(
                    # Only errors are printed: progress has durations, by which equal failures would look different.
                    [self.uv, "--quiet", *(["--offline"] if self.order.offline else []), *arguments],
                    cwd=self.tree, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    preexec_fn=lambda: processes.set_parent_death_signal(here),  # noqa: PLW1509 - the function takes no lock
                )  # fmt: skip
            except OSError as exc:
                raise RequestFailed("no-uv", "%s cannot be started: %s" % (self.uv, exc.strerror)) from exc
            self._wait_for_uv(process)
        try:
            with open(log, encoding="utf-8", errors="replace") as file:
                said = file.read()
        finally:
            os.unlink(log)
        if process.returncode:
            if unreachable := index_hosts.describe_unreachable_host(said, "\n".join(lock), env):
                raise RequestFailed("unreachable", "the node cannot reach %s" % unreachable)
            raise RequestFailed(*_describe_uv_failure(said, lock, self.order.lock, process.returncode))

    def _wait_for_uv(self, process: subprocess.Popen) -> None:  # type: ignore[type-arg]
        touched = reported = time.monotonic()
        while process.poll() is None:
            time.sleep(0.02)
            now = time.monotonic()
            if now - touched > TOUCH_S:
                touched = now
                if not self.claim.is_held():
                    process.kill()
            if now - reported > REPORT_S:
                reported = now
                self.link.send_json(EnvironmentProgress(text="uv is still at work"))


def _parse_requirement_name(line: str) -> str:
    """Return the package of a line in a lock; empty for other lines."""
    match = re.match(r"(?:\./)?([A-Za-z0-9][A-Za-z0-9._-]*?)(?:-\d[^/]*\.whl|\s*(?:==|@|;|\\|$))", line)
    return _normalize_requirement_name(match.group(1)) if match else ""


def _normalize_requirement_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _describe_uv_failure(said: str, lock: list[str], name: str, status: int) -> tuple[str, str]:
    """Return the code of a failure, and uv's message with the line of the lock that it refers to."""
    if os.strerror(errno.ENOSPC) in said:
        return "disk-full", said.strip().split("\n")[-1].strip()
    lines = [re.sub(r"^[\s×╰├─▶│]+", "", line).strip() for line in said.split("\n")]
    text = " ".join(filter(None, lines))
    if status < 0:
        text = "uv was ended by %s. %s" % (signal.Signals(-status).name, text)
    words = {_normalize_requirement_name(word) for word in re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]", text)}
    words |= {word.partition("-")[0] for word in words if word.endswith("whl")}
    for number, line in enumerate(lock, 1):
        package = _parse_requirement_name(line)
        if package and package in words:
            return "environment", "%s:%d: %s: uv: %s" % (name, number, package, text)
    return "environment", "uv: %s" % (text or "ended with status %d" % status)
