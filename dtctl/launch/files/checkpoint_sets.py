"""Checkpoints in the folders of `job.shared`: the files of each, their completeness, and the files that nodes lack.

All functions are pure, over the lists of the nodes. A checkpoint is the union of the files that nodes have written for
it; of each file, the newest version counts. A copy is removed when the node that wrote the file has removed it. Files
that may be incomplete when the workers have ended are set aside, so that all nodes continue from the same checkpoint.
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
"""Seconds by which the clocks of two nodes, and the times of their lists, may differ."""
MARKER_BYTES: Final = 4096
"""Most bytes of a file that names the newest checkpoint (`latest`), which is written in one piece."""
DCP, HUGGING_FACE = ".metadata", "trainer_state.json"
"""Names of the files that are written last: torch/distributed/checkpoint/filesystem.py (`finish` of the writer), and
transformers/trainer.py (`Trainer._save_checkpoint`)."""
_STEP: Final = re.compile(r"(?:step|iter|iteration|checkpoint|ckpt|epoch|save)[-_=]?\d|^\d+$", re.IGNORECASE)
"""Name of a folder that is one checkpoint, such as step-20, global_step20, iter_0000020 or epoch=0-step=2.ckpt."""
_RANK: Final = re.compile(r"[-_.]?rank[-_=]?\d+|[-_]\d+[-_]of[-_]\d+", re.IGNORECASE)
"""Number of the writer, or of a part, in the name of a file, such as `_rank3` in optim_000020_rank3.pt."""
_OF_TRAINER: Final = re.compile(r"^(rng_state(_\d+)?\.pth|training_args\.bin|scheduler\.pt|trainer_state\.json)$")
"""Names of files by which a checkpoint of Hugging Face's Trainer is recognized."""

Version: TypeAlias = tuple[int, int]
"""Time in ns and size in bytes of a file; two copies with equal values count as the same version."""
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
    """Name of the node's disk."""
    files: Mapping[str, SharedFile]
    """Files by their path in the working folder."""
    removed: Collection[str] = ()
    """Files that the node wrote, that were copied to other nodes, and that its programs removed since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """Node that no longer answers, with the files that it listed last."""

    paths: Collection[str]
    listed_s: float
    """Seconds since the node's last list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The files of one checkpoint, over all nodes."""

    name: str
    """Folder of the checkpoint, or folder and numbers of its files."""
    root: str
    """Shared folder of the checkpoint."""
    rule: str
    """Name or pattern of the file that marks the checkpoint as complete; empty: only time decides."""
    files: Mapping[str, SharedFile]
    """Newest version of each file, by path."""
    is_folder: bool

    @property
    def seconds_since_write(self) -> float:
        """Return the seconds since a file of the checkpoint was last written to."""
        return min(file.age_s for file in self.files.values())

    @property
    def shape(self) -> frozenset[str]:
        """Return the names of the files without the numbers in which checkpoints of one program differ."""
        if self.is_folder:
            last = re.findall(r"\d+", posixpath.basename(self.name))[-1:]
            inner = [path.removeprefix(self.name) for path in self.files]
            return frozenset(
                re.sub(r"\d{2,}", lambda found: "#" if [found[0]] == last else found[0], name) for name in inner
            )
        return frozenset(_without_numbers(posixpath.basename(path)) for path in self.files)

    @property
    def has_known_format(self) -> bool:
        """Return whether this is certainly a checkpoint: a folder, or a set with a file in a format of checkpoints."""
        return self.is_folder or any(file.end for file in self.files.values())

    def is_committed(self) -> bool:
        """Return whether the file that is written last is there and, where this can be checked, none is newer."""
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
class MissingFileCopy:
    """A file that a node lacks."""

    path: str
    source: str
    """Node from which the file is copied."""
    file: SharedFile
    origin: str
    """Store of the node that has written it."""
    checkpoint: str
    """Name of the checkpoint that the file belongs to."""


@dataclass(slots=True, kw_only=True)
class CopyPlan:
    """Decision about the files to copy, to remove and to set aside."""

    copies: dict[str, list[MissingFileCopy]] = field(default_factory=dict)
    """Files that each node lacks, in the order in which they are renamed to their final names."""
    removals: dict[str, list[str]] = field(default_factory=dict)
    """Copies that are removed on each node."""
    aside: dict[str, list[str]] = field(default_factory=dict)
    """Paths that are set aside on each node."""
    aside_names: list[str] = field(default_factory=list)
    """Checkpoints that the files in `aside` belong to."""
    doubtful: list[str] = field(default_factory=list)
    """Checkpoints that may be incomplete and are copied as they are, since there is no other one."""
    rules: set[tuple[str, str]] = field(default_factory=set)
    """Shared folders, each with a rule by which checkpoints in it were found complete."""
    complete: int = 0
    """Number of complete checkpoints."""


