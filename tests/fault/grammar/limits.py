# ruff: noqa: E501, C901 - a fault is a line or two, as they are typed
"""Limits, memory, disks and files of a node."""

from __future__ import annotations

from tests.fault.grammar.fault import ALL, Collection, nodes_with


def add(made: Collection) -> None:
    for size, fatal in (("80M", True), ("120M", True), ("400M", False)):
        node = made.host()
        made.add(f"cgroup: {size} of memory", "limits", "memory", [node], r"MemoryMax|--mem|memory limit|memory\.limit|memory\.max",
             (node, f"group memory memory.limit_in_bytes {size}"), fatal=fatal)  # fmt: skip
    for count in (8, 25):
        node = made.host()
        made.add(
            f"cgroup: {count} processes",
            "limits",
            "processes",
            [node],
            r"TasksMax|pids\.max|pids",
            (node, f"group pids pids.max {count}"),
        )
    for share in (10_000, 30_000):
        node = made.host()
        made.add(f"cgroup: {share // 1000}% of a core", "limits", "cpus", [node], r"CPUQuota|--cpus|cpu\.max|cfs_quota",
             (node, f"group cpu cpu.cfs_quota_us {share}"), fatal=False)  # fmt: skip
    for index in range(2):
        node = made.host()
        made.add(f"affinity: one core, {index}", "limits", "cpus", [node], r"affinity|taskset|CPUAffinity|cpus",
             (node, "for p in $(pgrep -x sshd); do taskset -p 1 $p >/dev/null; done"), fatal=False)  # fmt: skip
    made.add(
        "limits: 64 workers on two cores", "limits", "cpus", ALL, r"slots", spec={"cluster.slots": 64}, fatal=False
    )
    for count in (64, 200):
        node = made.host()
        made.add(
            f"limits: {count} open files",
            "limits",
            "nofile",
            [node],
            r"ulimit -n|nofile|LimitNOFILE",
            (node, f"limit --nofile={count}:{count}"),
        )
    node = made.host()
    made.add(
        "limits: 1.5 GB of address space",
        "limits",
        "memory limits",
        [node],
        r"ulimit -v|\bas\b|address space|LimitAS",
        (node, "limit --as=1500000000"),
    )
    node = made.host()
    made.add(
        "limits: files of 1 MB",
        "limits",
        "limits file-size",
        [node],
        r"ulimit -f|fsize|LimitFSIZE",
        (node, "limit --fsize=1000000"),
    )
    node = made.host()
    made.add(
        "limits: 30 s of processor time",
        "limits",
        "limits cpu-time",
        [node],
        r"ulimit -t|\bcpu\b|LimitCPU",
        (node, "limit --cpu=30"),
    )
    work = {"cluster.workdir": "~/small"}
    node = made.host()
    made.add(
        "disk: the workdir is full",
        "files",
        "disk",
        [node],
        r"df |free|workdir",
        (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=100k none $LOGIN/small"),
        spec=work,
    )
    node = made.host()
    made.add(
        "disk: the workdir has 40 MB",
        "files",
        "disk",
        [node],
        r"df |free|workdir",
        (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=40m none $LOGIN/small"),
        spec=work,
    )
    node = made.host()
    made.add(
        "disk: the workdir has 500 MB",
        "files",
        "disk",
        [node],
        r"df |free|workdir",
        (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=500m none $LOGIN/small"),
        spec=work,
        fatal=False,
    )
    for few in (2, 40):
        node = made.host()
        made.add(f"disk: {few} inodes", "files", "disk inodes", [node], r"df -i|inodes|small files",
             (node, f"mkdir -p $LOGIN/small; mount -t tmpfs -o size=10g,nr_inodes={few} none $LOGIN/small"), spec=work)  # fmt: skip
    for index in range(2):
        node = made.host()
        made.add(f"disk: the workdir is read-only, {index}", "files", "workdir", [node], r"workdir|remount",
             (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=10g,ro none $LOGIN/small"), spec=work)  # fmt: skip
    node = made.host()
    made.add(
        "disk: the workdir is a file", "files", "workdir", [node], r"workdir", (node, "touch $LOGIN/small"), spec=work
    )
    node = made.host()
    made.add(
        "disk: the workdir is noexec",
        "files",
        "workdir",
        [node],
        r"workdir|exec",
        (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=10g,noexec none $LOGIN/small"),
        spec=work,
        fatal=False,
    )
    tmp = r"TMPDIR|/tmp"
    for size in ("8k", "4m"):
        node = made.host()
        made.add(
            f"tmp: {size} in all",
            "files",
            "tmpdir",
            [node],
            tmp,
            (node, f"mount -t tmpfs -o size={size},mode=1777 none /tmp"),
        )
    node = made.host()
    made.add(
        "tmp: full",
        "files",
        "tmpdir",
        [node],
        tmp,
        (node, "mount -t tmpfs -o size=50m,mode=1777 none /tmp; head -c 60000000 /dev/zero >/tmp/core.1 || true"),
    )
    node = made.host()
    made.add(
        "tmp: read-only", "files", "tmpdir", [node], tmp, (node, "mount -t tmpfs -o size=5g,mode=1777,ro none /tmp")
    )
    node = made.host()
    made.add(
        "tmp: noexec",
        "files",
        "tmpdir",
        [node],
        tmp,
        (node, "mount -t tmpfs -o size=5g,mode=1777,noexec none /tmp"),
        fatal=False,
    )
    node = made.host()
    made.add(
        "tmp: TMPDIR is not there",
        "files",
        "tmpdir",
        [node],
        tmp,
        spec=nodes_with(node, env={"TMPDIR": "/scratch/nobody"}),
    )
    made.add("tmp: TMPDIR of all is read-only", "files", "tmpdir", ALL, tmp, spec={"job.env": {"TMPDIR": "/proc"}})
    for size in ("1m", "30m"):
        node = made.host()
        made.add(
            f"shm: {size}",
            "files",
            "shm",
            [node],
            r"shm-size|remount|ipc=host",
            (node, f"mount -t tmpfs -o size={size} none /dev/shm"),
        )
    for size in (200, 600):
        node = made.host()
        made.add(f"shm: {size} MB, full", "files", "shm", [node], r"\brm\b|remove|delete|left|owner|fuser",
             (node, f"mount -t tmpfs -o size={size}m none /dev/shm; head -c {size}m /dev/zero >/dev/shm/nccl-Xa83 || true"))  # fmt: skip
    node = made.host()
    made.add("shm: read-only", "files", "shm", [node], r"mount", (node, "mount -t tmpfs -o size=5g,ro none /dev/shm"))
    for variable in (
        "HF_HOME",
        "TORCH_HOME",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "XDG_CACHE_HOME",
        "HF_DATASETS_CACHE",
        "WANDB_DIR",
        "TORCH_EXTENSIONS_DIR",
    ):
        node = made.host()
        everyone = variable in ("TRITON_CACHE_DIR", "WANDB_DIR")
        spec = {"job.env": {variable: "/proc/cache"}} if everyone else nodes_with(node, env={variable: "/sys/cache"})
        made.add(
            f"cache: {variable} cannot be written to",
            "files",
            "cache",
            ALL if everyone else [node],
            variable,
            spec=spec,
            fatal=False,
        )
    for variable, value in (
        ("NCCL_TOPO_FILE", "/etc/nccl/topo.xml"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem"),
        ("NCCL_CONF_FILE", "/nowhere/nccl.conf"),
        ("LD_PRELOAD", "/nowhere/libfoo.so"),
    ):
        node = made.host()
        made.add(f"file: {variable} names one that is not there", "files", "cache file-variable env-differs", [node], variable,
             spec=nodes_with(node, env={variable: value}), fatal=False)  # fmt: skip
    node = made.host()
    made.add("file: NCCL_DEBUG_FILE in a folder that is not there", "files", "cache file-variable env-differs", [node], "NCCL_DEBUG_FILE",
         spec=nodes_with(node, env={"NCCL_DEBUG_FILE": "/nowhere/log.%h"}), fatal=False)  # fmt: skip
