"""Output about the files of the working tree: those that are pushed, and those that are left out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtctl.cli import output
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.launch.files.excluded_files import UnsentFiles
    from dtctl.launch.files.tree import FileTree, TreeFile
    from dtctl.spec.model import Spec


SHOWN = 5
SHOWN_FOLDERS = 3


def describe_push(spec: Spec, tree: FileTree) -> list[str]:
    """Return lines about the tree that the user should read before the push."""
    lines = [*_describe_withheld(tree), *_describe_not_sent(_folders_not_sent(spec, tree, chosen=False))]
    if tree.is_large:
        lines.append(
            f"{_format_tree_size(tree)} are sent to every node that does not have them; the largest: "
            f"{_describe_largest_files(tree)}; name what the job does not need in .dtctlignore"
        )
    return lines


def _describe_withheld(tree: FileTree) -> list[str]:
    """Return lines about files that are not pushed although no rule excludes them."""
    kinds = (("looks like a secret", tree.withheld), ("neither a file nor a folder", tree.skipped))
    return [f"not pushed, {kind}: {_format_short_list(paths)}" for kind, paths in kinds if paths]


def _folders_not_sent(spec: Spec, tree: FileTree, *, chosen: bool) -> list[UnsentFiles]:
    """Return the folders with files that are left out, the largest first.

    Args:
        spec: the checked spec.
        tree: the scanned working tree.
        chosen: whether to include files that dtctl's own rules exclude.
    """
    if not tree.left_out:
        return []
    from dtctl.launch.files.excluded_files import list_not_sent

    return [each for each in list_not_sent(spec, tree, most=4 * SHOWN_FOLDERS) if chosen or not each.is_chosen]


def _describe_not_sent(folders: Sequence[UnsentFiles]) -> list[str]:
    """Return one line for each of the largest folders, and one for the others."""
    lines = [_not_sent(each) for each in folders[:SHOWN_FOLDERS]]
    if rest := folders[SHOWN_FOLDERS:]:
        total = output.format_size(sum(each.bytes for each in rest))
        others = "1 other folder" if len(rest) == 1 else f"{len(rest)} other folders"
        lines.append(f"not sent: {total} in {others}, such as {rest[0].folder or '.'}")
    return lines


def _not_sent(each: UnsentFiles) -> str:
    """Return `not sent: 3 files, 2.1 MiB in data/x (.gitignore); job.files.include: [data/x/], or job.data`."""
    over = "over " if each.is_partial else ""
    count = f"{over}{format_count(each.files, 'file')}"
    is_one = each.files == 1 and not each.is_whole
    place = f": {each.path}" if is_one else f" in {each.folder or '.'}"
    source = each.rule.partition(" (")[0]
    pattern = f": [{each.path}]" if is_one or each.is_whole else ""
    what = f"{count}, {over}{output.format_size(each.bytes)}{place}"
    return f"not sent: {what} ({source}); job.files.include{pattern}, or job.data"


def show_files(spec: Spec, tree: FileTree) -> None:
    """Print the files that are pushed and those that are not, for the dry run."""
    output.print_stdout(
        f"files: {_format_tree_size(tree)}" + (f"; the largest: {_describe_largest_files(tree)}" if tree.files else "")
    )
    folders = _folders_not_sent(spec, tree, chosen=True)
    for line in _describe_not_sent(folders):
        output.print_stdout(line)
    others = [path for path in tree.left_out if not any(_is_path_covered(each, path) for each in folders)]
    if others:
        rows = [f"{row['path']} by {row['rule']}" for row in _left_out(spec, tree, others)]
        output.print_stdout(f"left out: {_format_short_list(rows, len(others))}")
    for line in _describe_withheld(tree):
        output.print_stdout(line, "yellow")


def _is_path_covered(each: UnsentFiles, path: str) -> bool:
    """Return whether a line about a folder covers a path that is left out."""
    return path == each.path if each.is_whole else path.rpartition("/")[0] == each.folder


def build_tree_json(spec: Spec, tree: FileTree) -> dict[str, Any]:
    """Return the files that are pushed and left out as JSON, for `launch --dry-run --json`."""
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


def _left_out(spec: Spec, tree: FileTree, paths: Sequence[str]) -> list[dict[str, str]]:
    from dtctl.launch.files import exclusion_reason

    root, files = os.fsencode(os.path.realpath(tree.root)), spec.job.files
    return [
        {
            "path": path,
            "rule": exclusion_reason.find_exclusion_reason(
                root, os.fsencode(path), include=files.include, exclude=files.exclude
            ),
        }
        for path in paths[:SHOWN]
    ]


def _by_size(tree: FileTree) -> list[TreeFile]:
    return sorted(tree.files, key=lambda file: -file.size)[:3]


def _describe_largest_files(tree: FileTree) -> str:
    return ", ".join(f"{os.fsdecode(file.path)} ({output.format_size(file.size)})" for file in _by_size(tree))


def _format_tree_size(tree: FileTree) -> str:
    count = len(tree.files)
    return f"{count} file{'' if count == 1 else 's'}, {output.format_size(tree.total_bytes)}"


def _format_short_list(texts: Sequence[str], count: int | None = None) -> str:
    more = (len(texts) if count is None else count) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")
