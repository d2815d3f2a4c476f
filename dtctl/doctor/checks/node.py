"""Checks of single nodes: reachability, limits, storage; and comparison of the nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtctl.doctor.findings import Finding, Status, find_odd_nodes
from dtctl.doctor.node_report import NodeReport
from dtctl.errors import AuthError, ConnectError, DtctlError, HostKeyError, NodeError
from dtctl.printable import format_count
from dtctl.supervisor.frames import BrokenFrame
from dtctl.supervisor.probe.places import WRITTEN, WRITTEN_ENDS

MIB = 1 << 20
MIN_NOFILE = 1024
MIN_SHM = 64 * MIB
MIN_DISK = 64 * MIB
LOW_DISK = 1024 * MIB
MIN_INODES = 1000
MIN_MEMLOCK = 64 * MIB
CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 300.0
"""Largest difference of clocks in seconds: munge, Slurm's authentication, refuses older credentials."""
RAN_REACH = ("reach", "host-key", "login", "start-up", "python", "shell-output", "slow-login")
RAN = ("clock", "workdir", "disk", "tmpdir", "nofile", "processes", "memory", "limits", "memlock", "shm", "cpus",
       "python-environment", "shadowing", "python-version", "torch", "nccl", "architecture", "code", "path", "cache",
       "file-variable")  # fmt: skip
GIB = 1 << 30
WORKER_BYTES = 300 * MIB
"""Memory of a worker that has only imported torch, in bytes."""
COMFORT_BYTES = GIB
MIN_PIDS, WORKER_PIDS = 64, 16
MIN_ADDRESS_SPACE = 16 * GIB
MIN_FILE = GIB
MIN_CPU_S = 24 * 3600
TMP_FULL, TMP_LOW = 16 * MIB, 256 * MIB
FEW_WORKERS_PER_CORE = 4
"""Workers per core above which their Python code slows each other down, however fast the GPUs are."""
LATE_LOGIN_S = 2.5