def group_files(files: Mapping[str, SharedFile], root: str, pattern: str = "") -> list[CheckpointFiles]:
    """Return the checkpoints in a shared folder.

    Args:
        files: newest version of each file below the shared folder, by path.
        root: path of the shared folder.
        pattern: name of the file that is written last, from the spec; empty: none.
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
    """Return the checkpoint of a file (a folder, or a folder and numbers), and whether the checkpoint is a folder."""
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
    """Return a name with `#` in place of each number except the number of a writer."""
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
        nodes: files of the nodes, as listed.
        roots: shared folders, each with the pattern of the spec.
        stopped_s: seconds since the workers ended; None while they run: then nothing is set aside.
        lost: nodes that no longer answer.
    """
    plan = CopyPlan()
    files = {node.node: dict(node.files) for node in nodes}
    _remove_copies(nodes, files, plan)
    if stopped_s is not None:
        for root, pattern in roots:
            _set_aside(files, root, pattern, stopped_s, lost, plan)
    for root, pattern in roots:
        for found in group_files(find_newest_files(files, root), root, pattern):
            is_taken = found.name in plan.doubtful or _is_trusted(found, stopped_s)
            if is_taken or _is_complete(found, 0.0 if stopped_s is None else stopped_s):
                plan.rules.add((root, found.rule))
                plan.complete += 1
                _add_copies(nodes, files, found, plan)
    return plan


def _remove_copies(nodes: Sequence[NodeFiles], files: dict[str, dict[str, SharedFile]], plan: CopyPlan) -> None:
    """Remove copies from the lists whose originals were removed by programs of the node that wrote them."""
    removed_from = {node.store: node.removed for node in nodes}
    for node in nodes:
        gone = [path for path, file in node.files.items() if path in removed_from.get(file.origin, ())]
        for path in gone:
            del files[node.node][path]
        if gone:
            plan.removals[node.node] = gone


def find_newest_files(files: Mapping[str, Mapping[str, SharedFile]], root: str) -> dict[str, SharedFile]:
    """Return the newest version of each file below a folder, over all nodes."""
    newest: dict[str, SharedFile] = {}
    for of_node in files.values():
        for path, file in of_node.items():
            known = newest.get(path)
            if path.startswith(f"{root}/") and (
                known is None or identify_file_version(file) > identify_file_version(known)
            ):
                newest[path] = file
    return newest


def identify_file_version(file: SharedFile) -> Version:
    """Return the fields that identify a version of a file."""
    return file.mtime_ns, file.size


def _is_complete(found: CheckpointFiles, stopped_s: float) -> bool:
    if any(file.end == "cut" for file in found.files.values()):
        return False
    return found.is_committed() if found.rule else found.seconds_since_write - stopped_s >= QUIET_S


def _is_trusted(found: CheckpointFiles, stopped_s: float | None) -> bool:
    """Return whether a young checkpoint counts as complete: its workers have ended, and `_set_aside` has kept it."""
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
    """Remove files that may be incomplete from the lists, if there is another checkpoint to continue from."""
    groups = group_files(find_newest_files(files, root), root, pattern)
    certain = [each for each in groups if _is_certain(each, stopped_s, lost) and _is_complete(each, stopped_s)]
    young = [each for each in groups if each not in certain]
    certain += [each for each in young if _looks_whole(each, certain, lost)]
    doubtful = [each for each in young if each not in certain]
    markers = [each for each in doubtful if _is_marker(each)]
    # Such folders contain logs, too, which must not be set aside.
    others = [each for each in doubtful if each.has_known_format and each not in markers]
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
    """Return whether no file can be lost with a node, and none was being written when the workers ended."""
    return not _is_young(
        found.seconds_since_write, stopped_s, lost, is_committed=bool(found.rule)
    ) and not _has_lost_files(found, lost)


def _is_young(age_s: float, stopped_s: float, lost: Sequence[LostNode], *, is_committed: bool) -> bool:
    if any(age_s <= node.listed_s + CLOCKS_S for node in lost):
        return True
    return not is_committed and age_s - stopped_s < QUIET_S


def _has_lost_files(found: CheckpointFiles, lost: Sequence[LostNode]) -> bool:
    """Return whether a lost node had a file of the checkpoint that no other node has."""
    return any(_is_of(path, found) and path not in found.files for node in lost for path in node.paths)


def _lacks_for_certain(found: CheckpointFiles, others: Sequence[CheckpointFiles], lost: Sequence[LostNode]) -> bool:
    """Return whether files are lost with a node: the node had listed them, or a similar checkpoint has more files."""
    if _has_lost_files(found, lost):
        return True
    alike = [other for other in others if _has_same_place(other, found)]
    if lost and any(found.shape < other.shape for other in alike):
        return True
    lost_paths = [path for node in lost for path in node.paths]
    for other in alike:
        if not _has_lost_files(other, lost):
            continue
        some_file = next(iter(other.files.values()))
        lost_files = {path: some_file for path in lost_paths if _is_of(path, other)}
        if not replace(other, files={**other.files, **lost_files}).shape <= found.shape:
            return True
    return False


