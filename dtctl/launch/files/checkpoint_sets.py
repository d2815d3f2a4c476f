"""Checkpoints in the folders of `job.shared`: which files belong together, which are complete, and what nodes lack.

Pure functions over what nodes have listed. A checkpoint is the union of the files that nodes have written for it; of
each file the newest version counts. Nothing here removes a file: what may not be complete when the workers have ended
is set aside, so that all nodes continue from the same one.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from dtctl.supervisor.messages.shared import SharedFile

QUIET_S: Final = 10.0
"""Seconds without a write after which a checkpoint without a marker file counts as complete."""
CLOCKS_S: Final = 5.0
"""Seconds by which the clocks of two nodes, and the moments of their lists, may differ."""
MARKER_BYTES: Final = 4096
"""Bytes of a file that names the newest checkpoint (`latest`); it is written in one piece."""
DCP, HUGGING_FACE = ".metadata", "trainer_state.json"
"""Names of the files that are written last: torch/distributed/checkpoint/filesystem.py (`finish` of the writer), and
transformers/trainer.py (`Trainer._save_checkpoint`)."""
_STEP: Final = re.compile(r"(?:step|iter|iteration|checkpoint|ckpt|epoch|save)[-_=]?\d|^\d+$", re.IGNORECASE)
"""Name of a folder that is one checkpoint: step-20, checkpoint-20, global_step20, iter_0000020, epoch=0-step=2.ckpt."""
_RANK: Final = re.compile(r"[-_.]?rank[-_=]?\d+|[-_]\d+[-_]of[-_]\d+", re.IGNORECASE)
"""Part of a file's name that is the number of its writer, or of its part: optim_000020_rank3.pt."""
_OF_TRAINER: Final = re.compile(r"^(rng_state(_\d+)?\.pth|training_args\.bin|scheduler\.pt|trainer_state\.json)$")
"""Files by which a checkpoint of Hugging Face's Trainer is known."""

