"""Files that a job reads and that are no part of its code (`job.data`): where they are, and what is brought to nodes.

All of a folder is taken: neither .gitignore nor the list of secrets counts for what a spec names. Links are followed to
files, since data sets of Hugging Face consist of them. What lies at a URL is fetched once, into the folder `.dtctl`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from dtctl import names
from dtctl.errors import PlanError, UsageError
from dtctl.launch.control.link import NodeLink
from dtctl.launch.files import push
from dtctl.launch.files.relay import Relay
from dtctl.launch.files.tree import Digests, Tree, TreeFile, tree_digest
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.spec.model import DataEntry, Spec
from dtctl.supervisor.messages.setup import DataLink

ON_NODE = "node:"
CACHE_DIR = "cache"
FETCHED_DIR = "data"
MOST_FILES = 1_000_000


@dataclass(frozen=True, slots=True)
class DataItem:
    """One entry of `job.data`, as it was found."""

    source: str
    to: str
    tree: Tree | None
    """Files that are brought to nodes. None: they have the files."""
    path: str
    """A file of the tree, empty for all of it; or where nodes have the files."""

    def to_link(self) -> DataLink:
        """Return the link for the nodes."""
        return DataLink(to=self.to, tree=self.tree.digest if self.tree is not None else "", path=self.path)


class DataPush:
    """Looks for the data in the background, and brings it to every node that asks."""

    def __init__(self, spec: Spec) -> None:
        """Begin to look."""
        self._payloads: dict[str, push.Payloads] = defaultdict(push.Payloads)
        """Payloads by the digest of a tree."""
        self._items: Future[tuple[DataItem, ...]] = Future()

        def work() -> None:
            try:
                self._items.set_result(find_data(spec))
            except Exception as exc:  # noqa: BLE001 - raised again for the caller that requests the items
                self._items.set_exception(exc)

        threading.Thread(target=work, name="data", daemon=True).start()

    @property
    def items(self) -> tuple[DataItem, ...]:
        """Return what was found; waits for it."""
        return self._items.result()

    def links(self) -> list[DataLink]:
        """Return the links for the nodes."""
        return [item.to_link() for item in self.items]

    def expect_nodes(self, count: int) -> None:
        """Set the number of nodes that will need the data."""
        self._payloads = defaultdict(lambda: push.Payloads(Relay(count)))

    def __call__(self, link: NodeLink, progress: PushReport) -> PushProgress:
        """Bring all that a node lacks."""
        files = sent = 0
        state = "have"
        for item in self.items:
            if item.tree is not None:
                shared, before = self._payloads[item.tree.digest], sent
                later = push.report_after(before, progress)
                result = push.push(link, item.tree, store="data", shared=shared, progress=later)
                files, sent = files + result.files_sent, sent + result.bytes_sent
                state = result.state if state == "have" else state
        return PushProgress(files=files, bytes=sent, state=state)


def find_data(spec: Spec) -> tuple[DataItem, ...]:
    """Find all that `job.data` names; reads every file that was not read before.

    Raises:
        PlanError: something is missing, or cannot be read or fetched.
        UsageError: a URL needs a package that is not installed.
    """
    return tuple(_find_entry(spec, number, entry) for number, entry in enumerate(spec.job.data))


def check_places(items: Sequence[DataItem], code: Tree | None) -> None:
    """Refuse data that would lie where the code, or other data, has something.

    Args:
        items: the data.
        code: what is pushed; None if nothing is.

    Raises:
        PlanError: two things have one place.
    """
    taken = [os.fsdecode(file.path) for file in code.files] if code is not None else []
    for item in items:
        for path in taken:
            if path == item.to or path.startswith(f"{item.to}/") or item.to.startswith(f"{path}/"):
                raise PlanError(
                    f"{path} is in the working folder already, where {item.source} is to appear as {item.to}",
                    where="job.data",
                    hint="name another place as `to`, or leave the file out with `job.files.exclude`",
                )
        taken.append(item.to)


def _find_entry(spec: Spec, number: int, entry: DataEntry) -> DataItem:
    source, where = entry.source, spec.written_at(f"job.data[{number}]")
    if entry.is_on_nodes:
        return DataItem(source, entry.to, None, source.removeprefix(ON_NODE))
    if entry.is_url:
        path = _fetch(spec, source, where)
    else:
        path = Path(os.path.abspath(spec.base_dir / os.path.expanduser(source)))  # keeps links
    if not path.exists():
        raise PlanError(
            f"{path} does not exist", where=where, hint="correct `from`; what only the nodes have is written node:/path"
        )
    if spec.cluster.transport == "local":  # which is this machine
        return DataItem(source, entry.to, None, str(path))
    base = Path(os.path.realpath(spec.base_dir))
    # A folder that came along may have links to files of this user; what lies elsewhere was agreed to (trust.py).
    within = base if not entry.is_url and base in Path(os.path.realpath(path)).parents else None
    tree = scan_data(path, spec.base_dir / names.STATE_DIR / CACHE_DIR, within=within)
    return DataItem(source, entry.to, tree, "" if path.is_dir() else path.name)


def scan_data(path: Path, cache: Path, *, within: Path | None = None) -> Tree:
    """Return a file, or all files of a folder, as a tree.

    Args:
        path: of the file or folder.
        cache: folder for remembered digests.
        within: folder in which links have to stay.

    Raises:
        PlanError: something cannot be read or brought.
    """
    root = path if path.is_dir() else path.parent
    memory = cache / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}-data.json"
    found: list[TreeFile] = []
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Digests(memory) as digests:
            for name, info in _walk(root) if path.is_dir() else [(os.fsencode(path.name), path.stat())]:
                if within is not None and within not in Path(os.path.realpath(root / os.fsdecode(name))).parents:
                    raise PlanError(
                        "a link in the data leads out of the folder of the spec", where=str(root / os.fsdecode(name)),
                        hint="name what it leads to as an entry of `job.data`",
                    )  # fmt: skip
                digest, _ = digests.of(name, os.path.join(os.fsencode(root), name), info)
                found.append(TreeFile(name, 0o600, info.st_size, digest))
    except OSError as exc:
        raise PlanError(f"data cannot be read: {exc.strerror}", where=str(exc.filename or path)) from exc
    found.sort()
    return Tree(root, tuple(found), tree_digest(found), withheld=(), skipped=())


def _walk(root: Path) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield every file below a folder, with what it is behind links.

    Raises:
        PlanError: there are too many, or a link leads to a folder.
        OSError: something cannot be read.
    """
    todo, count = [b""], 0
    while todo:
        prefix = todo.pop()
        with os.scandir(os.path.join(os.fsencode(root), prefix)) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    todo.append(name + b"/")
                    continue
                info = entry.stat()
                if stat.S_ISDIR(info.st_mode):
                    raise PlanError(
                        "a link in the data leads to a folder",
                        where=os.fsdecode(entry.path),
                        hint="name that folder as another entry of `job.data`",
                    )
                if stat.S_ISREG(info.st_mode):
                    count += 1
                    yield name, info
                if count > MOST_FILES:
                    raise PlanError(
                        f"data of more than {MOST_FILES:,} files cannot be brought to nodes",
                        where=str(root),
                        hint="pack them, or bring them there yourself and write node:/path",
                    )


def _fetch(spec: Spec, url: str, where: str) -> Path:
    """Return the folder or file that a URL was fetched into, once.

    Raises:
        PlanError: it cannot be fetched.
        UsageError: the package for it is not installed.
    """
    folder = spec.base_dir / names.STATE_DIR / FETCHED_DIR / hashlib.sha256(url.encode()).hexdigest()[:16]
    target = folder / (url.rstrip("/").rpartition("/")[2] or "data")
    if target.exists():
        return target
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
    except ImportError as exc:
        raise UsageError(
            f"{url} cannot be fetched: {exc}", where=where, hint="pip install fsspec, and the package that it names"
        ) from exc
    except ValueError as exc:
        raise PlanError(f"{url} cannot be fetched: {exc}", where=where) from exc
    draft = folder / f".part-{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        system.get(path, str(draft), recursive=True)
        draft.rename(target)
    except Exception as exc:  # whatever a store raises
        raise PlanError(f"{url} cannot be fetched: {str(exc) or type(exc).__name__}", where=where) from exc
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
