"""The Python environment of a job on a node: made by uv, once, in the place where it stays.

    WORKDIR/envs/DIGEST             the environment, which is never moved: its programs have its path in them
    WORKDIR/envs/DIGEST/dtctl.json  written last; without it the folder is the remains of a start that was killed
    WORKDIR/envs/DIGEST.claim       the process that makes it now, and its start: touched every second
    WORKDIR/envs/cache              uv's cache, on the same file system, so that files are linked instead of copied

Nodes may have the folder in common, on a file system without locks: one of them claims the work by making a file that
must not exist, and the others wait until the environment is there, or the claim is no longer touched. Stdlib only,
Python 3.8.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

from dtctl import folders, node_facts
from dtctl.supervisor import frames, processes, records
from dtctl.supervisor.messages.setup import EnvironmentOrder, EnvironmentProgress
from dtctl.supervisor.requests import CannotDo

FOLDER = "envs"
CACHE = "cache"
MARKER = "dtctl.json"
CLAIM = ".claim"
PLACES_OF_UV = ("~/.local/bin", "~/.cargo/bin")
"""Folders in addition to PATH, which is short in logins without a terminal."""
TOUCH_S = 1.0
STALE_S = 15.0
"""Seconds without a touch after which the process that claimed the work counts as dead: file servers may show a touch
seconds later."""
REPORT_S = 60.0


def python_of(workdir: str, digest: str) -> str:
    """Path of an environment's interpreter."""
    return os.path.join(workdir, FOLDER, digest, "bin", "python")


def is_ready(workdir: str, digest: str) -> bool:
    """Return whether an environment is whole, and its interpreter can still be started."""
    marker = os.path.join(workdir, FOLDER, digest, MARKER)
    return os.path.isfile(marker) and os.access(python_of(workdir, digest), os.X_OK)


def find_uv() -> str:
    """Path of this node's own uv; empty without one."""
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
    """Make an environment unless it is there.

    Raises:
        CannotDo: it cannot be made; the next launch starts again from an empty folder.
    """
    if not _is_digest(order.digest):
        raise CannotDo("environment", "%r is not the digest of an environment" % order.digest)
    if is_ready(workdir, order.digest):
        os.utime(os.path.join(workdir, FOLDER, order.digest, MARKER))
        return
    if not order.tree:
        raise CannotDo("no-environment", "the environment %s is no longer here" % order.digest[:8])
    machine = os.uname().machine
    if order.machine and order.machine != machine:
        raise CannotDo("platform", "its processor is %s, and the packages are locked for %s" % (machine, order.machine))
    top = os.path.join(workdir, FOLDER)
    folders.make_private(top)
    claim = _Claim(os.path.join(top, order.digest + CLAIM))
    told = 0.0
    while not claim.try_to_claim():
        if is_ready(workdir, order.digest):
            return
        if time.monotonic() - told > REPORT_S:
            told = time.monotonic()
            link.send_json(EnvironmentProgress(text="waits for %s, which makes the environment" % claim.name_holder()))
        time.sleep(0.05)
    try:
        if not is_ready(workdir, order.digest):
            _Build(link, workdir, order, claim).run()
    finally:
        claim.release()


def list_environments(workdir: str) -> list[tuple[str, str]]:
    """Return names and paths of this node's environments, also of those that were never finished, and of uv's cache."""
    top = os.path.join(workdir, FOLDER)
    names = os.listdir(top) if os.path.isdir(top) else []
    return [(name, os.path.join(top, name)) for name in names if name == CACHE or _is_digest(name)]


def is_used(path: str) -> bool:
    """Return whether a process of this node runs in an environment, or it is being made."""
    if os.path.basename(path) == CACHE:
        return any(name.endswith(CLAIM) for name in os.listdir(os.path.dirname(path)))
    if os.path.exists(path + CLAIM):
        return True
    folder = os.path.join(path, "bin").encode()  # in the PATH of every process that runs there
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/environ" % name, "rb") as file:
                    if folder in file.read(1 << 20):
                        return True
            except OSError:
                continue  # it has ended meanwhile, or is another user's
    return False


