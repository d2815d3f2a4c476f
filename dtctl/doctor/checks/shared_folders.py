"""Checks of folders that a job needs on all nodes: if they are one folder, and how fast other nodes see a new file."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

from dtctl.doctor.findings import Finding
from dtctl.doctor.node_probes import NodeProbes
from dtctl.doctor.node_report import NodeReport
from dtctl.supervisor.messages.probe import FindMarks, RemoveMarks, WriteMarks

RAN = ("shared", "visibility")
LIMIT_S = 12.0
LATE_S = 1.0
Sights = dict[tuple[str, str, str], float | None]
"""(folder, reading node, writing node) -> seconds until the reader saw the writer's file; None if it never did."""


def measure_folder_sharing(probes: NodeProbes, reports: Sequence[NodeReport], folders: Sequence[str]) -> Sights:
    """Let each node write a file into each folder and look for the other nodes' files; all files are removed.

    Folders that fewer than two nodes can write to are skipped.
    """
    names = [node.name for node in reports if node.error is None]
    token = secrets.token_hex(6)
    sights: Sights = {}
    place = {name: WriteMarks(token=token, node=name, folders=list(folders)) for name in names}
    placed = probes.send_requests(place, limit_s=LIMIT_S, doing="writing to the job's folders")
    wanted = {
        name: [
            (folder, other)
            for folder in folders
            for other in placed
            if other != name and folder in placed[other]["folders"]
        ]
        for name in placed
    }
    try:
        messages = {name: FindMarks(wanted=ways) for name, ways in wanted.items() if ways}
        for name, answer in probes.send_requests(
            messages, limit_s=LIMIT_S, doing="looking into the job's folders"
        ).items():
            for (folder, other), after_s in zip(wanted[name], answer["seen"], strict=True):
                sights[folder, name, other] = after_s
    finally:
        probes.send_requests({name: RemoveMarks() for name in placed}, limit_s=LIMIT_S, doing="removing marks")
    return sights


def check_shared_folders(sights: Sights) -> Iterator[Finding]:
    """Yield findings about folders that only some nodes share, and about files that appear late. Pure."""
    for folder in dict.fromkeys(folder for folder, _, _ in sights):
        here = {(who, whose): after_s for (where, who, whose), after_s in sights.items() if where == folder}
        yield from _check_sharing(folder, here)
        yield from _check_visibility(folder, here)


def _check_sharing(folder: str, here: Mapping[tuple[str, str], float | None]) -> Iterator[Finding]:
    """Yield a finding if some nodes share a folder and others do not.

    Args:
        folder: path of the folder.
        here: (node, another node) -> seconds until the first one saw the other's file there; None: it did not.
    """
    names = dict.fromkeys(name for pair in here for name in pair)
    sharing = {name for pair, after_s in here.items() if after_s is not None for name in pair}
    apart = [name for name in names if name not in sharing]
    if not apart or not sharing:
        return
    together, without = ", ".join(name for name in names if name in sharing), ", ".join(apart)
    yield Finding(
        check="shared",
        status="fail",
        nodes=tuple(apart),
        peers=tuple(name for name in names if name in sharing),
        summary=f"{folder} is one folder for {together}, and another one on {without}",
        fix=f"mount the shared file system on {without}: compare `findmnt -T {folder}` with others",
        evidence=tuple(f"{name} sees no other node's file in {folder}" for name in apart),
    )


def _check_visibility(folder: str, here: Mapping[tuple[str, str], float | None]) -> Iterator[Finding]:
    """Yield a finding if a node sees the files of another one late; for `here` see `_check_sharing`."""
    late = {pair: after_s for pair, after_s in here.items() if after_s is not None and after_s > LATE_S}
    if not late:
        return
    yield Finding(
        check="visibility",
        status="warn",
        nodes=tuple(dict.fromkeys(who for who, _ in late)),
        summary=f"other nodes see files in {folder} only after up to {max(late.values()):.1f} s",
        fix="mount it with less attribute caching (NFS: actimeo=1 or noac), or keep snapshots on local disks",
        evidence=tuple(
            f"{who} saw the file of {whose} after {after_s:.1f} s" for (who, whose), after_s in late.items()
        ),
    )
