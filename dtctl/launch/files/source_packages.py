"""Packages of a lock that have no wheel: this machine builds one from their sources, if they are Python alone.

uv would otherwise choose older versions of all packages that need such a package, without a message: hydra-core needs
antlr4-python3-runtime, which has no wheel, so uv chose a version of hydra-core from 2019. Nodes still install wheels
alone. The lock keeps the address and the digest of the sources in a comment, which later launches read.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dtctl.errors import PlanError
from dtctl.launch.files import wheels

FOLDER: Final = "built"
ANY_PLATFORM: Final = "-none-any.whl"
"""End of the name of a wheel that runs on each platform."""
_COMMENT: Final = "# built from source: "
_SOURCES: Final = re.compile(rf"^{_COMMENT}(\S+)==(\S+) (\S+) sha256:([0-9a-f]{{64}})$", re.MULTILINE)
_SDIST: Final = re.compile(r'^sdist = \{ (?:url|path) = "([^"]+)".*?\bsha256 = "([0-9a-f]{64})"', re.MULTILINE)
_WHEEL: Final = re.compile(r'\b(?:url|path) = "[^"]+\.whl[#"]')
_NAME: Final = re.compile(r'^name = "([^"]+)"\nversion = "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePackage:
    """Package that an index has as sources alone."""

    name: str
    version: str
    url: str
    sha256: str

    def locate_wheel(self, folder: Path) -> Path | None:
        """Return the wheel that was built from these sources, if there is one."""
        return next(iter(sorted((folder / FOLDER / self.sha256).glob("*.whl"))), None)


def list_packages_without_wheel(listing: str, folder: Path) -> list[SourcePackage]:
    """Return the packages of a pylock.toml for which it has sources and no wheel.

    Args:
        listing: pylock.toml.
        folder: folder of that file, in which relative paths begin.
    """
    found = []
    for section in listing.split("[[packages]]")[1:]:
        name, sdist = _NAME.search(section), _SDIST.search(section)
        if name is None or sdist is None or _WHEEL.search(section):
            continue
        url = sdist[1] if "://" in sdist[1] else (folder / sdist[1]).resolve().as_uri()
        found.append(SourcePackage(name=name[1], version=name[2], url=url, sha256=sdist[2]))
    return found


def read_source_packages(lock: str) -> list[SourcePackage]:
    """Return the packages that are built from source, from the comments of a lock."""
    return [
        SourcePackage(name=name, version=version, url=url, sha256=digest)
        for name, version, url, digest in _SOURCES.findall(lock)
    ]


def format_comments(packages: Sequence[SourcePackage]) -> str:
    """Return the comments of a lock with these packages."""
    return "".join(f"{_COMMENT}{each.name}=={each.version} {each.url} sha256:{each.sha256}\n" for each in packages)


def build_wheels(
    packages: Sequence[SourcePackage],
    folder: Path,
    cache: Path,
    build: Callable[[Sequence[str]], object],
    report: Callable[[str], None],
) -> dict[str, Path]:
    """Return the wheel of each package by the name of the package, and build those that `folder` lacks.

    Args:
        packages: packages without a wheel.
        folder: folder of this project in which wheels are kept.
        cache: folder of downloads.
        build: runs uv with words of a command; raises PlanError if uv fails.
        report: called with the progress, in words.

    Raises:
        PlanError: sources cannot be downloaded or built, or they have parts that have to be compiled.
    """
    made = {}
    for each in packages:
        wheel = each.locate_wheel(folder) or _build_wheel(each, folder, cache, build, report)
        made[wheels.normalize_package_name(each.name)] = wheel
    return made


def _build_wheel(
    package: SourcePackage,
    folder: Path,
    cache: Path,
    build: Callable[[Sequence[str]], object],
    report: Callable[[str], None],
) -> Path:
    title = f"{package.name} {package.version}"
    source = wheels.RelayedWheel(package=package.name, url=package.url, sha256=package.sha256, where="")
    wheels.download_wheels([source], cache, report)
    report(f"environment: {title} has no wheel, and one is built")
    with tempfile.TemporaryDirectory(prefix="dtctl-build-") as scratch:
        words = ["build", "--wheel", "--quiet", "--no-build-logs", "--no-create-gitignore", "--out-dir", scratch]
        build([*words, "--python", sys.executable, str(wheels.locate_wheel(source, cache))])
        built = next(iter(Path(scratch).glob("*.whl")), None)
        if built is None or not built.name.endswith(ANY_PLATFORM):
            raise PlanError(
                f"{title} has no wheel for the nodes, and its sources have to be compiled",
                hint="nodes install wheels alone: build one on a machine like the nodes (`uv build --wheel`), and name "
                "it in the file of requirements",
            )
        kept = folder / FOLDER / package.sha256 / built.name
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = kept.with_name(f"..{built.name}")
        shutil.copyfile(built, draft)
        draft.replace(kept)
    return kept


def name_built_wheels(lock: str, built: Mapping[str, Path]) -> str:
    """Return a lock that names built wheels in place of their packages; line numbers stay."""
    lines = lock.splitlines(keepends=True)
    for name, rows in wheels.find_pinned_lines(lines).items():
        if name not in built:
            continue
        digest = hashlib.sha256(built[name].read_bytes()).hexdigest()
        for number, _ in rows:
            end = wheels.find_end_of_line(lines, number)
            lines[number:end] = [f"{built[name]} --hash=sha256:{digest}\n", *["#\n"] * (end - number - 1)]
    return "".join(lines)
