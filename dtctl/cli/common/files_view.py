"""Output about the files of the working tree: those that are pushed, and those that are not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.launch.files.not_sent import NotSent
    from dtctl.launch.files.tree import Tree, TreeFile
    from dtctl.spec.model import Spec


SHOWN = 5
SHOWN_FOLDERS = 3


def describe_push(spec: Spec, tree: Tree) -> list[str]:
    """Return lines about the tree that the user should know before it is sent."""
    lines = [*_describe_withheld(tree), *_describe_not_sent(_folders_not_sent(spec, tree, chosen=False))]
    if tree.is_large:
        lines.append(
            f"{_amount(tree)} are sent to every node that lacks them, the largest: {_largest(tree)}; "
            "name what the job does not need in .dtctlignore"
        )
    return lines


def _describe_withheld(tree: Tree) -> list[str]:
    """Name the files that are not pushed although they are not excluded."""
    kinds = (("looks like a secret", tree.withheld), ("neither a file nor a folder", tree.skipped))
    return [f"not pushed, {kind}: {_listed(paths)}" for kind, paths in kinds if paths]


def _folders_not_sent(spec: Spec, tree: Tree, *, chosen: bool) -> list[NotSent]:
    """Return the folders with files that are not sent, the largest first.

    Args:
        spec: the checked spec.
        tree: its scanned files.
        chosen: whether rules that were written for dtctl count, too.
    """
    if not tree.left_out:
        return []
    from dtctl.launch.files.not_sent import list_not_sent

    return [each for each in list_not_sent(spec, tree, most=4 * SHOWN_FOLDERS) if chosen or not each.is_chosen]


def _describe_not_sent(folders: Sequence[NotSent]) -> list[str]:
    """Return a line about each of the largest folders, and one about the others."""
    lines = [_not_sent(each) for each in folders[:SHOWN_FOLDERS]]
    if rest := folders[SHOWN_FOLDERS:]:
        total = output.size(sum(each.bytes for each in rest))
        others = "1 other folder" if len(rest) == 1 else f"{len(rest)} other folders"
        lines.append(f"not sent: {total} in {others}, such as {rest[0].folder or '.'}")
    return lines


def _not_sent(each: NotSent) -> str:
    """Return `not sent: 3 files, 2.1 MiB in data/x (.gitignore); job.files.include: [data/x/], or job.data`."""
    over = "over " if each.is_partial else ""
    count = "1 file" if each.files == 1 and not over else f"{over}{each.files:,} files"
    is_one = each.files == 1 and not each.is_whole
    place = f": {each.path}" if is_one else f" in {each.folder or '.'}"
    source = each.rule.partition(" (")[0]
    pattern = f": [{each.path}]" if is_one or each.is_whole else ""
    what = f"{count}, {over}{output.size(each.bytes)}{place}"
    return f"not sent: {what} ({source}); job.files.include{pattern}, or job.data"


def show_files(spec: Spec, tree: Tree) -> None:
    """Print the files that are pushed and those that are not, for the dry run."""
    output.out(f"files: {_amount(tree)}" + (f"; the largest: {_largest(tree)}" if tree.files else ""))
    folders = _folders_not_sent(spec, tree, chosen=True)
    for line in _describe_not_sent(folders):
        output.out(line)
    others = [path for path in tree.left_out if not any(_covers(each, path) for each in folders)]
    if others:
        rows = [f"{row['path']} by {row['rule']}" for row in _left_out(spec, tree, others)]
        output.out(f"left out: {_listed(rows, len(others))}")
    for line in _describe_withheld(tree):
        output.out(line, "yellow")


def _covers(each: NotSent, path: str) -> bool:
    """Return whether a line about a folder covers a path that is left out."""
    return path == each.path if each.is_whole else path.rpartition("/")[0] == each.folder


def as_json(spec: Spec, tree: Tree) -> dict[str, Any]:
    """Return the same for `launch --dry-run --json`."""
    return {
        "count": len(tree.files),
        "bytes": tree.total_bytes,
        "digest": tree.digest,
        "largest": [{"path": os.fsdecode(file.path), "bytes": file.size} for file in _by_size(tree)],
        "left_out": _left_out(spec, tree, tree.left_out),
        "left_out_count": len(tree.left_out),
        "withheld": list(tree.withheld),
        "skipped": list(tree.skipped),
    }


def _left_out(spec: Spec, tree: Tree, paths: Sequence[str]) -> list[dict[str, str]]:
    from dtctl.launch.files import left_out

    root, files = os.fsencode(os.path.realpath(tree.root)), spec.job.files
    return [
        {
            "path": path,
            "rule": left_out.reason(root, os.fsencode(path), include=files.include, exclude=files.exclude),
        }
        for path in paths[:SHOWN]
    ]


def _by_size(tree: Tree) -> list[TreeFile]:
    return sorted(tree.files, key=lambda file: -file.size)[:3]


def _largest(tree: Tree) -> str:
    return ", ".join(f"{os.fsdecode(file.path)} ({output.size(file.size)})" for file in _by_size(tree))


def _amount(tree: Tree) -> str:
    count = len(tree.files)
    return f"{count} file{'' if count == 1 else 's'}, {output.size(tree.total_bytes)}"


def _listed(texts: Sequence[str], count: int | None = None) -> str:
    more = (len(texts) if count is None else count) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")
