"""Sources of packages for uv: indexes, folders of wheels, and users and passwords of indexes with a name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

FIND_LINKS: Final = "--find-links "
_NAMED: Final = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)=(?P<url>https?://.+)\Z")
"""Index with a name (`corp=https://...`), by which uv finds the variables with the user and password."""
_TABLE: Final = re.compile(r"^\[\[(?:tool\.uv\.)?index\]\][^\n]*\n((?:(?!\s*\[).*\n?)*)", re.MULTILINE)
"""Lines of a named index in pyproject.toml or uv.toml."""
_NAME_OR_URL: Final = re.compile(r"^\s*(name|url)\s*=\s*[\"']([^\"']+)", re.MULTILINE)
_REGISTRY: Final = re.compile(r"^source = \{ registry = \"([^\"]+)\" \}", re.MULTILINE)
_PYPI: Final = "https://pypi.org/simple"


def build_index_options(places: Sequence[str], base: Path) -> list[str]:
    """Return a line with an option for each index and folder of wheels; relative folders begin in `base`."""
    if not places:
        return []
    places = [match["url"] if (match := _NAMED.match(place)) else place for place in places]
    urls = [place for place in places if "://" in place]
    folders = [str((base / Path(place).expanduser()).absolute()) for place in places if place not in urls]
    return [
        f"--index-url {urls[0]}" if urls else "--no-index",
        *(f"--extra-index-url {url}" for url in urls[1:]),
        *(f"{FIND_LINKS}{folder}" for folder in folders),
    ]


def list_registry_options(lock: Path) -> list[str]:
    """Return the options that name the sources of a uv.lock; empty if PyPI is the only source."""
    registries = list(dict.fromkeys(_REGISTRY.findall(lock.read_text(encoding="utf-8", errors="replace"))))
    if not registries or registries == [_PYPI]:
        return []
    return build_index_options(sorted(registries, key=lambda registry: registry != _PYPI), lock.parent)


def list_named_indexes(places: Sequence[str], folder: Path) -> list[tuple[str, str]]:
    """Return names and URLs of the indexes in the spec; without any, those in uv's settings for a folder."""
    if places:
        return [(match["name"], match["url"]) for place in places if (match := _NAMED.match(place))]
    texts = [
        path.read_text(encoding="utf-8", errors="replace") for path in list_uv_configurations(folder) if path.is_file()
    ]
    tables = [dict(_NAME_OR_URL.findall(block)) for text in texts for block in _TABLE.findall(text)]
    return [(table["name"], table["url"]) for table in tables if {"name", "url"} <= table.keys()]


def collect_credentials(indexes: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with users and passwords of indexes, and the variable that gives uv the indexes' names."""
    named: list[str] = []
    found: dict[str, str] = {}
    for name, url in indexes:
        prefix = f"UV_INDEX_{re.sub('[^A-Za-z0-9]', '_', name).upper()}_"
        own = {key: text for part in ("USERNAME", "PASSWORD") if (text := environ.get(key := prefix + part))}
        if own:
            found |= own
            named.append(f"{name}={url}")
    return found | {"UV_INDEX": " ".join(named)} if found else {}


def list_uv_configurations(folder: Path) -> Iterator[Path]:
    """Yield the files of settings that uv reads in a folder: the user's file, and the nearest one of a project."""
    yield Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "uv" / "uv.toml"
    for each in (folder.absolute(), *folder.absolute().parents):
        if (each / "uv.toml").is_file():
            yield each / "uv.toml"
            return
        project = each / "pyproject.toml"
        if project.is_file() and "[tool.uv" in project.read_text(encoding="utf-8", errors="replace"):
            yield project
            return
