"""Real Slurm on the virtual hosts: munge and the controller next to them, a daemon on each.

STATE/slurm/slurm.conf    what SLURM_CONF points to, on the hosts and here
STATE/slurm/munge/        key and socket of munge, which one daemon serves to all hosts: they share this machine's files
STATE/slurm/state/        what the controller remembers
STATE/self/slurmd/        on each host, what its daemon keeps of jobs

Trials found the settings that are not obvious (Debian 12, Slurm 22.05): a virtual host has no control groups, so
processes are tracked by their parents (linuxproc). The controller listens only on the bridge's address, so that two
sandboxes do not conflict, and has to resolve its own name for that.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dtctl.errors import SandboxError
from dtctl.sandbox import kernel
from dtctl.sandbox.layout import CONTROL, Sandbox, SandboxNode

PARTITIONS: Final = ("main", "urgent")
"""Partitions to test preemption: jobs of the second take nodes from jobs of the first, which are requeued."""
CPUS, GPUS = 64, 8
"""Processors and GPUs of each host in Slurm."""
READY_LIMIT_S: Final = 30.0
PACKAGES: Final = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CONFIG: Final = """\
# Slurm of a throwaway dtctl sandbox.
ClusterName=sandbox
SlurmctldHost={control}({bridge_address})
CommunicationParameters=NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={own}/slurmd
SlurmdPidFile={own}/slurmd/pid
SlurmdLogFile={own}/slurmd/log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Nodes as those of a cluster, not as this machine: a batch file for them is to be taken here, too.
SlurmdParameters=config_overrides
GresTypes=gpu
# A node that was off is taken back when it says so.
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=30
# Short, so that time limits and preemption can be tried in seconds.
KillWait=5
OverTimeLimit=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MailProg=/bin/true
{nodes}
PartitionName=main Nodes={names} Default=YES DefaultTime=10 MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes={names} DefaultTime=10 MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


def check_slurm_requirements() -> None:
    """Check that this machine can have Slurm in a sandbox.

    Raises:
        SandboxError: something is missing; the error names how to install it.
    """
    missing = sorted({package for tool, package in PACKAGES.items() if not shutil.which(tool, path=PATH)})
    if missing:
        raise SandboxError(
            f"Slurm on a sandbox needs {', '.join(missing)}", hint=f"sudo apt-get install {' '.join(missing)}"
        )
    if os.getuid() != 0:
        raise SandboxError(
            "Slurm on a sandbox needs root: its daemons start jobs under the ids of their users, and the user "
            "namespace of an ordinary user has only one id",
            hint="use sudo, or a sandbox without --slurm",
        )


def build_config_path(state: Path) -> Path:
    """Return the path of the configuration, which exists if the sandbox has Slurm."""
    return state / "slurm" / "slurm.conf"


def build_slurm_environment(sandbox: Sandbox) -> dict[str, str]:
    """Return the variables for Slurm's commands; none if the sandbox has no Slurm."""
    return {"SLURM_CONF": str(build_config_path(sandbox.state))} if sandbox.slurm else {}


def write_files(state: Path, nodes: Sequence[SandboxNode], *, bridge_address: str) -> None:
    """Write the configuration and munge's key, before the hosts come up."""
    folder = state / "slurm"
    for name in ("munge", "state"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    # munge requires folders that no other user can write to, and a socket that every user may reach.
    for path in (folder, folder / "munge"):
        path.chmod(0o755)
    key = folder / "munge" / "key"
    with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(128))
    # Each host has the whole machine. It reports no more memory than exists, since jobs may use all of it.
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    resources = f"CPUs={CPUS} RealMemory={memory_mib // 2} Gres=gpu:{GPUS} Feature=sandbox"
    rows = (f"NodeName={node.name} NodeAddr={node.address} {resources}" for node in nodes)
    text = CONFIG.format(
        control=CONTROL,
        bridge_address=bridge_address,
        folder=folder,
        own=state / "self",
        nodes="\n".join(rows),
        names=",".join(node.name for node in nodes),
    )
    build_config_path(state).write_text(text, encoding="utf-8")
    names = "".join(f"{node.address} {node.name}\n" for node in nodes)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{bridge_address} {CONTROL}\n{names}", encoding="utf-8")
    # Slurm counts every kind of file; ten digits would need another pattern.
    for number in range(GPUS):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n", encoding="utf-8")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
    for node in nodes:
        (state / "hosts" / node.name / "slurmd").mkdir(mode=0o755, exist_ok=True)