def _is_of(path: str, found: CheckpointFiles) -> bool:
    """Return whether a path belongs to a checkpoint."""
    if found.is_folder:
        return path.startswith(f"{found.name}/")
    return path.startswith(f"{found.root}/") and _find_set(path, found.root, ())[0] == found.name


def _looks_whole(found: CheckpointFiles, certain: Sequence[CheckpointFiles], lost: Sequence[LostNode]) -> bool:
    """Return whether a checkpoint from the last seconds has only whole files, and all that the previous one has."""
    files = found.files.values()
    if _has_lost_files(found, lost) or any(file.end == "cut" for file in files):
        return False
    if found.rule:
        if not found.is_committed():
            return False
    else:
        has_known_end = any(file.end for file in files)
        if not has_known_end or not all(file.end == "whole" or file.size <= MARKER_BYTES for file in files):
            return False
    is_single_file = not found.is_folder and len(files) == 1
    if is_single_file and not lost:
        return True
    alike = [each for each in certain if _has_same_place(each, found) and not _is_marker(each)]
    if not alike:
        return False
    newest = min(alike, key=lambda each: each.seconds_since_write)
    return newest.shape <= found.shape


def _has_same_place(one: CheckpointFiles, other: CheckpointFiles) -> bool:
    """Return whether two checkpoints are of the same kind and in the same folder."""
    return one.is_folder == other.is_folder and posixpath.dirname(one.name) == posixpath.dirname(other.name)


def _is_marker(found: CheckpointFiles) -> bool:
    """Return whether a set is not a checkpoint but a single file that may name the newest one, such as `latest`."""
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
    """Set aside only the newest versions, if older versions of all files are a complete checkpoint."""
    young = {
        path: file
        for path, file in found.files.items()
        if _is_young(file.age_s, stopped_s, lost, is_committed=bool(found.rule)) or file.end == "cut"
    }
    without = {
        node: {
            path: file
            for path, file in inner.items()
            if path not in young or identify_file_version(file) != identify_file_version(young[path])
        }
        for node, inner in files.items()
    }
    older = [
        each
        for each in group_files(find_newest_files(without, found.root), found.root, pattern)
        if each.name == found.name
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
    """Remove files from the lists, and plan that nodes set them aside."""
    for node, inner in files.items():
        for path, newest in paths.items():
            file = inner.get(path)
            if file is not None and (not newest_alone or identify_file_version(file) == identify_file_version(newest)):
                del inner[path]
                plan.aside.setdefault(node, []).append(path)
    plan.aside_names.append(found.name)


def _add_copies(
    nodes: Sequence[NodeFiles],
    files: Mapping[str, Mapping[str, SharedFile]],
    found: CheckpointFiles,
    plan: CopyPlan,
) -> None:
    taking = [node for node in nodes if not _is_removed_from(node, files[node.node], found)]
    for path, newest in _commit_last(found):
        holders = [
            node
            for node in nodes
            if path in files[node.node]
            and identify_file_version(files[node.node][path]) == identify_file_version(newest)
        ]
        rows = {node.node: files[node.node][path] for node in holders}
        # The origin is the node that wrote the file; if it is gone, each copy names the origin.
        writer = next((node for node in holders if not rows[node.node].origin), None)
        origin = writer.store if writer is not None else rows[holders[0].node].origin
        source = writer or holders[0]
        for node in taking:
            if node.node not in rows:
                copy = MissingFileCopy(
                    path=path, source=source.node, file=rows[source.node], origin=origin, checkpoint=found.name
                )
                plan.copies.setdefault(node.node, []).append(copy)


def _is_removed_from(node: NodeFiles, files: Mapping[str, SharedFile], found: CheckpointFiles) -> bool:
    """Return whether the programs of a node removed all files that they wrote of a checkpoint that is partly left."""
    if not any(_is_of(path, found) and path not in found.files for path in node.removed):
        return False
    return not any(path in files and not files[path].origin for path in found.files)


def _commit_last(found: CheckpointFiles) -> Iterator[tuple[str, SharedFile]]:
    """Yield the files of a checkpoint; the file that marks it as complete comes last."""
    pattern = found.rule or "\0"
    last = [path for path in found.files if fnmatch.fnmatchcase(posixpath.basename(path), pattern)]
    for path in [*sorted(found.files.keys() - {*last}), *last]:
        yield path, found.files[path]


def find_unshared(nodes: Sequence[NodeFiles]) -> dict[str, list[str]]:
    """Return the top folders (with a slash) and files that some nodes lack, each with the nodes that have a part.

    Without `job.shared`, a worker on another node would not find these files.
    """
    places: dict[str, dict[str, set[str]]] = {}
    for node in nodes:
        for path in node.files:
            top, slash, _ = path.partition("/")
            places.setdefault(top + slash, {}).setdefault(node.node, set()).add(path)
    return {
        place: [*holders]
        for place, holders in sorted(places.items())
        if any(holders.get(node.node) != set[str]().union(*holders.values()) for node in nodes)
    }
