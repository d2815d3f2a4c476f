"""Facts in log lines other than failures: versions of NCCL, the command line, libraries in native stacks. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dtctl.doctor.explain.lines import LogLine

_VERSIONS = (
    re.compile(r"\b(?P<name>NCCL) version:? (?P<version>\d+\.\d+(?:\.\d+)?)"),
    re.compile(r"\bNCCL_VERSION(?:_CODE)?\s*[:=]?\s*(?P<code>\d{5})\b"),
    re.compile(r"\blib(?P<name>nccl)\.so\.(?P<version>\d+\.\d+\.\d+)"),
    re.compile(r"\bnvidia-(?P<name>nccl)-cu\d+(?:==|\s+)(?P<version>\d+\.\d+\.\d+)"),
)
"""Patterns of the version of NCCL, which must be the same on all ranks."""
_WANTED = re.compile(r"NCCL_SOCKET_IFNAME (?:set (?:by environment )?to|=) ?(?P<name>\S+)")
_USED = re.compile(r"\b(?:Bootstrap ?: Using|NET/Socket ?: Using|Using network) ")
_COMMAND = re.compile(r"--nproc[-_]per[-_]node[= ]+(?P<per_node>\d+)|--nnodes[= ]+(?P<nodes>\d+)(?![:\d])")
_GPUS = re.compile(
    r"device_count\(\) (?:is|returned|=) (?P<said>\d+)|\bnum_gpus\s*[=:]\s*(?P<num>\d+)|"
    r"CUDA_VISIBLE_DEVICES[=: ]+['\"]?(?P<visible>\d+(?:,\d+)*)\b"
)
_NATIVE = re.compile(
    r"(?:^\s*frame #\d+: |^\s*#\d+ +|^\s*\[? ?\d*\]?\s*)\S.*?(?P<library>/[\w./+-]*?\blib[\w+-]+)\.so[\w.]*"
)
_LOCAL = re.compile(
    r"\brank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)|\[default(?P<tee>\d+)\]:\[rank(?P<of>\d+)\]|"
    r"\bRank (?P<spoken>\d+), Local Rank (?P<next>\d+)\b"
)
_OF_THE_SYSTEM = ("libc", "libpthread", "libstdc++", "libpython", "libgcc_s", "libdl", "libm", "ld-linux", "libasan")
MOST = 16


@dataclass(slots=True)
class LogFacts:
    """Facts from all lines together."""

    versions: dict[str, LogLine] = field(default_factory=dict)
    """Version of NCCL -> first line that names this version."""
    per_node: int = 0
    """Workers per node, by the command line; 0 if the logs do not have it."""
    gpus: int = 0
    """GPUs per node in a line; 0 if there is no such line."""
    local_of: dict[int, int] = field(default_factory=dict)
    """Rank -> local rank."""
    native: list[str] = field(default_factory=list)
    """Libraries in native stacks, the innermost first."""

    wanted_interface: str = ""
    """Interfaces that NCCL was set to use, if no process has found any of them."""
    found_interface: bool = False

    def add_log_line(self, line: LogLine) -> None:
        """Record the facts in a line."""
        text = line.text
        if ("NCCL" in text or "nccl" in text) and len(self.versions) < MOST:
            if (wanted := _WANTED.search(text)) is not None:
                self.wanted_interface = wanted["name"]
            self.found_interface = self.found_interface or _USED.search(text) is not None
            for form in _VERSIONS:
                for named in form.finditer(text):
                    self.versions.setdefault(_parse_reported_version(named), line)
        if "ank" in line.raw and (found := _LOCAL.search(line.raw)) is not None:
            rank, local = (
                found["rank"] or found["of"] or found["spoken"],
                found["local"] or found["tee"] or found["next"],
            )
            self.local_of[int(rank)] = int(local)
        if "--n" in text:
            for command in _COMMAND.finditer(text):
                self.per_node = int(command["per_node"] or self.per_node)
        if "device_count" in text or "num_gpus" in text or "CUDA_VISIBLE" in text:
            for gpus in _GPUS.finditer(text):
                visible = gpus["visible"]
                self.gpus = len(visible.split(",")) if visible else int(gpus["said"] or gpus["num"])
        if ".so" in text and (native := _NATIVE.match(text)) is not None and len(self.native) < MOST:
            name = native["library"].rpartition("/")[2]
            if not name.startswith(_OF_THE_SYSTEM):
                self.native.append(name)

    @property
    def conflicting_nccl_versions(self) -> tuple[str, ...]:
        """Return the versions of NCCL, if these logs name several."""
        return tuple(sorted(self.versions)) if len(self.versions) > 1 else ()


def _parse_reported_version(found: re.Match[str]) -> str:
    """Return a version in the form 2.20.5, also for NCCL's number 22005."""
    code = found.groupdict().get("code")
    if code is None:
        return found["version"]
    number = int(code)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
