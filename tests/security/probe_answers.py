"""Answers of a probe to every question, and all that reads them: one node tells the truth, another one may not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from dtctl.doctor import answers, coverage, tables
from dtctl.doctor.checks import collective, environment, gpu_speed, hardware, links, network, node
from dtctl.doctor.examine import Examination
from dtctl.doctor.findings import order_findings
from dtctl.doctor.node_report import NodeReport
from dtctl.supervisor.messages.base import Message
from dtctl.supervisor.messages.probe import QueryFacts
from dtctl.supervisor.probe import facts, python, settings

Answers = dict[str, dict[str, Any]]
"""Question -> answer."""


def real_answers() -> Answers:
    """Return what a probe answers on this machine, with GPUs, and with every key that it may have."""
    asked = QueryFacts(names=["localhost"], peers=["127.0.0.1"], workdir="~/.dtctl", paths=[], env={}, code="")
    told = json.loads(json.dumps(facts.gather_probe_facts(asked)))
    told |= {
        "gpus": 2, "gpu": "0, H100, 10, 80000, 550, 0\n1, H100, 9000, 80000, 550, 1",
        "vendor": "nvidia", "state": "0, Enabled, 500, 700, 0x48, 8, 16, Enabled, Enabled",
        "xid": "NVRM: Xid (PCI:0000:01:00): 79, x\namdgpu 0000:c1:00.0: GPU reset begin!",
        "nvlink": "GPU 0: H100\n Link 0: 25 GB/s\n Link 1: 25 GB/s",
        "topology": "GPU0 X NV4\nGPU1 NV4 X",
        "rdma": [{"device": "mlx5_0", "port": "1", "state": "4: ACTIVE", "rate": "400 Gb/sec", "link_layer": "IB",
                  "roce": "v2", "verbs": "no"}],
        "remapped": "0, No, No\n1, Yes, No",
        "conf": {"/etc/nccl.conf": "NCCL_DEBUG=INFO\n#x\n"}, "env": {"NCCL_DEBUG": "WARN"},
    }  # fmt: skip
    job = python.examine_job_python(sys.executable, dict(os.environ), "", [])
    call = {
        "node": "a", "port": 9, "kind": "data-0", "result": "ok", "said": "", "took_ms": 0.1, "seen": "1", "own": "1",
    }  # fmt: skip
    measured = {
        "rtt_ms": [0.1, 0.2], "sent": 500, "lost": 0, "twice": 0, "mbit_s": 900.0, "retransmitted": 1, "segments": 9,
        "carried": 9000, "broken": "",
    }  # fmt: skip
    gpu = {"name": "H100", "error": "", "tflops": 700.0, "to_gb_s": 50.0, "from_gb_s": 50.0, "within_gb_s": 2000.0}
    worker = {
        "stage": "done", "bytes": 4, "seconds": 0.1, "wrong": 0, "silent": False, "complained": "", "error": "",
        "nccl": "2.21.5", "uses": ["random"], "devices": 1, "gpus": [gpu], "busbw_gb_s": 1.0,
    }  # fmt: skip
    return {
        "facts": told,
        "job-python": {"job": json.loads(json.dumps(job))},
        "call": {"answers": [call]},
        "measure": measured,
        "network-settings": settings.read_network_settings(),
        "listen": {"ports": [4000, 4001]},
        "round": {"each": [worker, worker]},
        "start-python": worker,
    }


def reports(good: Answers) -> list[NodeReport]:
    """Return two nodes that have answered well."""
    found = []
    for name, other in ("ab", "ba"):
        report = NodeReport(name=name, address="127.0.0.1", target=name, slots=2)
        for op in ("facts", "job-python", "listen"):
            take(report, op, good[op])
        report.measured = {other: [good["measure"]]}
        found.append(report)
    return found


def take(report: NodeReport, op: str, value: Mapping[str, Any]) -> None:
    """Let a node give this answer.

    Raises:
        NodeError: it has not the form that was asked for.
    """
    message = SimpleNamespace(op=op, ports=[0, 0], wanted=[], asks=[0, 0])
    found = answers.check_probe_answer(cast("Message", message), {**value, "op": op}, node=report.name)
    if op in ("facts", "job-python"):
        report.facts = {**report.facts, **found}
    elif op == "call":
        report.answers = [one for one in found["answers"] if one["node"] in ("a", "b")]
    elif op == "measure":
        report.measured, report.own = {"a": [found] * links.TRIES}, [found]
    elif op == "listen":
        report.ports = {"rendezvous": found["ports"][0], "data-0": found["ports"][1]}
    else:
        _read_worker(report.name, found)


def _read_worker(name: str, found: Mapping[str, Any]) -> None:
    """Read what the job's Python says, as the checks do that let it compute."""
    said = {name: collective.merge_worker_reports(found)}
    collective.find_faulty_nodes(said)
    list(collective.check_sums_within_nodes(said, {name: 2}))
    list(collective.check_loaded_nccl({name: ("2.21.5", str(said[name].get("nccl", "")))}))
    if collective.is_all_reduce_correct(said):
        collective._compute_all_reduce_figures("gloo", said, 2)
    measured = {name: found}
    list(gpu_speed.check_gpu_speed(measured))
    rows = gpu_speed.build_gpu_speed_rows(measured)
    tables.build_gpu_table(Examination(findings=(), seen=(), gpus=rows))


def judge(seen: Sequence[NodeReport]) -> str:
    """Return all findings about the nodes as JSON, after people's tables were made of them."""
    found = [
        *node.check_reachability(seen),
        *node.check_process_limits(seen),
        *node.check_storage(seen, "~/d"),
        *node.check_software_versions(seen),
        *node.check_node_clocks(seen),
        *node.check_job_python(seen, {}),
        *hardware.check_hardware(seen, {"a": 2, "b": 2}),
        *environment.check_environment_variables(seen, {}),
        *network.check_host_names(seen),
        *network.check_node_addresses(seen),
        *network.check_ephemeral_ports(seen),
        *network.check_node_pairs(seen[::-1], rendezvous=(1,), fixed=True),
        *links.check_links(seen),
    ]
    links.choose_doubtful_links(seen)
    lost = coverage.find_unexamined_needs(seen, skip=(), ran=(), rendezvous=True, found=found)
    done = Examination(findings=tuple(order_findings(found, ran=(), unexamined=lost)), seen=tuple(seen))
    (
        tables.build_node_table(done),
        tables.build_pair_table(done),
        tables.link_table(done),
        tables.list_link_measurements(seen),
    )
    return json.dumps([finding.as_json() for finding in done.findings], allow_nan=False)
