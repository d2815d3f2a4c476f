"""What nvidia-smi, dmesg and the kernel's files say of GPUs and RDMA ports, and who is the odd one out.

The texts have the form of real ones: `nvlink --status` of Azure/azhpc-diagnostics#73, `topo -m` of NVIDIA/DCGM#149, Xid
lines of NVIDIA/open-gpu-kernel-modules#1150, ports as the kernel's ABI documentation describes them.
"""

from __future__ import annotations

from typing import Any

import pytest

from dtctl.doctor.checks import hardware
from dtctl.doctor.node_report import NodeReport

GPUS = "0, Tesla V100-SXM2-32GB, 4, 32768, 535.129.03, 0\n1, Tesla V100-SXM2-32GB, 4, 32768, 535.129.03, 0"
REMAPPED = "00000000:3B:00.0, No, No\n00000000:5E:00.0, No, No"
V100 = "GPU {}: Tesla V100-SXM2-32GB (UUID: GPU-0)\n"
LINKS = [f"         Link {i}: 25.781 GB/s\n" for i in range(6)]
DEAD_LINKS = [line if i not in (3, 5) else f"         Link {i}: <inactive>\n" for i, line in enumerate(LINKS)]
STATE = (
    "0, Enabled, 700.00, 700.00, 0x0000000000000001, 16, 16, Disabled, Enabled\n"
    "1, Enabled, 700.00, 700.00, 0x0000000000000004, 16, 16, Disabled, Enabled"
)
NVLINK = "".join([V100.format(0), *LINKS, V100.format(1), *LINKS])
TOPOLOGY = """\
        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV12    PXB     {cpus}          3               N/A
GPU1    NV12     X      PXB     {cpus}          3               N/A
NIC0    PXB     PXB      X

Legend:
"""
XID = "[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OWN_FAULT = "[ 12.5] NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python3, Ch 00000001, intr 10000000. MMU Fault"
HARMLESS = "[ 13.5] NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149"
ACTIVE = {
    "device": "mlx5_0",
    "port": "1",
    "state": "4: ACTIVE",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
}


def node(name: str, **changed: Any) -> NodeReport:
    facts = {
        "gpus": 2,
        "gpu": GPUS,
        "remapped": REMAPPED,
        "nvlink": NVLINK,
        "topology": TOPOLOGY.format(cpus="48-63"),
        "xid": HARMLESS,
        "xid_source": "dmesg",
        "gpu_error": "",
        "fabric": "0, Completed, Success\n1, Completed, Success",
        "vendor": "nvidia",
        "state": STATE,
        "rdma": [ACTIVE],
        "interfaces": [{"name": "eth0", "mbit_s": 25_000}],
        "ways": {"a": "eth0", "b": "eth0", "c": "eth0"},
    }
    return NodeReport(name=name, address=name, facts={**facts, **changed})


def found(**changed: Any) -> list[tuple[str, str, tuple[str, ...], str]]:
    """What is found when b is different."""
    seen = [node("a"), node("b", **changed), node("c", topology=TOPOLOGY.format(cpus="0-15"))]
    return [
        (one.check, one.status, one.nodes, one.summary + "".join(one.evidence))
        for one in hardware.check_hardware(seen, {})
    ]


def expect(check: str, status: str, said: str, **changed: Any) -> None:
    (one,) = found(**changed)
    assert one[:3] == (check, status, ("b",))
    assert said in one[3], one[3]


def test_nodes_that_are_alike_have_nothing_to_tell() -> None:
    assert found() == []


def test_a_gpu_that_has_fallen_off_the_bus() -> None:
    expect("gpu-xid", "fail", "it has fallen off the bus", xid=XID)


def test_an_error_that_a_program_may_have_made_is_a_warning() -> None:
    expect("gpu-xid", "warn", "page fault", xid=OWN_FAULT)


def test_errors_of_memory() -> None:
    expect("gpu-ecc", "fail", "GPU 1 has 3 uncorrected", gpu=GPUS[:-1] + "3")
    expect("gpu-ecc", "fail", "5E:00.0 waits for a reset", remapped=REMAPPED.replace("5E:00.0, No", "5E:00.0, Yes"))
    expect("gpu-ecc", "fail", "5E:00.0 could not remap", remapped=REMAPPED[:-2] + "Yes")
    assert found(gpu=GPUS.replace(", 0\n", ", [N/A]\n")) == [], "a GPU without ECC"


def test_a_driver_and_a_model_that_differ() -> None:
    expect("gpu-driver", "warn", "550.54", gpu=GPUS.replace("535.129.03", "550.54.15"))
    expect("gpu-model", "warn", "A100", gpu=GPUS.replace("V100", "A100"), nvlink="")


