"""A node by itself: its limits, its disks, its software and its devices."""

from __future__ import annotations

import json
import resource
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

from dtctl.sandbox import faults
from dtctl.sandbox.layout import Sandbox
from tests.fault.examining import bad, examine, expect, needs_root, note, on, placed, with_python, wrapper

pytestmark = pytest.mark.integration


def test_few_open_files(sandbox: Sandbox, project: Any) -> None:
    python = wrapper(sandbox, "node2", f'ulimit -n 256; exec {sys.executable} "$@"')
    expect(examine(project, with_python("node2", python)), "nofile", ["node2"], said="ulimit -n")


def test_shared_memory_is_small(sandbox: Sandbox, project: Any) -> None:
    on(sandbox, "node1", "mount", "-t", "tmpfs", "-o", "size=1m", faults.DISK, "/dev/shm")
    note(sandbox)
    expect(examine(project), "shm", ["node1"], said="1 MiB")


def test_the_disk_is_full(sandbox: Sandbox, project: Any) -> None:
    faults.fill_disk(sandbox, sandbox.node("node3"), path="small", size="1m")
    note(sandbox)
    expect(examine(project, {"cluster.workdir": "~/small"}), "disk", ["node3"], said="1 MiB")


def test_the_workdir_is_read_only(sandbox: Sandbox, project: Any) -> None:
    folder = sandbox.home / "locked"
    on(sandbox, "node1", "mkdir", "-p", str(folder))
    for node in ("node2", "node3"):
        on(sandbox, node, "mkdir", "-p", str(folder))
    on(sandbox, "node1", "mount", "-t", "tmpfs", "-o", "size=100g,ro", faults.DISK, str(folder))
    note(sandbox)
    expect(examine(project, {"cluster.workdir": "~/locked/x"}), "workdir", ["node1"], said="Read-only")


def test_a_data_path_is_missing_on_one_node(sandbox: Sandbox, project: Any) -> None:
    for node in ("node1", "node3"):
        on(sandbox, node, "mkdir", "-p", str(sandbox.home / "data"))
    expect(examine(project, {"train.data": {"path": "~/data"}}), "path", ["node2"], said="~/data")


def test_a_shared_folder_is_not_mounted_on_one_node(sandbox: Sandbox, project: Any) -> None:
    folder = f"/var/tmp/dtctl-{secrets.token_hex(4)}"  # all hosts see the machine's own, as if it were on a file server
    on(sandbox, "node1", "mkdir", folder)
    changes = {"train.data": {"path": folder}}
    try:
        code, said = examine(project, changes)
        assert (code, bad(said)) == (0, [])
        assert "shared" in [one["check"] for one in said["findings"]]
        on(sandbox, "node3", "mount", "-t", "tmpfs", "-o", "size=100m", faults.DISK, folder)
        note(sandbox)
        expect(examine(project, changes), "shared", ["node3"], peers=["node1", "node2"], said="findmnt")
        assert on(sandbox, "node1", "ls", "-A", folder) == "", "the doctor's marks are gone"
    finally:
        on(sandbox, "node1", "rm", "-r", folder)


def test_the_code_differs_on_one_node(sandbox: Sandbox, project: Any) -> None:
    for node in ("node1", "node2", "node3"):
        text = "print(2)" if node == "node2" else "print(1)"
        on(sandbox, node, "sh", "-c", f"mkdir -p {sandbox.home}/code && echo '{text}' > {sandbox.home}/code/train.py")
    changes = {"job.files": {"push": False, "root": "~/code"}}
    expect(examine(project, changes), "code", ["node2"])


def test_another_torch_on_one_node(sandbox: Sandbox, project: Any) -> None:
    version = placed(sandbox, "node3", "torch/version.py", "__version__ = '2.1.0'\ncuda = '11.8'\n")
    on(sandbox, "node3", "touch", version.replace("version.py", "__init__.py"), root=False)
    stub = version.removesuffix("/torch/version.py")
    python = wrapper(sandbox, "node3", f'PYTHONPATH={stub} exec {sys.executable} "$@"')
    expect(examine(project, with_python("node3", python)), "torch", ["node3"], said="2.1.0")