Version: TypeAlias = tuple[int, int]
"""Time in ns and size of a file, by which two copies are known to be the same."""
RULE_NAMES: Final = {
    DCP: "by .metadata (DCP)",
    HUGGING_FACE: "by trainer_state.json (Hugging Face)",
    "": f"when no file was written to for {QUIET_S:g} s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """Files that a node has listed."""

    node: str
    store: str
    """Name of its disk."""
    files: Mapping[str, SharedFile]
    """Files by their path in the working folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """Node that no longer answers, as it was listed last."""

    paths: Collection[str]
    listed_s: float
    """Seconds since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The files of one checkpoint, over all nodes."""

    name: str
    """Folder of the checkpoint, or folder and numbers of its files."""
    root: str
    """Shared folder that it lies in."""
    rule: str
    """File that marks it as complete: a name, or a pattern; empty: time alone decides."""
    files: Mapping[str, SharedFile]
    """Newest version of each file, by its path."""
    is_folder: bool

    @property
    def written_s(self) -> float:
        """Return the seconds since something of it was written to."""
        return min(file.age_s for file in self.files.values())

    @property
    def shape(self) -> frozenset[str]:
        """Return the names of its files without the numbers in which checkpoints of one program differ."""
        if self.is_folder:
            last = re.findall(r"\d+", posixpath.basename(self.name))[-1:]
            inner = [path.removeprefix(self.name) for path in self.files]
            return frozenset(
                re.sub(r"\d{2,}", lambda found: "#" if [found[0]] == last else found[0], name) for name in inner
            )
        return frozenset(_without_numbers(posixpath.basename(path)) for path in self.files)

    @property
    def has_known_format(self) -> bool:
        """Return whether it is a checkpoint for certain: a folder, or files with such a format among them."""
        return self.is_folder or any(file.end for file in self.files.values())

    def is_committed(self) -> bool:
        """Return whether the file that is written last is there, and no other one is newer."""
        names = {posixpath.basename(path) for path in self.files}
        if self.rule == HUGGING_FACE and not (f"{self.name}/{HUGGING_FACE}" in self.files and self._has_all_metadata()):
            return False
        if self.rule == DCP:
            return self._has_all_metadata()
        return self.rule == HUGGING_FACE or any(fnmatch.fnmatchcase(name, self.rule) for name in names)

    def _has_all_metadata(self) -> bool:
        for path, file in self.files.items():
            if path.endswith(".distcp"):
                last = self.files.get(f"{posixpath.dirname(path)}/{DCP}")
                if last is None or last.age_s > file.age_s + CLOCKS_S:
                    return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A file that a node lacks."""

    path: str
    source: str
    """Node that has it."""
    file: SharedFile
    origin: str
    """Store of the node that has written it."""
    checkpoint: str
    """Name of the checkpoint that it is of."""


@dataclass(slots=True, kw_only=True)
class CopyPlan:
    """Decision about what is copied, and what is set aside."""

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    """Node -> files that it lacks, in the order in which they get their names."""
    aside: dict[str, list[str]] = field(default_factory=dict)
    """Node -> paths that are set aside there."""
    aside_names: list[str] = field(default_factory=list)
    """Checkpoints that they are of."""
    doubtful: list[str] = field(default_factory=list)
    """Checkpoints that may not be complete, and are taken as they are, as there is no other one."""
    rules: set[tuple[str, str]] = field(default_factory=set)
    """Shared folders, and the rules by which checkpoints in them were found complete."""
    complete: int = 0
    """Number of complete checkpoints."""


def group_files(files: Mapping[str, SharedFile], root: str, pattern: str = "") -> list[CheckpointFiles]:
    """Return the checkpoints in a shared folder.

    Args:
        files: newest version of each file below it, by path.
        root: path of the shared folder.
        pattern: name of the file that is written last, by the spec; empty: none.
    """
    committed = {posixpath.dirname(path) for path in files if posixpath.basename(path) in (DCP, HUGGING_FACE)}
    committed |= {posixpath.dirname(path) for path in files if path.endswith(".distcp")}
    groups: dict[tuple[str, bool], dict[str, SharedFile]] = {}
    for path, file in files.items():
        groups.setdefault(_find_set(path, root, committed), {})[path] = file
    trained = {
        posixpath.dirname(name)
        for (name, is_folder), inner in groups.items()
        if is_folder and any(_OF_TRAINER.match(posixpath.basename(path)) for path in inner)
    }
    found = []
    for (name, is_folder), inner in groups.items():
        rule = pattern
        if any(path.endswith((f"/{DCP}", ".distcp")) for path in inner):
            rule = DCP
        if is_folder and posixpath.dirname(name) in trained:
            rule = HUGGING_FACE
        each = CheckpointFiles(name=name, root=root, rule=rule, files=inner, is_folder=is_folder)
        found.append(replace(each, rule="") if _is_marker(each) else each)
    return found


def _find_set(path: str, root: str, committed: Collection[str]) -> tuple[str, bool]:
    """Return the checkpoint of a file: a folder, or folder and numbers in its name; true if it is a folder."""
    folder = root
    *above, name = path[len(root) :].strip("/").split("/")
    for part in above:
        folder = f"{folder}/{part}"
        if folder in committed or _STEP.search(part):
            return folder, True
    if folder in committed:
        return folder, True
    numbers = re.findall(r"\d+", _RANK.sub("", posixpath.splitext(name)[0]))
    return f"{folder}/{'-'.join(str(int(number)) for number in numbers) or _RANK.sub('', name)}", False


def _without_numbers(name: str) -> str:
    """Return a name with `#` for each number but that of a writer."""
    parts, end = [], 0
    for found in _RANK.finditer(name):
        parts += [re.sub(r"\d+", "#", name[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, re.sub(r"\d+", "#", name[end:])])


def plan_copies(
    nodes: Sequence[NodeFiles],
    roots: Sequence[tuple[str, str]],
    *,
    stopped_s: float | None = None,
    lost: Sequence[LostNode] = (),
) -> CopyPlan:
    """Decide which files are copied to which nodes.

    Args:
        nodes: what nodes have listed.
        roots: shared folders, each with the pattern of the spec.
        stopped_s: seconds since the workers ended; None while they run: then nothing is set aside.
        lost: nodes that have gone.
    """
    plan = CopyPlan()
    files = {node.node: dict(node.files) for node in nodes}
    if stopped_s is not None:
        for root, pattern in roots:
            _set_aside(files, root, pattern, stopped_s, lost, plan)
    restored = {path for paths in plan.aside.values() for path in paths}
    for root, pattern in roots:
        for found in group_files(newest_files(files, root), root, pattern):
            is_taken = found.name in plan.doubtful or _is_trusted(found, stopped_s)
            if is_taken or _is_complete(found, 0.0 if stopped_s is None else stopped_s):
                plan.rules.add((root, found.rule))
                plan.complete += 1
                _add_copies(nodes, files, found, restored, plan)
    return plan


def newest_files(files: Mapping[str, Mapping[str, SharedFile]], root: str) -> dict[str, SharedFile]:
    """Return the newest version of each file below a folder, over all nodes."""
    newest: dict[str, SharedFile] = {}
    for of_node in files.values():
        for path, file in of_node.items():
            known = newest.get(path)
            if path.startswith(f"{root}/") and (known is None or version_of(file) > version_of(known)):
                newest[path] = file
    return newest


def version_of(file: SharedFile) -> Version:
    """Return the fields that identify a version of a file."""
    return file.mtime_ns, file.size


def _is_complete(found: CheckpointFiles, stopped_s: float) -> bool:
    if any(file.end == "cut" for file in found.files.values()):
        return False
    return found.is_committed() if found.rule else found.written_s - stopped_s >= QUIET_S


def _is_trusted(found: CheckpointFiles, stopped_s: float | None) -> bool:
    """Return whether a young checkpoint is complete since its workers have ended, and it has survived `_set_aside`."""
    is_cut = any(file.end == "cut" for file in found.files.values())
    is_checked = found.has_known_format or _is_marker(found)
    return stopped_s is not None and not found.rule and is_checked and not is_cut


def _set_aside(
    files: dict[str, dict[str, SharedFile]],
    root: str,
    pattern: str,
    stopped_s: float,
    lost: Sequence[LostNode],
    plan: CopyPlan,
) -> None:
    """Take files that may be incomplete out of the lists, if there is another checkpoint to continue from."""
    groups = group_files(newest_files(files, root), root, pattern)
    certain = [each for each in groups if _is_certain(each, stopped_s, lost) and _is_complete(each, stopped_s)]
    certain += [each for each in groups if each not in certain and _looks_whole(each, certain, lost)]
    markers = [each for each in groups if each not in certain and _is_marker(each)]
    # Logs lie in such folders, too, and must not be set aside.
    others = [each for each in groups if each not in certain and each not in markers and each.has_known_format]
    taken_out = 0
    for each in others:
        if _take_out_young(files, each, pattern, stopped_s, lost, plan):
            taken_out += 1
        elif any(not _is_marker(other) for other in certain) or _lacks_for_certain(each, others, lost):
            _take_out(files, each, each.files, plan)
            taken_out += 1
        elif not each.rule:
            plan.doubtful.append(each.name)
    for each in markers if taken_out else ():
        _take_out(files, each, each.files, plan, newest_alone=True)


def _is_certain(found: CheckpointFiles, stopped_s: float, lost: Sequence[LostNode]) -> bool:
    """Return whether nothing of it can have gone with a lost node, and it was not being written when workers ended."""
    return not _is_young(found.written_s, stopped_s, lost, is_committed=bool(found.rule)) and not _lacks(found, lost)


def _is_young(age_s: float, stopped_s: float, lost: Sequence[LostNode], *, is_committed: bool) -> bool:
    if any(age_s <= node.listed_s + CLOCKS_S for node in lost):
        return True
    return not is_committed and age_s - stopped_s < QUIET_S


def _lacks(found: CheckpointFiles, lost: Sequence[LostNode]) -> bool:
    """Return whether a lost node had a file of it that no other node has."""
    return any(_is_of(path, found) and path not in found.files for node in lost for path in node.paths)


def _lacks_for_certain(found: CheckpointFiles, others: Sequence[CheckpointFiles], lost: Sequence[LostNode]) -> bool:
    """Return whether files of it are gone with a lost node: they were listed there, or those of one like it were."""
    if _lacks(found, lost):
        return True
    place = posixpath.dirname(found.name), found.is_folder
    for other in others:
        if _lacks(other, lost) and (posixpath.dirname(other.name), other.is_folder) == place:
            file = next(iter(other.files.values()))
            of_lost = [path for node in lost for path in node.paths if _is_of(path, other)]
            if not replace(other, files={**other.files, **dict.fromkeys(of_lost, file)}).shape <= found.shape:
                return True
    return False


def _is_of(path: str, found: CheckpointFiles) -> bool:
    """Return whether a path belongs to a checkpoint."""
    if found.is_folder:
        return path.startswith(f"{found.name}/")
    return path.startswith(f"{found.root}/") and _find_set(path, found.root, ())[0] == found.name


def _looks_whole(found: CheckpointFiles, certain: Sequence[CheckpointFiles], lost: Sequence[LostNode]) -> bool:
    """Return whether a checkpoint from the last seconds has each file whole, and all those that the one before has."""
    if _lacks(found, lost) or any(file.end == "cut" for file in found.files.values()):
        return False
    if found.rule and not found.is_committed():
        return False
    if not found.rule and not all(file.end == "whole" or file.size <= MARKER_BYTES for file in found.files.values()):
        return False
    if not any(file.end for file in found.files.values()) and not found.rule:
        return False
    if not found.is_folder and len(found.files) == 1 and not lost:
        return True
    folder = posixpath.dirname(found.name)
    alike = [each for each in certain if posixpath.dirname(each.name) == folder and each.is_folder == found.is_folder]
    alike = [each for each in alike if not _is_marker(each)]
    if not alike:
        return False
    return min(alike, key=lambda each: each.written_s).shape <= found.shape


def _is_marker(found: CheckpointFiles) -> bool:
    """Return whether it is a file that may name the newest checkpoint, such as `latest`, rather than one."""
    if found.is_folder or len(found.files) != 1:
        return False
    ((path, file),) = found.files.items()
    return file.size <= MARKER_BYTES and not file.end and not re.search(r"\d", posixpath.basename(path))


def _take_out_young(
    files: dict[str, dict[str, SharedFile]],
    found: CheckpointFiles,
    pattern: str,
    stopped_s: float,
    lost: Sequence[LostNode],
    plan: CopyPlan,
) -> bool:
    """Set aside the newest versions alone, if older ones of all files are a complete checkpoint."""
    young = {
        path: file
        for path, file in found.files.items()
        if _is_young(file.age_s, stopped_s, lost, is_committed=bool(found.rule)) or file.end == "cut"
    }
    without = {
        node: {
            path: file
            for path, file in inner.items()
            if path not in young or version_of(file) != version_of(young[path])
        }
        for node, inner in files.items()
    }
    older = [
        each for each in group_files(newest_files(without, found.root), found.root, pattern) if each.name == found.name
    ]
    if not young or not older or older[0].files.keys() != found.files.keys() or not _is_complete(older[0], stopped_s):
        return False
    _take_out(files, found, young, plan, newest_alone=True)
    return True


def _take_out(
    files: dict[str, dict[str, SharedFile]],
    found: CheckpointFiles,
    paths: Mapping[str, SharedFile],
    plan: CopyPlan,
    *,
    newest_alone: bool = False,
) -> None:
    """Take files out of the lists, and note that nodes set them aside."""
    for node, inner in files.items():
        for path, newest in paths.items():
            file = inner.get(path)
            if file is not None and (not newest_alone or version_of(file) == version_of(newest)):
                del inner[path]
                plan.aside.setdefault(node, []).append(path)
    plan.aside_names.append(found.name)


def _add_copies(
    nodes: Sequence[NodeFiles],
    files: Mapping[str, Mapping[str, SharedFile]],
    found: CheckpointFiles,
    restored: Collection[str],
    plan: CopyPlan,
) -> None:
    stores = {node.store: node.node for node in nodes}
    for path, newest in _commit_last(found):
        holders = [
            node
            for node in nodes
            if path in files[node.node] and version_of(files[node.node][path]) == version_of(newest)
        ]
        rows = {node.node: files[node.node][path] for node in holders}
        # The one that has written it; else where its copies come from is known by any of them.
        writer = next((node for node in holders if not rows[node.node].origin), None)
        origin = writer.store if writer is not None else rows[holders[0].node].origin
        is_removed = writer is None and origin in stores and path not in files[stores[origin]]
        if is_removed and path not in restored:
            continue  # its own node has removed it, as programs do that keep the newest alone
        source = writer or holders[0]
        for node in nodes:
            if node.node not in rows:
                copy = Copy(path=path, source=source.node, file=rows[source.node], origin=origin, checkpoint=found.name)
                plan.copies.setdefault(node.node, []).append(copy)


def _commit_last(found: CheckpointFiles) -> Iterator[tuple[str, SharedFile]]:
    """Yield the files of a checkpoint, with the one that marks it as complete at the end."""
    pattern = found.rule or "\0"
    last = [path for path in found.files if fnmatch.fnmatchcase(posixpath.basename(path), pattern)]
    for path in [*sorted(found.files.keys() - {*last}), *last]:
        yield path, found.files[path]


def find_unshared(nodes: Sequence[NodeFiles]) -> dict[str, list[str]]:
    """Return folders with checkpoints that some nodes lack, each with the nodes that have files of them.

    For a job without `job.shared`: what a worker on another node would not find.
    """
    files = {node.node: node.files for node in nodes}
    paths = {path for inner in files.values() for path in inner if "/" in path}
    folders: dict[str, list[str]] = {}
    for root in sorted({path.partition("/")[0] for path in paths}):
        holders = [node for node, inner in files.items() if any(path.startswith(f"{root}/") for path in inner)]
        newest = newest_files(files, root)
        is_everywhere = all(newest.keys() <= inner.keys() for inner in files.values())
        if not is_everywhere:
            folders[root] = holders
    return folders
