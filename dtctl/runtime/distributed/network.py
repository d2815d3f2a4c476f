"""Environment variables with which workers find each other, and record information if they do not.

They are set before the process group is made: as few as possible, each with its reason, and none that is already set.
`dtctl launch` has already chosen the interfaces. The time limit of a collective is an argument of the process group
(`train.timeout_s`), not a variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from dtctl import names, node_facts
from dtctl.nccl import profiles
from dtctl.nccl.profiles import NetworkProfile, VariableSetting
from dtctl.runtime.console import say
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.telemetry import flight

FLIGHT: Final = "flight"
"""Folder below the run's folder for the last collectives of each worker after a failure."""
DUMP: Final = "TORCH_FR_DUMP_TEMP_FILE"
DEVICES: Final = Path("/sys/class/infiniband")


def set_network_variables(worker: Worker, environ: MutableMapping[str, str]) -> None:
    """Set the missing variables; rank 0 prints them and the reasons. Names of interfaces may differ on other nodes."""
    network = (
        detect_network_profile(environ) if worker.world_size > worker.local_world_size else NetworkProfile(interface="")
    )
    chosen = choose_network_variables(worker, network, environ)
    environ.update({setting.name: setting.value for setting in chosen})
    if any(setting.name == DUMP for setting in chosen):
        Path(environ[DUMP]).parent.mkdir(parents=True, exist_ok=True)
    if worker.is_first:
        for setting in chosen:
            say(f"set {setting.name}={setting.value}: {setting.reason}")


def choose_network_variables(
    worker: Worker, network: NetworkProfile, environ: Mapping[str, str]
) -> list[VariableSetting]:
    """Return the variables to set in this worker: none without peers, and few on a single machine."""
    if worker.backend is None:
        return []
    cuda = worker.device.type == "cuda"
    settings = profiles.list_profile_variables(profiles.find_matching_profile(network), network)
    settings = [setting for setting in settings if cuda or setting.name.startswith("GLOO_")]
    if cuda and environ.get(names.RUN_DIR):
        prefix = str(Path(environ[names.RUN_DIR]) / FLIGHT / "nccl_trace_rank_")
        settings += [
            VariableSetting(
                name=DUMP,
                value=prefix,
                reason="the last collectives of each rank belong into the run's folder, not into /tmp",
            ),
            VariableSetting(
                name="TORCH_NCCL_DUMP_ON_TIMEOUT",
                value="1",
                reason="a collective that times out is only explained by those of all ranks",
            ),
        ]
    return [setting for setting in settings if not environ.get(setting.name)]


def detect_network_profile(environ: Mapping[str, str]) -> NetworkProfile:
    """Return the network path from here to rank 0, and the RDMA devices."""
    return NetworkProfile(interface=find_master_interface(environ), rdma=list_rdma_ports(DEVICES), nodes=2)


def list_rdma_ports(folder: Path) -> list[dict[str, str]]:
    """Return the ports of RDMA devices as the kernel lists them below /sys/class/infiniband."""
    devices = []
    for port in sorted(folder.glob("*/ports/*")):
        facts = {name: node_facts.read_system_file(str(port / name)).strip() for name in ("state", "link_layer")}
        devices.append(
            {
                "device": port.parts[-3],
                "port": port.name,
                "roce": node_facts.detect_roce_address(str(port)),
                "verbs": node_facts.check_rdma_access(port.parts[-3]),
                **facts,
            }
        )
    return devices


def find_master_interface(environ: Mapping[str, str]) -> str:
    """Return the interface towards rank 0; empty if unknown, and for loopback, which reaches no other node."""
    address = node_facts.find_address_towards(environ.get(names.MASTER_ADDR, ""))
    return "" if address.startswith("127.") else node_facts.find_interface_of(address)


def write_flight_record(worker: Worker) -> Path | None:
    """Write the last collectives of this worker to the run's folder; return the file, or None if there is none.

    NCCL writes its own record when a collective times out. This is for gloo, and for workers that fail in another way.
    """
    folder = os.environ.get(names.RUN_DIR)
    if not folder or worker.backend is None:
        return None
    path = Path(folder) / FLIGHT / f"trace_rank_{worker.rank}.json"  # `dtctl doctor --log` recognizes this name
    try:
        dump = flight.dump_flight_recorder()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump)
    except (OSError, ImportError, RuntimeError, ValueError):  # only the failure that is being recorded counts
        return None
    return path