def fake_class(sandbox: Sandbox, node: str, ports: dict[str, tuple[str, str]]) -> None:
    """Lay RDMA ports, as (state, rate) by name, over a host's /sys/class."""
    path = placed(sandbox, node, "infiniband/.keep", "")
    root = path.removesuffix("/infiniband/.keep")
    on(sandbox, node, "rm", path)
    for device, (state, rate) in ports.items():
        files = {"state": state, "rate": rate, "link_layer": "InfiniBand"}
        for name, text in files.items():
            write = 'mkdir -p "${1%/*}" && printf %s "$2" >"$1"'
            on(sandbox, node, "sh", "-c", write, "sh", f"{root}/infiniband/{device}/ports/1/{name}", text, root=False)
    on(sandbox, node, "mount", "--bind", root, "/sys/class")


@pytest.fixture
def infiniband(sandbox: Sandbox) -> Any:
    """Two active ports on every host; node2's second one as the test wants it."""

    def lay(state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> None:
        good = ("4: ACTIVE", "400 Gb/sec (4X NDR)")
        for node in ("node1", "node2", "node3"):
            fake_class(sandbox, node, {"mlx5_0": good, "mlx5_1": (state, rate) if node == "node2" else good})

    yield lay
    for node in ("node1", "node2", "node3"):
        on(sandbox, node, "umount", "/sys/class")


def locking(sandbox: Sandbox, little: str) -> tuple[dict[str, Any], list[str]]:
    """The spec's changes that let one node lock 64 KiB, and the nodes that may not lock enough.

    Nobody without a capability can raise the limit, so where the machine's own is low all nodes have too little.
    """
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= 64 << 20
    python = wrapper(sandbox, little, f'ulimit -l 64; exec {sys.executable} "$@"')
    return with_python(little, python), [little] if enough else ["node1", "node2", "node3"]


@needs_root
def test_little_memory_may_be_locked_where_there_is_rdma(sandbox: Sandbox, project: Any, infiniband: Any) -> None:
    changes, low = locking(sandbox, "node2")
    assert "memlock" not in [one["check"] for one in bad(examine(project, changes, "--quick")[1])]
    infiniband()
    expect(examine(project, changes), "memlock", low, said="node2: soft 65536 bytes")


@needs_root
@pytest.mark.parametrize(
    ("port", "said"), [({"state": "1: DOWN"}, "mlx5_1:1 1: DOWN"), ({"rate": "200 Gb/sec (2X NDR)"}, "200 Gb/sec")]
)
def test_a_port_of_infiniband_is_down_or_slow(
    sandbox: Sandbox, project: Any, infiniband: Any, port: dict[str, str], said: str
) -> None:
    infiniband(**port)
    _, answer = examine(project)
    (found,) = [one for one in bad(answer) if one["check"] != "memlock"]  # this machine's limit may be low everywhere
    assert (found["check"], found["status"], found["nodes"]) == ("rdma", "warn", ["node2"])
    assert said in json.dumps(found)


def test_a_gpu_has_fallen_off_the_bus_says_the_kernel(sandbox: Sandbox, project: Any) -> None:
    # The kernel counts from its start, and errors of more than a day ago are left out.
    now = Path("/proc/uptime").read_text().split()[0]
    xid = f"[ {now}] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    row = "0, NVIDIA H100 80GB HBM3, 4, 81559, 535.129.03, 0"
    nodes = []
    for node in ("node1", "node2", "node3"):
        tools = placed(sandbox, node, "nvidia-smi", f'#!/bin/sh\ncase "$1" in *query-gpu*) echo "{row}";; esac\n')
        folder = tools.removesuffix("/nvidia-smi")
        said = xid if node == "node3" else ""
        on(
            sandbox,
            node,
            "sh",
            "-c",
            f"printf '#!/bin/sh\\necho \"{said}\"\\n' > {folder}/dmesg; chmod 755 {folder}/dmesg",
            root=False,
        )
        nodes.append(
            {"name": node, "python": wrapper(sandbox, node, f'PATH={folder}:$PATH exec {sys.executable} "$@"')}
        )
    expect(examine(project, {"cluster.nodes": nodes}), "gpu-xid", ["node3"], said="fallen off the bus")