def last_used(path: str) -> float:
    """Return when a launch has used an environment for the last time; 0: not known."""
    try:
        return os.stat(os.path.join(path, MARKER)).st_mtime
    except OSError:
        return 0.0


def remove_environment(workdir: str, name: str) -> bool:
    """Remove an environment, or uv's cache; whether it is gone."""
    path = os.path.join(workdir, FOLDER, name)
    if not (name == CACHE or _is_digest(name)) or is_used(path):
        return False
    marker = os.path.join(path, MARKER)
    if os.path.isfile(marker):
        os.unlink(marker)  # first: what is left of it is no environment
    return not folders.remove_tree(path)


def _is_digest(name: str) -> bool:
    return len(name) == 32 and not name.strip("0123456789abcdef")


class _Claim:
    """File that identifies the process that makes an environment."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen = (0, 0)
        """Inode and time of the other's claim, as last seen."""
        self._seen_at = 0.0
        namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
        self._place = "%s %s" % (node_facts.boot_id(), namespace)
        self._text = json.dumps(
            {
                "node": os.uname().nodename, "place": self._place, "pid": os.getpid(),
                "process": processes.identity(os.getpid()), "nonce": os.urandom(8).hex(),
            }
        ).encode()  # fmt: skip

    def try_to_claim(self) -> bool:
        """Claim the work; return False while another process does it."""
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
        """Return whether the claim is still ours; touches it."""
        if self._read() != self._text:
            return False
        os.utime(self.path)
        return True

    def name_holder(self) -> str:
        """Return the name of the node that has it."""
        return str(self._others().get("node") or "another node")

    def release(self) -> None:
        """Let it go."""
        if self._read() == self._text:
            os.unlink(self.path)

    def _read(self) -> bytes:
        try:
            return folders.read_regular(self.path, 1 << 16)
        except OSError:
            return b""

    def _others(self) -> dict:  # type: ignore[type-arg]
        try:
            document = json.loads(self._read().decode())
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    def _is_stale(self) -> bool:
        """Return whether its holder is gone: its process, if of this machine; else by the age of its file."""
        other = self._others()
        pid = other.get("pid")
        if other.get("place") == self._place and isinstance(pid, int):
            return processes.identity(pid) != other.get("process")
        try:
            info = os.stat(self.path)
        except OSError:
            return False
        seen = (info.st_ino, info.st_mtime_ns)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > STALE_S

    def _remove_stale(self) -> None:
        """Remove a stale claim; of several processes that find it one succeeds, since a name can be given once."""
        aside = "%s.%s" % (self.path, os.urandom(4).hex())
        try:
            os.rename(self.path, aside)
            os.unlink(aside)
        except FileNotFoundError:
            pass


