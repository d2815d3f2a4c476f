"""Checks of single nodes: reach, limits, storage; and what differs between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtctl.doctor.findings import Finding, Status, odd_ones
from dtctl.doctor.node_report import NodeReport
from dtctl.errors import AuthError, DtctlError, HostKeyError, NodeError
from dtctl.supervisor.frames import BrokenFrame

MIB = 1 << 20
MIN_NOFILE = 1024
MIN_SHM = 64 * MIB
MIN_DISK = 64 * MIB
LOW_DISK = 1024 * MIB
MIN_INODES = 1000
MIN_MEMLOCK = 64 * MIB
CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 300.0
"""munge, Slurm's authentication, refuses credentials older than this."""
RAN_REACH = ("reach", "host-key", "login", "python", "shell-output")
RAN = ("clock", "workdir", "disk", "nofile", "memlock", "shm", "python-version", "torch", "nccl", "architecture",
       "code", "path")  # fmt: skip


def reach(seen: Sequence[NodeReport]) -> Iterator[Finding]:
    """Nodes that could not be asked, one finding for each reason."""
    for node in seen:
        if node.error is not None:
            yield Finding(
                check=_reach_check(node.error),
                status="fail",
                nodes=(node.name,),
                summary=f"{node.name}: {node.error.message}",
                fix=node.error.hint or f"try `ssh {node.name} true`",
                evidence=(f"{type(node.error).__name__}: {node.error.message}",),
            )


def _reach_check(error: DtctlError) -> str:
    if isinstance(error, HostKeyError):
        return "host-key"
    if isinstance(error, AuthError):
        return "login"
    if isinstance(error, NodeError):
        return "shell-output" if isinstance(error.__cause__, BrokenFrame) else "python"
    return "reach"


def per_node(
    check: str, said: Mapping[str, str], fix: str, *, summary: str, status: Status = "fail"
) -> Iterator[Finding]:
    """One finding for all nodes that have the same trouble."""
    if said:
        evidence = tuple(f"{node}: {text}" for node, text in said.items())
        where = ", ".join(said)
        yield Finding(
            check=check, status=status, nodes=tuple(said), summary=f"{where}: {summary}", fix=fix, evidence=evidence
        )


def limits(seen: Sequence[NodeReport]) -> Iterator[Finding]:
    """Limits of a process started over the link, which is what workers get."""
    nofile = {n.name: n.facts["limits"]["nofile"] for n in seen}
    low = {name: f"soft {soft}, hard {hard}" for name, (soft, hard) in nofile.items() if 0 <= soft < MIN_NOFILE}
    yield from per_node(
        "nofile",
        low,
        "add `ulimit -n $(ulimit -Hn)` to job.setup, or raise nofile in /etc/security/limits.conf and restart sshd",
        summary="too few files may be open; NCCL and gloo need some per peer",
    )
    memlock = {n.name: n.facts["limits"]["memlock"] for n in seen if n.facts["rdma"]}
    yield from per_node(
        "memlock",
        {name: f"soft {soft} bytes" for name, (soft, _) in memlock.items() if 0 <= soft < MIN_MEMLOCK},
        "set `* - memlock unlimited` in /etc/security/limits.conf and restart sshd (or slurmd)",
        summary="RDMA may not lock enough memory",
    )
    shm = {n.name: n.facts["shm"] for n in seen if n.facts["shm"]["total"]}
    yield from per_node(
        "shm",
        {
            name: f"{space['total'] // MIB} MiB, {space['free'] // MIB} MiB free"
            for name, space in shm.items()
            if space["total"] <= MIN_SHM or space["free"] < MIN_SHM // 4
        },
        "mount -o remount,size=50% /dev/shm; in a container --shm-size=16g or --ipc=host",
        summary="shared memory (/dev/shm) is too small for NCCL and data loader workers",
    )