def test_another_number_of_gpus() -> None:
    assert ("gpus", "warn", ("b",)) in [one[:3] for one in found(gpus=1)]
    (few, *_) = hardware.check_hardware([node("a", gpus=1), node("b")], {"a": 2, "b": 2})
    assert (few.check, few.status, few.nodes) == ("gpus", "fail", ("a",))


def test_links_that_are_down_on_some_gpus_only() -> None:
    half = "".join([V100.format(0), *LINKS, V100.format(1), *DEAD_LINKS])
    expect("gpu-links", "warn", "GPU 1 has 4 of 6 NVLinks", nvlink=half)
    dead = "".join([V100.format(0), *DEAD_LINKS, V100.format(1), *DEAD_LINKS])
    every = [node(name, nvlink=dead) for name in "abc"]
    assert list(hardware.check_hardware(every, {})) == [], "some models have links that are dead by design"


def test_gpus_that_reach_each_other_another_way() -> None:
    expect("gpu-links", "warn", "SYS", topology=TOPOLOGY.format(cpus="1").replace("NV12", "SYS "))


def test_memory_in_use() -> None:
    expect(
        "gpu-busy",
        "warn",
        "GPU 1 31000 of 32768 MiB",
        gpu=GPUS.replace("1, Tesla V100-SXM2-32GB, 4", "1, Tesla V100-SXM2-32GB, 31000"),
    )


def test_rdma_ports_that_are_down_slower_or_missing() -> None:
    down = {**ACTIVE, "device": "mlx5_1", "state": "1: DOWN"}
    expect("rdma", "warn", "mlx5_1:1 1: DOWN", rdma=[ACTIVE, down])
    expect("rdma", "warn", "200 Gb/sec", rdma=[{**ACTIVE, "rate": "200 Gb/sec (2X NDR)"}])
    expect("rdma", "warn", "none", rdma=[])


def test_a_network_card_that_has_agreed_on_less() -> None:
    expect("link-speed", "warn", "1000 Mbit/s", interfaces=[{"name": "eth0", "mbit_s": 1000}])


def test_tools_that_say_nothing_find_nothing() -> None:
    bare = {"gpus": 0, "gpu": "", "remapped": "", "nvlink": "", "topology": "", "xid": "", "rdma": [], "state": ""}
    bare |= {"gpu_error": "", "fabric": "", "xid_source": ""}
    assert list(hardware.check_hardware([node(name, **bare) for name in "abc"], {"a": 1})) == []


LOST = "nvidia-smi ends with status 15: Unable to determine the device handle for GPU 0000:5E:00.0: GPU is lost."


def test_a_gpu_that_nvidia_smi_cannot_reach() -> None:
    expect("gpus", "fail", "GPU is lost", gpu="", remapped="", nvlink="", topology="", gpu_error=LOST)
    one = found(gpu=GPUS.split("\n", maxsplit=1)[0], remapped="", nvlink="", topology="")[0]
    assert one[:3] == ("gpus", "fail", ("b",))
    assert "1 of 2" in one[3]
    none = {"gpus": 0, "gpu": "", "remapped": "", "nvlink": "", "topology": "", "xid": "", "rdma": [], "state": ""}
    error = "nvidia-smi ends with status 9: NVIDIA-SMI has failed because it couldn't communicate with the driver"
    bare = [node(name, **none, gpu_error=error, interfaces=[]) for name in "ab"]
    assert list(hardware.check_hardware(bare, {})) == [], "a machine without GPUs that has the tool"


def test_a_fabric_that_is_not_ready() -> None:
    expect("gpu-links", "fail", "GPU 1 is In Progress", fabric="0, Completed, Success\n1, In Progress, N/A")
    assert found(fabric="0, N/A, N/A\n1, N/A, N/A") == []


def test_errors_of_newer_gpus() -> None:
    line = "2026-05-01T10:00:00,1+00:00 NVRM: Xid (PCI:0000:3b:00): {}"
    expect("gpu-xid", "fail", "unrecovered ECC", xid=line.format("140, pid=7, ..."))
    expect("gpu-xid", "warn", "NVLink error", xid=line.format("149, NETIR_LINK_EVT ..."))
    changed = "154, GPU recovery action changed from 0x{} to 0x{}"
    expect("gpu-xid", "fail", "must be reset", xid=line.format(changed.format("0 (None)", "1 (GPU Reset Required)")))
    assert found(xid=line.format(changed.format("1 (GPU Reset Required)", "0 (None)"))) == []


def test_the_header_of_a_topology_is_no_row() -> None:
    plain = TOPOLOGY.format(cpus="0-3").strip()
    assert plain.startswith("GPU0    GPU1")
    assert hardware.parse_gpu_topology(plain) == "X NV12; NV12 X"