class _Build:
    """One run of uv."""

    def __init__(self, link: frames.FdLink, workdir: str, order: EnvironmentOrder, claim: _Claim) -> None:
        from dtctl.supervisor import receive

        self.link, self.order, self.claim = link, order, claim
        self.path = os.path.join(workdir, FOLDER, order.digest)
        self.cache = os.path.join(workdir, FOLDER, CACHE)
        self.tree = receive.find(workdir, order.tree, "data")
        if not self.tree:
            raise CannotDo("environment", "the lock of the environment is not here")
        of_uv = receive.find(workdir, order.uv, "data") if order.uv else ""
        self.uv = os.path.join(of_uv, "uv") if of_uv else find_uv()
        if not self.uv:
            raise CannotDo("no-uv", "there is no uv, and none was brought")

    def run(self) -> None:
        """Make the environment.

        Raises:
            CannotDo: it cannot be made.
        """
        begun = time.monotonic()
        if folders.remove_tree(self.path):
            raise CannotDo("environment", "%s has the remains of an environment that cannot be removed" % self.path)
        with open(os.path.join(self.tree, self.order.lock), encoding="utf-8") as file:
            lines = file.read().split("\n")
        for folder in [line[13:] for line in lines if line.startswith("--find-links /")]:
            if not os.path.isdir(folder):
                raise CannotDo("no-folder", "%s of job.environment.index does not exist" % folder)
        count = len([line for line in lines if _name_of(line)])
        what = "%d package%s" % (count, "" if count == 1 else "s")
        self.link.send_json(EnvironmentProgress(text="uv installs %s for Python %s" % (what, self.order.python)))
        is_own = "%d.%d" % sys.version_info[:2] == self.order.python
        python = sys.executable if is_own and sys.executable else self.order.python
        self._uv(["--no-progress", "venv", "--no-project", "--python", python, self.path], lines)
        # Compiled now, once, instead of by all workers at the same time.
        sync = ["pip", "sync", "--require-hashes", "--no-build", "--compile-bytecode", "--allow-empty-requirements"]
        self._uv(["--no-progress", *sync, "--python", os.path.join(self.path, "bin", "python"), self.order.lock], lines)
        if not self.claim.is_held():
            raise CannotDo("environment", "%s was taken over by another node" % self.path)
        made = {"python": self.order.python, "packages": count, "lock": self.order.tree}
        records.write_atomically(os.path.join(self.path, MARKER), json.dumps(made).encode())
        took = time.monotonic() - begun
        self.link.send_json(EnvironmentProgress(text="uv has installed %s in %.1f s" % (what, took)))

    def _uv(self, arguments: list[str], lock: list[str]) -> None:
        """Run uv, and keep the claim fresh meanwhile.

        Raises:
            CannotDo: it has failed.
        """
        env = {name: text for name, text in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        env.setdefault("UV_CACHE_DIR", self.cache)
        here = os.getpid()
        log = self.claim.path + ".log"
        with open(log, "wb") as output:
            try:
                process = subprocess.Popen(
                    [self.uv, *arguments],
                    cwd=self.tree, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    preexec_fn=lambda: processes.die_with_parent(here),  # noqa: PLW1509 - takes no lock
                )  # fmt: skip
            except OSError as exc:
                raise CannotDo("no-uv", "%s cannot be started: %s" % (self.uv, exc.strerror)) from exc
            self._wait(process)
        try:
            with open(log, encoding="utf-8", errors="replace") as file:
                said = file.read()
        finally:
            os.unlink(log)
        if process.returncode:
            raise CannotDo(*_failure(said, lock, self.order.lock, process.returncode))

    def _wait(self, process: subprocess.Popen) -> None:  # type: ignore[type-arg]
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


def _name_of(line: str) -> str:
    """Return the package that a line of a lock is about; empty for others."""
    match = re.match(r"(?:\./)?([A-Za-z0-9][A-Za-z0-9._-]*?)(?:-\d[^/]*\.whl|\s*(?:==|@|;|\\|$))", line)
    return _normal(match.group(1)) if match else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _failure(said: str, lock: list[str], name: str, status: int) -> tuple[str, str]:
    """Return the code of a failure, and uv's message with the line of the lock that it refers to."""
    if os.strerror(errno.ENOSPC) in said:
        return "disk-full", said.strip().split("\n")[-1].strip()
    lines = [re.sub(r"^[\s×╰├─▶│]+", "", line).strip() for line in said.split("\n")]
    text = " ".join(line for line in lines if line and not line.startswith("Using Python"))
    if status < 0:
        text = "uv was ended by %s. %s" % (signal.Signals(-status).name, text)
    words = {_normal(word) for word in re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]", text)}
    words |= {word.partition("-")[0] for word in words if word.endswith("whl")}
    for number, line in enumerate(lock, 1):
        package = _name_of(line)
        if package and package in words:
            return "environment", "%s:%d: %s: uv: %s" % (name, number, package, text)
    return "environment", "uv: %s" % (text or "ended with status %d" % status)
