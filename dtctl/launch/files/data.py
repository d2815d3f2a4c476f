"""Files that a job reads and that are not part of its code (`job.data`), and their transfer to nodes.

All files of a folder are sent: neither .gitignore nor the list of secrets applies to data that a spec names. Links are
followed to files, since data sets of Hugging Face consist of links. Data at a URL are fetched once, into `.dtctl`.
"""

from __future__ import annotations

import contextlib
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
from dtctl.launch.files.relay import BlockRelay
from dtctl.launch.files.tree import DigestCache, FileTree, TreeFile, compute_tree_digest
from dtctl.launch.records.events import PushProgress, PushReport
from dtctl.spec.model import DataEntry, Spec
from dtctl.supervisor.messages.setup import DataLink

ON_NODE = "node:"
CACHE_DIR = "cache"
FETCHED_DIR = "data"
MOST_FILES = 1_000_000


@dataclass(frozen=True, slots=True)
class DataItem:
    """An entry of `job.data` with its files."""

    source: str
    to: str
    tree: FileTree | None
    """Files that are brought to nodes; None: the nodes have the files."""
    path: str
    """Path of a file in the tree, empty for the whole tree; without a tree, path of the files on nodes."""

    def to_link(self) -> DataLink:
        """Return the link for the nodes."""
        return DataLink(to=self.to, tree=self.tree.digest if self.tree is not None else "", path=self.path)


class DataPush:
    """Push of the data: a search in the background, and the transfer to every node that needs them."""

    def __init__(self, spec: Spec) -> None:
        """Begin the search for the data in a thread."""
        self._payloads: dict[str, push.PayloadCache] = defaultdict(push.PayloadCache)
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
        """Return the items, after waiting for the search."""
        return self._items.result()

    def links(self) -> list[DataLink]:
        """Return the links for the nodes."""
        return [item.to_link() for item in self.items]

    def expect_nodes(self, count: int) -> None:
        """Set the number of nodes that will need the data."""
        self._payloads = defaultdict(lambda: push.PayloadCache(BlockRelay(count)))

    def __call__(self, link: NodeLink, progress: PushReport) -> PushProgress:
        """Bring all data that a node lacks to it."""
        files = sent = of = 0
        state = "have"
        for item in self.items:
            if item.tree is not None:
                shared, later = self._payloads[item.tree.digest], push.report_after(of, progress)
                result = push.push_tree_to_node(link, item.tree, store="data", shared=shared, progress=later)
                files, sent, of = (
                    files + result.files_sent, sent + result.bytes_sent, of + result.content_bytes,
                )  # fmt: skip
                state = result.state if state == "have" else state
        return PushProgress(files=files, bytes=sent, of=of, state=state)


def find_data(spec: Spec, *, is_check: bool = False) -> tuple[DataItem, ...]:
    """Find all entries of `job.data`, and read every file whose digest is not known.

    Args:
        spec: the checked spec.
        is_check: whether to find files only: nothing is read, fetched or written, and the items cannot be pushed.

    Raises:
        PlanError: an entry is missing, or cannot be read or fetched.
        UsageError: a URL needs a package that is not installed.
    """
    return tuple(_find_entry(spec, number, entry, is_check=is_check) for number, entry in enumerate(spec.job.data))


def check_places(items: Sequence[DataItem], code: FileTree | None) -> None:
    """Refuse data whose place in the working folder is taken by the code or by other data.

    Args:
        items: the data.
        code: the pushed code; None if no code is pushed.

    Raises:
        PlanError: two entries have the same place.
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


def _find_entry(spec: Spec, number: int, entry: DataEntry, *, is_check: bool) -> DataItem:
    source, where = entry.source, spec.written_at(f"job.data[{number}]")
    if entry.is_on_nodes:
        return DataItem(source, entry.to, None, source.removeprefix(ON_NODE))
    if entry.is_url and is_check:
        return DataItem(source, entry.to, None, source)
    if entry.is_url:
        path = _fetch_data_url(spec, source, where)
    else:
        path = Path(os.path.abspath(spec.base_dir / os.path.expanduser(source)))  # abspath keeps links.
    if not path.exists():
        raise PlanError(
            f"{path} does not exist",
            where=where,
            hint="correct `from`; for a path that only the nodes have, write node:/path",
        )
    if spec.cluster.transport == "local":  # The only node is this machine.
        return DataItem(source, entry.to, None, str(path))
    base = Path(os.path.realpath(spec.base_dir))
    # A downloaded folder may have links to files of this user; the user agreed to files outside of it (trust.py).
    within = base if not entry.is_url and base in Path(os.path.realpath(path)).parents else None
    cache = None if is_check else spec.base_dir / names.STATE_DIR / CACHE_DIR
    tree = scan_data(path, cache, within=within)
    return DataItem(source, entry.to, tree, "" if path.is_dir() else path.name)


def scan_data(path: Path, cache: Path | None, *, within: Path | None = None) -> FileTree:
    """Return a file, or all files of a folder, as a tree.

    Args:
        path: path of the file or folder.
        cache: folder for cached digests; None: files are found but not read, so they have no digests.
        within: folder in which links have to stay.

    Raises:
        PlanError: a file cannot be read or sent.
    """
    root = path if path.is_dir() else path.parent
    found: list[TreeFile] = []
    try:
        with contextlib.ExitStack() as stack:
            digests = None
            if cache is not None:
                cache.mkdir(mode=0o700, parents=True, exist_ok=True)
                memory = cache / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}-data.json"
                digests = stack.enter_context(DigestCache(memory))
            for name, info in _walk_data_files(root) if path.is_dir() else [(os.fsencode(path.name), path.stat())]:
                if within is not None and within not in Path(os.path.realpath(root / os.fsdecode(name))).parents:
                    raise PlanError(
                        "a link in the data leads out of the folder of the spec", where=str(root / os.fsdecode(name)),
                        hint="add the target of the link as an entry of `job.data`",
                    )  # fmt: skip
                digest = ""
                if digests is not None:
                    digest, _ = digests.compute_file_digest(name, os.path.join(os.fsencode(root), name), info)
                found.append(TreeFile(name, 0o600, info.st_size, digest))
    except OSError as exc:
        raise PlanError(f"data cannot be read: {exc.strerror}", where=str(exc.filename or path)) from exc
    found.sort()
    return FileTree(root, tuple(found), compute_tree_digest(found), withheld=(), skipped=())


def _walk_data_files(root: Path) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield every file below a folder, with the `stat` result of its link's target.

    Raises:
        PlanError: there are too many files, or a link leads to a folder.
        OSError: a folder or file cannot be read.
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


def _fetch_data_url(spec: Spec, url: str, where: str) -> Path:
    """Return the folder or file with the contents of a URL, which are fetched at the first call.

    Raises:
        PlanError: the URL cannot be fetched.
        UsageError: the package for this kind of URL is not installed.
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
    except Exception as exc:  # A store may raise any error.
        raise PlanError(f"{url} cannot be fetched: {str(exc) or type(exc).__name__}", where=where) from exc
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