@pytest.mark.parametrize(
    ("check", "before", "after", "said"),
    [
        ("gpu-power", "700.00, 700.00, 0x0000000000000004", "500.00, 700.00, 0x04", "GPU 1 at 500.00 of 700.00 W"),
        ("gpu-clocks", "0x0000000000000001", "0x0000000000000040", "GPU 0: it is too hot"),
        ("gpu-clocks", "0x0000000000000001", "0x0000000000000088", "the power supply limits it"),
        ("gpu-pcie", "16, 16, Disabled, Enabled\n", "8, 16, Disabled, Enabled\n", "GPU 0 x8 of x16"),
        ("gpu-mig", "Disabled, Enabled\n", "Enabled, Enabled\n", "GPU 0"),
    ],
)
def test_how_a_gpu_is_set_up_and_fares(check: str, before: str, after: str, said: str) -> None:
    assert before in STATE
    expect(check, "warn", said, state=STATE.replace(before, after, 1))


@pytest.mark.parametrize(
    "state", ["", "0, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]", "0, Enabled, 700.00"]
)
def test_what_the_driver_does_not_say_is_not_held_against_it(state: str) -> None:
    assert found(state=state) == []


def test_an_rdma_device_that_was_not_handed_into_the_container() -> None:
    expect("rdma", "warn", "mlx5_0", rdma=[{**ACTIVE, "verbs": "no"}])
    assert found(rdma=[{**ACTIVE, "verbs": "yes"}]) == []


AMD = "2026-11-22T09:00:00,000000+00:00 amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!"


def test_gpus_of_amd_are_told_of_in_the_kernel_s_words() -> None:
    rows = "0, AMD Instinct MI300X, 283, 196288, 6.7.0, [N/A]"
    facts = {"vendor": "amd", "gpus": 1, "gpu": rows, "state": "", "nvlink": "", "topology": "", "remapped": ""}
    facts |= {"fabric": "", "xid": ""}
    seen = [node("a", **facts), node("b", **facts | {"xid": AMD})]
    (one,) = hardware.check_hardware(seen, {})
    assert (one.check, one.status, one.nodes) == ("gpu-xid", "fail", ("b",))
    assert "GPU reset begin" in one.evidence[0]
    assert "rocm-smi" in one.fix


def test_gpus_of_amd_that_are_capped_held_narrow_or_broken() -> None:
    rows = "0, AMD Instinct MI300X, 283, 196288, 6.14.14, {}"
    facts = {"vendor": "amd", "gpus": 1, "nvlink": "", "topology": "", "remapped": "", "fabric": "", "xid": ""}
    good = facts | {"gpu": rows.format(0), "state": "0, [N/A], 750.00, 750.00, auto, 16, 16, [N/A], [N/A]"}
    bad = facts | {"gpu": rows.format(2), "state": "0, [N/A], 550.00, 750.00, low, 8, 16, [N/A], [N/A]"}
    assert list(hardware.check_hardware([node("a", **good), node("b", **good)], {})) == []
    said = {one.check: one for one in hardware.check_hardware([node("a", **good), node("b", **bad)], {})}
    assert {*said} == {"gpu-power", "gpu-clocks", "gpu-pcie", "gpu-ecc"}
    for one in said.values():
        assert one.nodes == ("b",)
        assert "nvidia-smi" not in one.fix
    assert "550.00 of 750.00 W" in said["gpu-power"].evidence[0]
    assert "--power-cap" in said["gpu-power"].fix
    assert "lowest clocks" in said["gpu-clocks"].evidence[0]
    assert "--perf-level" in said["gpu-clocks"].fix


def test_links_are_counted_against_their_kind() -> None:
    gpus = GPUS.replace("V100-SXM2-32GB", "A100-SXM4-80GB")
    whole = "".join(V100.format(gpu) + "".join(f"         Link {i}: 25 GB/s\n" for i in range(12)) for gpu in (0, 1))
    assert hardware.find_missing_links(gpus, whole) == []
    assert hardware.find_missing_links(gpus, NVLINK) == ["GPU 0 has 6 of 12", "GPU 1 has 6 of 12"]
    assert hardware.find_missing_links(gpus, "") == [], "nobody has looked"
    assert hardware.find_missing_links(gpus.replace("SXM4", "PCIE"), NVLINK) == [], "pairs may be bridged, or not"
    (one,) = hardware.check_hardware([node(name, gpu=gpus) for name in "ab"], {})
    assert (one.check, one.status, one.nodes) == ("gpu-links", "warn", ("a", "b"))
