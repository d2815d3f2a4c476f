"""Environment variables that make workers find each other, and leave a record if they do not.

They are set before the process group is made: as few as possible, each with its reason, and none that is already set.
`dtctl launch` has chosen the interfaces by then. The timeout of a collective is an argument of the process group
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
"""Folder in that of the run for the last collectives of each worker, if one fails."""
DUMP: Final = "TORCH_FR_DUMP_TEMP_FILE"
DEVICES: Final = Path("/sys/class/infiniband")


def apply(worker: Worker, environ: MutableMapping[str, str]) -> None:
    """Set the missing variables; rank 0 prints which and why. Names of interfaces may differ on other nodes."""
    network = look(environ) if worker.world_size > worker.local_world_size else NetworkProfile(interface="")
    chosen = wanted(worker, network, environ)
    environ.update({setting.name: setting.value for setting in chosen})
    if any(setting.name == DUMP for setting in chosen):
        Path(environ[DUMP]).parent.mkdir(parents=True, exist_ok=True)
    if worker.is_first:
        for setting in chosen:
            say(f"set {setting.name}={setting.value}: {setting.reason}")


def wanted(worker: Worker, network: NetworkProfile, environ: Mapping[str, str]) -> list[VariableSetting]:
    """Return what to set in this worker; nothing for one without peers, and little on one machine."""
    if worker.backend is None:
        return []
    cuda = worker.device.type == "cuda"
    settings = profiles.settings(profiles.detect(network), network)
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


def look(environ: Mapping[str, str]) -> NetworkProfile:
    """Return the way from here to rank 0, and the RDMA devices."""
    return NetworkProfile(interface=interface(environ), rdma=rdma(DEVICES), nodes=2)


def rdma(folder: Path) -> list[dict[str, str]]:
    """Return the ports of RDMA devices as the kernel lists them below /sys/class/infiniband."""
    devices = []
    for port in sorted(folder.glob("*/ports/*")):
        facts = {name: node_facts.read(str(port / name)).strip() for name in ("state", "link_layer")}
        devices.append(
            {
                "device": port.parts[-3],
                "port": port.name,
                "roce": node_facts.roce_address(str(port)),
                "verbs": node_facts.verbs(port.parts[-3]),
                **facts,
            }
        )
    return devices


def interface(environ: Mapping[str, str]) -> str:
    """The interface towards rank 0; empty when it is not known, and for loopback, which leads to no other node."""
    address = node_facts.address_towards(environ.get(names.MASTER_ADDR, ""))
    return "" if address.startswith("127.") else node_facts.interface_of(address)


def record(worker: Worker) -> Path | None:
    """Leave the last collectives of this worker in the run's folder; where, or None if there is none.

    NCCL writes its own when one times out; this is for gloo, and for workers that fail otherwise.
    """
    folder = os.environ.get(names.RUN_DIR)
    if not folder or worker.backend is None:
        return None
    path = Path(folder) / FLIGHT / f"trace_rank_{worker.rank}.json"  # which `dtctl doctor --log` recognizes
    try:
        dump = flight.dump()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump)
    except (OSError, ImportError, RuntimeError, ValueError):  # the failure that is being recorded counts, not this one
        return None
    return path