def start_control(state: Path) -> None:
    """Start munge and the controller, as children of the keeper that end with it.

    Raises:
        SandboxError: munge did not start.
    """
    munge = state / "slurm" / "munge"
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    # --force: munged refuses a socket below a home that other users cannot enter, but the hosts have no other users.
    options = ["--foreground", "--force", *(f"--{option}={munge / name}" for option, name in names.items())]
    _fork_daemon(["munged", *options], log=munge / "out", environ={})
    deadline = time.monotonic() + READY_LIMIT_S
    while not (munge / "socket").exists():
        if time.monotonic() > deadline:
            raise SandboxError("munge did not start", where=str(munge / "log"))
        time.sleep(0.01)
    _fork_daemon(
        ["slurmctld", "-D", "-f", str(build_config_path(state))],
        log=state / "slurm" / "slurmctld.out",
        environ={"SLURM_CONF": str(build_config_path(state))},
        hosts=state / "slurm" / "hosts",
    )


def start_daemon(state: Path, name: str) -> None:
    """Start a host's daemon, on that host, as a child of its init."""
    _fork_daemon(
        ["slurmd", "-D", "-N", name, "-f", str(build_config_path(state))],
        log=state / "self" / "slurmd" / "out",
        environ={"SLURM_CONF": str(build_config_path(state))},
    )


def wait_ready(sandbox: Sandbox) -> None:
    """Wait until the controller accepts jobs for all hosts.

    Raises:
        SandboxError: it does not.
    """
    deadline = time.monotonic() + READY_LIMIT_S
    while True:
        states = _read_node_states(sandbox)
        if set(states) == {node.name for node in sandbox.nodes} and set(states.values()) == {"idle"}:
            return
        if time.monotonic() > deadline:
            summary = (
                ", ".join(f"{name} is {state}" for name, state in states.items()) or "the controller does not answer"
            )
            raise SandboxError(f"Slurm did not start: {summary}", where=str(sandbox.state / "slurm" / "slurmctld.log"))
        time.sleep(0.05)


def _read_node_states(sandbox: Sandbox) -> Mapping[str, str]:
    """Return node -> state of sinfo; empty while the controller does not answer."""
    argv = ["sinfo", "--noheader", "--Node", "--partition", PARTITIONS[0], "--format", "%N %T"]
    environ = {**os.environ, **build_slurm_environment(sandbox)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def _fork_daemon(argv: Sequence[str], *, log: Path, environ: Mapping[str, str], hosts: Path | None = None) -> None:
    """Fork and execute, with the output in a file; the child ends with this process. With `hosts` it is `control`."""
    if os.fork():
        return
    try:
        kernel.set_parent_kill_signal()
        os.setsid()
        if hosts is not None:
            kernel.unshare_namespaces(kernel.CLONE_NEWUTS | kernel.CLONE_NEWNS)
            socket.sethostname(CONTROL)
            kernel.mount_file_system("none", Path("/"), "", kernel.MS_REC | kernel.MS_PRIVATE)
            kernel.bind_mount(hosts, Path("/etc/hosts"))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, fd in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, fd)
        os.execve(shutil.which(argv[0], path=PATH) or argv[0], list(argv), {"PATH": PATH, **environ})
    finally:
        os._exit(127)