def storage(seen: Sequence[NodeReport], workdir: str) -> Iterator[Finding]:
    """Whether each node has room and the right to write, and the files that the job needs."""
    disks = {n.name: n.facts["disk"] for n in seen}
    full = {n: d for n, d in disks.items() if d["free"] < MIN_DISK or (d["inodes"] and d["free_inodes"] < MIN_INODES)}
    low = {n: d for n, d in disks.items() if n not in full and d["free"] < LOW_DISK}
    fix = f"free some space (`df -h {workdir}; df -i {workdir}`), or set cluster.workdir to another disk"
    yield from per_node("disk", _spaces(full), fix, summary=f"the disk of {workdir} is full")
    yield from per_node("disk", _spaces(low), fix, summary=f"the disk of {workdir} is nearly full", status="warn")
    yield from per_node(
        "workdir",
        {n.name: n.facts["writable"] for n in seen if n.facts["writable"]},
        "set cluster.workdir to a folder that the login user may write to",
        summary=f"{workdir} cannot be written to",
    )
    yield from per_node(
        "path",
        {n.name: ", ".join(n.facts["missing"]) for n in seen if n.facts["missing"]},
        "bring it to the same path on these nodes (rsync -a), or put it on a shared file system",
        summary="a path that the job needs does not exist: "
        + ", ".join(sorted({path for n in seen for path in n.facts["missing"]})),
    )


def _spaces(disks: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        name: f"{disk['path']}: {disk['free'] // MIB} MiB and {disk['free_inodes']} inodes free"
        for name, disk in disks.items()
    }


def alike(seen: Sequence[NodeReport]) -> Iterator[Finding]:
    """Software that has to be the same everywhere; the odd node out is named."""
    job = {n.name: n.facts["job"] for n in seen}
    yield from differ(
        "python-version",
        {n: ".".join(said["python"].split(".")[:2]) for n, said in job.items() if said},
        "install the same minor version everywhere, or set cluster.python to one path that has it",
        what="Python",
    )
    torch = {
        n: f"{said['torch']} (CUDA {said['cuda']})" if said["torch"] else "none" for n, said in job.items() if said
    }
    yield from differ("torch", torch, "pip install torch==VERSION, the same on every node", what="torch")
    nccl = {n: said.get("nccl") or "none" for n, said in job.items() if said}
    yield from differ(
        "nccl", nccl, "pip install --force-reinstall torch==VERSION, the same on every node", what="NCCL's wheel"
    )
    machine = {n.name: n.facts["machine"] for n in seen}
    yield from differ("architecture", machine, "train on nodes of one kind", what="processor architecture")
    code = {n.name: n.facts["code"] for n in seen}
    yield from differ(
        "code", code, "bring the same code to every node: rsync -a, or job.files.push: true", what="code of the job"
    )


def differ(check: str, values: Mapping[str, str], fix: str, *, what: str, status: Status = "fail") -> Iterator[Finding]:
    """One finding when nodes differ in what has to be alike; the odd ones are named."""
    odd, usual = odd_ones(values)
    if odd:
        told = f"; the others have {usual}" if usual is not None else ""
        said = ", ".join(f"{node} has {values[node] or 'none'}" for node in odd)
        evidence = tuple(f"{node}: {value or 'none'}" for node, value in values.items())
        summary = f"{what} differs between nodes: {said}{told}"
        yield Finding(check=check, status=status, nodes=odd, summary=summary, fix=fix, evidence=evidence)


def clock(seen: Sequence[NodeReport]) -> Iterator[Finding]:
    """Clocks that are off by more than the way there and back explains."""
    off = {n.name: n.offset_s for n in seen if abs(n.offset_s) - n.offset_error_s > CLOCK_WARN_S}
    worst = max((abs(offset) for offset in off.values()), default=0.0)
    yield from per_node(
        "clock",
        {name: f"{offset:+.1f} s against this machine" for name, offset in off.items()},
        "sudo timedatectl set-ntp true (or systemctl restart chrony)",
        summary="the clock is off; logs cannot be merged, and munge, Kerberos and TLS may refuse",
        status="fail" if worst > CLOCK_FAIL_S else "warn",
    )