def check_reachability(reports: Sequence[NodeReport], neighbours: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Yield findings about nodes that did not answer, one for each reason, and about slow logins.

    Args:
        reports: the nodes.
        neighbours: address -> MAC address, from this machine's neighbour table.
    """
    twins = _find_mac_conflict(reports, neighbours or {})
    if twins:
        yield twins
    for node in reports:
        if node.error is not None:
            check = _reach_check(node.error)
            yield _check_program_start(node) or Finding(
                check=check,
                status="fail",
                nodes=(node.name,),
                summary=f"{getattr(node.error, 'node', None) or node.name}: {node.error.message}",
                fix=_fix_of(check, node),
                evidence=(f"{type(node.error).__name__}: {node.error.message}",),
            )
    quick = [min(node.login_s) for node in reports if node.login_s and node.error is None]
    if len(quick) > 1:
        usual = sorted(quick)[(len(quick) - 1) // 2]
        yield from _slow_python(reports, usual)
        late = {
            node.name: min(node.login_s)
            for node in reports
            if node.error is None and len(node.login_s) > 1 and min(node.login_s) > max(LATE_LOGIN_S, 4 * usual)
        }
        yield from build_shared_finding(
            "slow-login",
            {
                name: f"{took_s:.1f} s until a command runs; on the other nodes {usual:.1f} s"
                for name, took_s in late.items()
            },
            "check the start-up files of the shell there (time bash -ic true; ~/.bashrc, /etc/profile.d): "
            "return at once unless interactive: case $- in *i*) ;; *) return;; esac",
            summary="the login is slow, and so is every command on this node",
            status="warn",
        )


def _slow_python(reports: Sequence[NodeReport], usual: float) -> Iterator[Finding]:
    """Yield a finding about nodes with a fast shell whose Python starts slowly every time."""
    late = {
        node.name: min(node.python_s)
        for node in reports
        if node.error is None and node.python_s and min(node.python_s) > max(LATE_LOGIN_S, 4 * usual)
        and node.login_s[-1] < min(node.python_s) / 2
    }  # fmt: skip
    yield from build_shared_finding(
        "slow-login",
        {name: f"{took_s:.1f} s until Python runs; on the other nodes {usual:.1f} s" for name, took_s in late.items()},
        "is the Python of cluster.python a wrapper that waits, or on a slow file system? try `time PYTHON -c pass` "
        "there; modules that a .pth file or sitecustomize imports add to this time, too (PYTHON -X importtime -c pass)",
        summary="Python starts slowly, and so does every worker",
        status="warn",
    )


def _find_mac_conflict(reports: Sequence[NodeReport], neighbours: Mapping[str, str]) -> Finding | None:
    """Return a finding if a node that does not answer has the MAC address of another one in this machine's table."""
    lost = [node for node in reports if isinstance(node.error, ConnectError)]
    cards = {node.name: neighbours.get(node.target) for node in reports}
    for node in lost:
        same = [other for other, card in cards.items() if card and card == cards[node.name]]
        if len(same) > 1:
            return Finding(
                check="duplicate-mac",
                status="fail",
                nodes=tuple(same),
                summary=f"{', '.join(same)} have one hardware address, {cards[node.name]}, and {node.name} does not "
                "answer: switches send packets to either of them",
                fix="give a cloned machine a MAC of its own, at its console or in the settings of the virtual "
                "machine: sudo ip link set dev INTERFACE address 02:...; then restart it",
                evidence=tuple(f"{other}: {cards[other]}" for other in same),
            )
    return None


def _fix_of(check: str, node: NodeReport) -> str:
    error = node.error
    hint = (error.hint if error else None) or f"try `ssh -o BatchMode=yes {node.name} true`"
    if check == "python" and "3.8" not in hint:
        return f"{hint}; it has to be Python 3.8 or newer (cluster.python)"
    return _login_fix(error) if check == "login" and error else hint


def _login_fix(error: DtctlError) -> str:
    """Return the next step if the server refuses the login; only the server's own log has the reason."""
    return (
        f"{error.hint or 'try another key'}; the server's log has the reason (sudo journalctl -u ssh -n 20): a key "
        "that is not in ~/.ssh/authorized_keys, AllowUsers, AllowGroups or PermitRootLogin of sshd (sudo sshd -T), or "
        "a login shell that is not there (getent passwd USER; sudo chsh -s /bin/bash USER)"
    )


def _reach_check(error: DtctlError) -> str:
    if isinstance(error, HostKeyError):
        return "host-key"
    if isinstance(error, AuthError):
        return "login"
    if isinstance(error, NodeError):
        return "shell-output" if isinstance(error.__cause__, BrokenFrame) else "python"
    return "reach"


def _check_program_start(node: NodeReport) -> Finding | None:
    """Return a finding if programs cannot be started after a successful login, by the result of a plain `echo`."""
    shell, error = node.shell, node.error
    if shell is None or error is None:
        return None
    check, fix = "", ""
    guard = "put `case $- in *i*) ;; *) return;; esac` at the top of ~/.bashrc (and of what /etc/profile.d has): only "
    if shell.refused:
        check, what = "login", "a login is accepted, but no session can be opened"
        fix = "sudo sshd -T | grep -i maxsessions: MaxSessions in /etc/ssh/sshd_config has to allow some, then sudo "
        fix += "systemctl reload ssh; also look at what the account may do (command=, restrict in authorized_keys)"
    elif not shell.answered:
        check, what = "start-up", "a login is accepted, but not even `echo` answers"
        fix = (
            guard
            + "interactive shells may wait or ask; look with ssh -t at what hangs; also at ForceCommand and command="
        )
    elif not shell.has_run and shell.other:
        check, what = "login", f"the account runs another command than the requested one: {shell.other!r}"
        fix = (
            "look for ForceCommand (sudo sshd -T | grep -i forcecommand) and command= in ~/.ssh/authorized_keys, "
            "and at "
        )
        fix += "the login shell (getent passwd USER); sudo chsh -s /bin/bash USER"
    elif not shell.has_run:
        check, what = "start-up", f"the login shell ends with status {shell.status} before it runs a command"
        what += f": {shell.complaint}" if shell.complaint else ""
        fix = guard + "interactive shells may `exit` or `exec`; or it is no shell: getent passwd USER; sudo chsh -s "
        fix += "/bin/bash USER"
    elif shell.other and isinstance(error.__cause__, BrokenFrame):
        check, what = "shell-output", f"a start-up file prints {shell.other!r} into the output of every command"
        fix = guard + "interactive shells may print; or print to standard error (>&2)"
    elif isinstance(error, ConnectError) and "no answer" in error.message:
        check, what = "python", "the login shell answers, but Python does not"
        fix = "try the Python of cluster.python there: is it a wrapper, or on a file system that hangs?"
    if not check:
        return None
    return Finding(
        check=check,
        status="fail",
        nodes=(node.name,),
        summary=f"{node.name}: {what}",
        fix=f"on {node.name}: {fix}",
        evidence=(f"{type(error).__name__}: {error.message}",),
    )


def build_shared_finding(
    check: str, said: Mapping[str, str], fix: str, *, summary: str, status: Status = "fail"
) -> Iterator[Finding]:
    """Yield one finding for all nodes that have the same problem."""
    if said:
        evidence = tuple(f"{node}: {text}" for node, text in said.items())
        where = ", ".join(said)
        yield Finding(
            check=check, status=status, nodes=tuple(said), summary=f"{where}: {summary}", fix=fix, evidence=evidence
        )


def check_process_limits(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about the limits of a process that is started over SSH, which apply to workers."""
    nofile = {n.name: n.facts["limits"]["nofile"] for n in reports}
    low = {name: f"soft {soft}, hard {hard}" for name, (soft, hard) in nofile.items() if 0 <= soft < MIN_NOFILE}
    yield from build_shared_finding(
        "nofile",
        low,
        "add `ulimit -n $(ulimit -Hn)` to job.setup, or raise nofile in /etc/security/limits.conf and restart sshd",
        summary="the limit of open files is too low; NCCL and gloo need some per peer",
    )
    memlock = {n.name: n.facts["limits"]["memlock"] for n in reports if n.facts["rdma"]}
    yield from build_shared_finding(
        "memlock",
        {name: f"soft {soft} bytes" for name, (soft, _) in memlock.items() if 0 <= soft < MIN_MEMLOCK},
        "set `* - memlock unlimited` in /etc/security/limits.conf and restart sshd (or slurmd)",
        summary="the limit of locked memory is too low for RDMA",
    )
    yield from _check_worker_resources(reports)
    shm = {n.name: n.facts["shm"] for n in reports if n.facts["shm"]["total"]}
    small = {name: one for name, one in shm.items() if one["total"] <= MIN_SHM}
    full = {
        name: one
        for name, one in shm.items()
        if name not in small and one["free"] < max(MIN_SHM // 4, one["total"] // 100)
    }
    yield from build_shared_finding(
        "shm",
        {name: f"{one['total'] // MIB} MiB, {one['free'] // MIB} MiB free" for name, one in small.items()},
        "sudo mount -o remount,size=50% /dev/shm; in a container --shm-size=16g or --ipc=host",
        summary="shared memory (/dev/shm) is too small for NCCL and data loader workers",
    )
    yield from build_shared_finding(
        "shm",
        {name: f"{one['free'] // MIB} of {one['total'] // MIB} MiB free" for name, one in full.items()},
        "see which files fill it and which processes use them: ls -la /dev/shm; sudo fuser -v /dev/shm/*; remove "
        "what ended jobs have left: rm /dev/shm/nccl-* /dev/shm/torch_*",
        summary="shared memory (/dev/shm) is full",
    )
    yield from build_shared_finding(
        "shm",
        {n.name: n.facts["shm"]["why"] for n in reports if n.facts["shm"]["why"] and n.name not in {**small, **full}},
        "sudo mount -o remount,rw /dev/shm, or sudo mount -t tmpfs -o mode=1777,size=50% tmpfs /dev/shm",
        summary="nothing can be written to shared memory (/dev/shm)",
    )


def _check_worker_resources(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about cores and memory that control groups and limits leave to the workers."""
    free = {n.name: _compute_worker_memory(n) for n in reports}
    short = {n.name for n in reports if 0 <= free[n.name] < WORKER_BYTES * n.slots}
    tight = {n.name for n in reports if n.name not in short and 0 <= free[n.name] < COMFORT_BYTES * n.slots}
    for status, names in (("fail", short), ("warn", tight)):
        yield from build_shared_finding(
            "memory",
            {
                n.name: f"{free[n.name] // MIB} MiB for {format_count(n.slots, 'worker')}"
                for n in reports
                if n.name in names
            },
            "raise the memory limit of the control group: --mem of Slurm, MemoryMax= of the systemd slice, --memory "
            "of the container (cat /proc/self/cgroup; memory.max); or end what takes the memory: free -g",
            summary="a process of this login can use little memory",
            status="fail" if status == "fail" else "warn",
        )
    yield from build_shared_finding(
        "processes",
        {
            n.name: f"{n.facts['pids_free']} more"
            for n in reports
            if 0 <= n.facts["pids_free"] < MIN_PIDS + WORKER_PIDS * n.slots
        },
        "raise TasksMax= of the systemd slice, --pids-limit of the container (pids.max of the control group)",
        summary="the limit of processes and threads is too low; a worker of torch needs a dozen",
    )
    cores = {n.name: _compute_usable_cores(n) for n in reports}
    most = max(cores.values(), default=0.0)
    few = {
        n.name: f"{cores[n.name]:.3g} of {n.facts['machine_cpus']} cores, for {format_count(n.slots, 'worker')}"
        for n in reports
        if cores[n.name] * FEW_WORKERS_PER_CORE < n.slots or cores[n.name] <= most / 2
    }
    yield from build_shared_finding(
        "cpus",
        few,
        "see taskset -cp $$ and cpu.max of the control group: ask for more (--cpus-per-task, --cpus of the "
        "container), take CPUAffinity= and CPUQuota= off sshd's or slurmd's unit, or lower cluster.slots",
        summary="few cores for the workers: threads and data loaders will wait",
        status="warn",
    )
    low = {}
    for n in reports:
        has = n.facts["limits"]
        for name, least, words in (
            ("as", MIN_ADDRESS_SPACE, "address space (ulimit -v, as, LimitAS=)"),
            ("fsize", MIN_FILE, "size of a file (ulimit -f, fsize, LimitFSIZE=)"),
            ("cpu", MIN_CPU_S, "seconds of processor time (ulimit -t, cpu, LimitCPU=)"),
        ):
            soft = has.get(name, (-1, -1))[0]
            if 0 <= soft < least:
                low[n.name] = (soft, words)
    for words in dict.fromkeys(words for _, words in low.values()):
        yield from build_shared_finding(
            "limits",
            {name: f"{soft}" for name, (soft, of) in low.items() if of == words},
            f"raise the limit of {words} in /etc/security/limits.conf or the unit of sshd, and log in again",
            summary=f"a low limit of {words.partition(' (')[0]}",
        )


def _compute_worker_memory(node: NodeReport) -> int:
    """Return the memory that the workers may use in bytes; -1 if the kernel does not report it."""
    known = [value for value in (node.facts["memory_limit"], node.facts["memory_free"]) if value >= 0]
    return min(known) if known else -1


def _compute_usable_cores(node: NodeReport) -> float:
    cores = float(node.facts["cpus"] or 0)
    quota = float(node.facts["cpu_quota"])
    return min(cores, quota) if quota > 0 else cores


def _classify_disk(disk: Mapping[str, Any]) -> str:
    """Return `full`, `no inodes`, `low` or `ok`; a total of 0 means that the size is not known."""
    if disk["free"] < MIN_DISK:
        return "full" if disk["total"] else "ok"
    # Some file systems report 0 inodes instead of their number.
    if disk["inodes"] and disk["free_inodes"] < MIN_INODES:
        return "no inodes"
    return "low" if disk["total"] and disk["free"] < LOW_DISK else "ok"


def check_storage(reports: Sequence[NodeReport], workdir: str) -> Iterator[Finding]:
    """Yield findings about full or read-only disks, and about files that the job needs."""
    disks: dict[str, dict[str, Mapping[str, Any]]] = {"full": {}, "no inodes": {}, "low": {}, "ok": {}}
    for report in reports:
        disk = report.facts["disk"]
        disks[_classify_disk(disk)][report.name] = disk
    yield from build_shared_finding(
        "disk",
        _format_free_space(disks["no inodes"]),
        f"df -i {workdir}; remove many small files (caches of pip, conda, Hugging Face), or set cluster.workdir to "
        "another disk",
        summary=f"the disk of {workdir} has free space, but no inodes for more files",
    )
    fix = f"free some space (`df -h {workdir}; df -i {workdir}`), or set cluster.workdir to another disk"
    read_only = {n.name for n in reports if "Read-only" in n.facts["writable"]}
    yield from build_shared_finding(
        "disk",
        _format_free_space({name: disk for name, disk in disks["full"].items() if name not in read_only}),
        fix,
        summary=f"the disk of {workdir} is full",
    )
    yield from build_shared_finding(
        "disk", _format_free_space(disks["low"]), fix, summary=f"the disk of {workdir} is nearly full", status="warn"
    )
    # A disk without space cannot be written to either, and is reported above.
    exhausted = {**disks["full"], **disks["no inodes"]}
    unwritable = {report.name: report.facts["writable"] for report in reports if report.facts["writable"]}
    yield from build_shared_finding(
        "workdir",
        {name: problem for name, problem in unwritable.items() if name in read_only or name not in exhausted},
        "set cluster.workdir to a folder that the login user may write to",
        summary=f"{workdir} cannot be written to",
    )
    yield from build_shared_finding(
        "workdir",
        {n.name: f"{n.facts['disk']['path']} is mounted noexec" for n in reports if n.facts["disk"]["noexec"]},
        "programs and extensions that a job builds cannot be run from it: set cluster.workdir to another disk, or "
        "sudo mount -o remount,exec there",
        summary=f"nothing in {workdir} can be executed",
        status="warn",
    )
    yield from _check_temporary_folder(reports)
    for check, kind, fix in (
        ("cache", "written to", "set {names} to a folder that the login user may write to, or leave it out"),
        ("file-variable", "found", "set {names} to a file that exists on every node, or unset it"),
    ):
        lost: dict[str, dict[str, str]] = {}
        for n in reports:
            for name, why in n.facts["files"].items():
                if (name in WRITTEN or name.endswith(WRITTEN_ENDS)) == (check == "cache"):
                    lost.setdefault(name, {})[n.name] = why
        for name, said in lost.items():
            yield from build_shared_finding(
                check,
                said,
                fix.format(names=name),
                summary=f"what {name} names cannot be {kind}: {next(iter(said.values()))}",
                status="warn",
            )
    yield from build_shared_finding(
        "path",
        {n.name: ", ".join(n.facts["missing"]) for n in reports if n.facts["missing"]},
        "copy it to the same path on these nodes (rsync -a), or put it on a shared file system",
        summary="a path that the job needs does not exist: "
        + ", ".join(sorted({path for n in reports for path in n.facts["missing"]})),
    )


def _check_temporary_folder(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about the folder for temporary files, which compilers, torch's inductor and data loaders use."""
    tmp = {n.name: n.facts["tmp"] for n in reports}
    bad = {name: one["why"] for name, one in tmp.items() if one["why"]}
    for name, one in tmp.items():
        if one["total"] and one["free"] < TMP_FULL and "Read-only" not in one["why"]:
            bad[name] = f"{one['path']} has {one['free'] >> 10} KiB left (df -h {one['path']})"
        elif one["inodes"] and one["free_inodes"] < MIN_INODES:
            bad[name] = f"{one['path']} has {one['free_inodes']} inodes left (df -i {one['path']})"
    origin = {one["origin"] for name, one in tmp.items() if name in bad}
    named = "job.env or cluster.nodes[].env" if origin == {"TMPDIR"} else "job.env: {TMPDIR: /path/with/room}"
    yield from build_shared_finding(
        "tmpdir",
        bad,
        f"set TMPDIR to a folder on a disk with room ({named}), or free some space: remove what ended jobs left there",
        summary=f"temporary files cannot be written: {next(iter(bad.values()), '')}",
    )
    little = {name: one for name, one in tmp.items() if name not in bad and one["total"] and one["free"] < TMP_LOW}
    yield from build_shared_finding(
        "tmpdir",
        {name: f"{one['path']} has {one['free'] // MIB} MiB left" for name, one in little.items()},
        f"free some space there, or set TMPDIR to another disk ({named})",
        summary="there is little room for temporary files",
        status="warn",
    )
    yield from build_shared_finding(
        "tmpdir",
        {name: f"{one['path']} is mounted noexec" for name, one in tmp.items() if name not in bad and one["noexec"]},
        "set TMPDIR to a folder from which programs may be run (job.env: {TMPDIR: /path}), or sudo mount -o "
        "remount,exec /tmp",
        summary="what Triton and torch.compile build in the folder of temporary files cannot be loaded",
        status="warn",
    )


def check_job_python(reports: Sequence[NodeReport], confirmed: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    """Yield findings about a job's Python that does not start with the job's variables, or finds wrong modules.

    Args:
        reports: the nodes.
        confirmed: node -> hidden modules that torch has been observed to import.
    """
    dead = {n.name: n.facts["job"] for n in reports if n.facts["job"].get("error")}
    by_cause: dict[tuple[str, ...], dict[str, str]] = {}
    for name, said in dead.items():
        by_cause.setdefault(tuple(said.get("because", ())), {})[name] = said["error"]
    for because, told in by_cause.items():
        names = ", ".join(because)
        yield from build_shared_finding(
            "python-environment",
            told,
            f"take {names} out of job.env, cluster.nodes[].env and the start-up files of the shell: without it the "
            f"job's Python "
            "starts" + (" (sitecustomize.py on it is run first)" if "PYTHONPATH" in because else "")
            if because
            else "run the job's Python (cluster.python) there: python -c 'print(1)'; its site-packages (.pth files, "
            "sitecustomize) keep it from starting: correct them, or install it again",
            summary=f"the job's Python does not start{f' with {names}' if because else ''}: "
            f"{next(iter(told.values()))}",
        )
    where: dict[tuple[str, str, str], list[str]] = {}
    for n in reports:
        for module, path, hidden in n.facts["job"].get("shadows", ()):
            where.setdefault((module, path, hidden), []).append(n.name)
    for (module, path, hidden), who in where.items():
        sure = module == "torch" or any(module in confirmed.get(name, ()) for name in who)
        verb = "rename" if "/" not in path else "remove its folder from PYTHONPATH, or rename (mv)"
        yield Finding(
            check="shadowing",
            status="fail" if sure else "warn",
            nodes=tuple(who),
            summary=f"{path} hides Python's own module {module} ({hidden})"
            + (", which torch imports" if sure and module != "torch" else ""),
            fix=f"{verb} {path}: any name but {module} that no installed module has",
            evidence=tuple(f"{name}: import {module} finds {path} instead of {hidden}" for name in who[:8]),
        )


def _format_free_space(disks: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        name: f"{disk['path']}: {disk['free'] // MIB} MiB and {disk['free_inodes']} inodes free"
        for name, disk in disks.items()
    }


def check_software_versions(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about software with different versions; they name the nodes that differ from the majority."""
    job = {n.name: n.facts["job"] for n in reports if n.facts["job"].get("python")}
    yield from compare_node_values(
        "python-version",
        {n: ".".join(said["python"].split(".")[:2]) for n, said in job.items() if said},
        "install the same minor version everywhere, or set cluster.python to one path that has it",
        what="Python",
    )
    torch = {
        n: f"{said['torch']} (CUDA {said['cuda']})" if said["torch"] else "none"
        for n, said in job.items()
        if said["torch"] != "unknown"  # a later import shows an unknown version
    }
    fix = "pip install torch==VERSION, the same on every node"
    for finding in compare_node_values("torch", torch, fix, what="torch"):
        paths = [f"{n}: it lies in {job[n].get('torch_path')}" for n in finding.nodes if job[n].get("torch_path")]
        places = ", ".join(f"{job[n]['torch_path']} on {n}" for n in finding.nodes[:2] if job[n].get("torch_path"))
        other = f"; it is found in {places}: if this folder is not meant, remove it from PYTHONPATH" if places else ""
        yield replace(finding, fix=fix + other, evidence=(*finding.evidence, *paths))
    nccl = {n: said.get("nccl") or "none" for n, said in job.items() if said}
    yield from compare_node_values(
        "nccl", nccl, "pip install --force-reinstall torch==VERSION, the same on every node", what="NCCL's wheel"
    )
    machine = {n.name: n.facts["machine"] for n in reports}
    yield from compare_node_values("architecture", machine, "use nodes of one kind", what="processor architecture")
    code = {n.name: n.facts["code"] for n in reports}
    yield from compare_node_values(
        "code", code, "bring the same code to every node: rsync -a, or job.files.push: true", what="code of the job"
    )


def check_torch_exists(reports: Sequence[NodeReport], needed_by: str) -> Iterator[Finding]:
    """Yield a finding if no node's Python has torch; where only some lack it, `check_software_versions` reports them.

    Args:
        reports: the nodes.
        needed_by: what of the job cannot do without torch.
    """
    pythons = {n.name: n.facts["job"] for n in reports if n.facts["job"].get("python")}
    if pythons and not any(said.get("torch") for said in pythons.values()):
        yield from build_shared_finding(
            "torch",
            {name: f"Python {said['python']} has no torch" for name, said in pythons.items()},
            "pip install torch there, set cluster.python to a Python that has it, or give the job an environment "
            "(job.environment)",
            summary=f"the job's Python has no torch, and {needed_by} needs it",
        )


def compare_node_values(
    check: str, values: Mapping[str, str], fix: str, *, what: str, status: Status = "fail"
) -> Iterator[Finding]:
    """Yield a finding if nodes differ in a value that must be equal; it names those that differ from the majority."""
    odd, usual = find_odd_nodes(values)
    if odd:
        told = f"; the others have {usual}" if usual is not None else ""
        said = ", ".join(f"{node} has {values[node] or 'none'}" for node in odd)
        evidence = tuple(f"{node}: {value or 'none'}" for node, value in values.items())
        summary = f"{what} differs between nodes: {said}{told}"
        yield Finding(check=check, status=status, nodes=odd, summary=summary, fix=fix, evidence=evidence)


def check_node_clocks(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings about clocks that are off by more than the round trip explains."""
    off = {n.name: n.offset_s for n in reports if abs(n.offset_s) - n.offset_error_s > CLOCK_WARN_S}
    worst = max((abs(offset) for offset in off.values()), default=0.0)
    yield from build_shared_finding(
        "clock",
        {name: f"{offset:+.1f} s compared with this machine" for name, offset in off.items()},
        "sudo timedatectl set-ntp true (or systemctl restart chrony)",
        summary="the clock is off; logs cannot be merged, and munge, Kerberos and TLS may refuse",
        status="fail" if worst > CLOCK_FAIL_S else "warn",
    )
