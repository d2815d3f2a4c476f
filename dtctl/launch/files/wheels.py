"""Wheels that this machine downloads for nodes without internet (`job.environment.wheels: relay`).

uv chooses the wheel of every package for the nodes' platform and lists it with address and digest (pylock.toml). The
lock that nodes get names these files in place of the packages, line by line, as it names the user's own wheels.
"""

from __future__ import annotations

import hashlib
import netrc
import os
import re
import secrets
import threading
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib import error, parse, request

from dtctl.errors import PlanError

CACHE: Final = "wheels"
PARALLEL: Final = 8
"""Number of parallel downloads: one connection to a distant index does not use the whole bandwidth."""
ATTEMPTS: Final = 3
SILENCE_S: Final = 30.0
"""Seconds without a byte after which a download is tried again."""
REPORT_S: Final = 0.5
CHUNK_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r'^name = "([^"]+)"\n(?:version = "([^"]+)")?', re.MULTILINE)
_FILE: Final = re.compile(r'\b(?:url|path) = "([^"]+\.whl)(?:#[^"]*)?"[^}]*?(?:\bsha256 = "([0-9a-f]{64})"|\})')
_LOCKED: Final = re.compile(r'name = "([^"]+)"')
_PINNED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*(?:==\s*([^\s;\\#]+)|@\s*\S+)")
_DIGEST: Final = re.compile(r"--hash[ =]sha256:([0-9a-f]{64})")
_SIZED: Final = re.compile(r'\burl = "[^"]*?([^/"]+)\.whl(?:#[^"]*)?"[^}]*?\bsize = (\d+)')
_HINT: Final = "nodes install only wheels: build one (`uv build --wheel`), and name it in the file of requirements"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedWheel:
    """Wheel that a lock names and that this machine sends to the nodes."""

    package: str
    url: str
    sha256: str
    where: str
    """Line of the lock."""

    @property
    def file_name(self) -> str:
        """Return the name of the file, from which uv reads package, version and platform."""
        return parse.unquote(parse.urlsplit(self.url).path.rpartition("/")[2])


def choose_relayed_wheels(
    lines: Sequence[str], listing: str, places: Mapping[str, str]
) -> tuple[list[str], list[RelayedWheel]]:
    """Return a lock that names files in place of packages, and these files.

    Args:
        lines: lines of the lock, in which the user's own wheels have their names on nodes.
        listing: pylock.toml with the packages that the nodes need.
        places: line of each package, for errors.

    Raises:
        PlanError: a package has no wheel, or another wheel than in the lock.
    """
    made, wheels = list(lines), []
    rows = find_pinned_lines(lines)
    for number in _find_option_lines(lines):
        made[number] = "#\n"  # Nodes need no sources of packages; a comment keeps the numbers of the other lines.
    for section in listing.split("[[packages]]")[1:]:
        name = _NAME.search(section)
        package, version = (name[1], name[2]) if name else ("", "")
        found = rows.get(normalize_package_name(package), [])
        if len(found) > 1:  # Only one of the lines is for this platform.
            found = [row for row in found if row[1][2] == version] or found
        if not found:
            if not _FILE.search(section):
                raise PlanError(f"{package} has no wheel", where=places.get(package), hint=_HINT)
            continue  # The lock names this wheel of the user already.
        number = found[0][0]
        where = places.get(package, "")
        end = find_end_of_line(lines, number)
        digests = _DIGEST.findall("".join(lines[number:end]))
        files = [(url, digest or (digests[0] if len(digests) == 1 else "")) for url, digest in _FILE.findall(section)]
        wheel = next((file for file in files if file[1] in digests), None)
        if not files:
            raise PlanError(f"{package} {version} has no wheel for the nodes", where=where, hint=_HINT)
        if wheel is None:
            raise PlanError(
                f"{package} {version}: the digest of {files[0][0]} is none of those in the lock", where=where,
                hint="correct the digest, or make the lock again",
            )  # fmt: skip
        relayed = RelayedWheel(package=package, url=wheel[0], sha256=wheel[1], where=where)
        wheels.append(relayed)
        # Only the digest of this file is named, since uv expects a file in a folder to fit all. Line numbers stay.
        made[number:end] = [f"./{relayed.file_name} --hash=sha256:{relayed.sha256}\n", *["#\n"] * (end - number - 1)]
    return made, wheels


def sum_wheel_sizes(uv_lock: str, packages: Collection[str], python: str, machine: str) -> int:
    """Return the least number of bytes that a node downloads for the packages of uv.lock; 0 if no size is known.

    Args:
        uv_lock: text of uv.lock.
        packages: packages that nodes install, with the names that indexes use.
        python: version on the nodes, such as 3.12.
        machine: processor of the nodes.
    """
    total, tag = 0, "cp" + python.replace(".", "")
    for section in uv_lock.split("[[package]]")[1:]:
        name = _LOCKED.search(section)
        if name is None or normalize_package_name(name[1]) not in packages:
            continue
        sizes = []
        for file_name, size in _SIZED.findall(section):
            *_, pythons, abi, platform = file_name.rsplit("-", 3)
            is_for_python = abi == "abi3" or bool({tag, "py3"} & {*pythons.split(".")})
            if is_for_python and (platform == "any" or ("linux" in platform and platform.endswith(machine))):
                sizes.append(int(size))
        total += min(sizes, default=0)
    return total


def normalize_package_name(name: str) -> str:
    """Return a name in the form that indexes use: `typing-extensions`."""
    return re.sub(r"[-_.]+", "-", name).lower().strip("-")


def find_pinned_lines(lines: Sequence[str]) -> dict[str, list[tuple[int, re.Match[str]]]]:
    """Return the lines of a lock that name a package, with their numbers, by the name of the package."""
    rows: dict[str, list[tuple[int, re.Match[str]]]] = {}
    for number, line in enumerate(lines):
        if match := _PINNED.match(line):
            rows.setdefault(normalize_package_name(match[1]), []).append((number, match))
    return rows


def list_package_places(path: Path, text: str) -> dict[str, str]:
    """Return the line of each package in a file of requirements or in uv.lock."""
    places: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if match := _LOCKED.match(line) if path.name == "uv.lock" else _PINNED.match(line):
            places.setdefault(normalize_package_name(match[1]), f"{path.name}:{number}")
    return places


def _find_option_lines(lines: Sequence[str]) -> list[int]:
    return [
        number
        for number, line in enumerate(lines)
        if line.startswith("-") and not (number and lines[number - 1].rstrip().endswith("\\"))
    ]


def find_end_of_line(lines: Sequence[str], number: int) -> int:
    """Return the number of the first line after a line and its continuation lines."""
    while lines[number].rstrip().endswith("\\") and number + 1 < len(lines):
        number += 1
    return number + 1


def locate_wheel(wheel: RelayedWheel, cache: Path) -> Path:
    """Return the path of a downloaded wheel, in a folder named by its digest."""
    return cache / CACHE / wheel.sha256 / wheel.file_name


def download_wheels(wheels: Sequence[RelayedWheel], cache: Path, report: Callable[[str], None]) -> None:
    """Download the wheels that the cache lacks, and check their digests.

    Args:
        wheels: needed wheels.
        cache: folder of downloads.
        report: called with the progress, in words.

    Raises:
        PlanError: a wheel cannot be downloaded, or its digest is wrong.
    """
    missing = []
    for wheel in wheels:
        try:
            os.utime(locate_wheel(wheel, cache))  # `dtctl clean` removes wheels by this time.
        except OSError:
            missing.append(wheel)
    if not missing:
        return
    job = _Download(cache)
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="wheels") as pool:
        waiting = {pool.submit(job.fetch_wheel, wheel) for wheel in missing}
        try:
            while waiting:
                done, waiting = wait(waiting, REPORT_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                count = len(missing) - len(waiting)
                report(f"environment: {count} of {len(missing)} wheels, {job.received_bytes >> 20} MiB downloaded")
        finally:
            job.stop.set()
            pool.shutdown(cancel_futures=True)


class _Download:
    """Downloads of wheels, all of which stop after an error."""

    def __init__(self, cache: Path) -> None:
        self.stop = threading.Event()
        self.received_bytes = 0
        self._cache = cache

    def fetch_wheel(self, wheel: RelayedWheel) -> None:
        """Download one wheel into the cache."""
        path = locate_wheel(wheel, self._cache)
        draft = path.with_name(f"..{secrets.token_hex(4)}")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                digest = self._write_draft(wheel.url, draft)
                if digest != wheel.sha256:
                    raise PlanError(
                        f"{wheel.package}: {wheel.url} does not match the lock: its SHA-256 is {digest}",
                        where=wheel.where,
                        hint="launch again; if it happens again, the index or a proxy sends a wrong file",
                    )
                draft.replace(path)
                return
            except (OSError, ValueError, EOFError) as exc:
                if isinstance(exc, error.HTTPError):
                    exc.close()
                reason = str(exc.reason) if isinstance(exc, error.URLError) else str(exc) or type(exc).__name__
                is_final = isinstance(exc, (error.HTTPError, ValueError)) or attempt == ATTEMPTS
                if is_final or self.stop.wait(attempt):
                    raise PlanError(
                        f"{wheel.package}: {wheel.url} cannot be downloaded: {reason}", where=wheel.where,
                        hint="launch again, which keeps the downloaded wheels; behind a proxy set HTTPS_PROXY",
                    ) from exc  # fmt: skip
            finally:
                draft.unlink(missing_ok=True)

    def _write_draft(self, url: str, draft: Path) -> str:
        total, received = hashlib.sha256(), 0
        # The digest in the lock decides which contents are accepted, and the address comes from uv.
        with request.urlopen(_authorize(url), timeout=SILENCE_S) as answer, draft.open("wb") as file:  # noqa: S310
            while data := answer.read(CHUNK_BYTES):
                if self.stop.is_set():
                    raise EOFError("another download has failed")
                file.write(data)
                total.update(data)
                received += len(data)
                self.received_bytes += len(data)
            if received < int(answer.headers.get("Content-Length") or 0):
                raise EOFError(f"the connection ended after {received} bytes")
        return total.hexdigest()


def _authorize(url: str) -> request.Request:
    """Return a request with the password of ~/.netrc for its host, if there is one, as uv does."""
    made = request.Request(url)  # noqa: S310 - the address comes from uv
    try:
        entry = netrc.netrc(os.environ.get("NETRC")).authenticators(parse.urlsplit(url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        entry = None
    if entry is not None:
        # The password must not be sent to a host to which the index may redirect.
        made.add_unredirected_header("Authorization", f"Basic {b64encode(f'{entry[0]}:{entry[2]}'.encode()).decode()}")
    return made
