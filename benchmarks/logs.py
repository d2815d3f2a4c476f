"""How often `dtctl doctor --log` is right about logs with an established cause.

Reads folders of pairs NAME.log, NAME.json; the latter has `source`, `kind` (failure, healthy or unknown), `class`
(below), `cause`, `rank` and `node` where the text tells them, and `fix`. The texts themselves are public and not kept
here; where each comes from, and the answer, is in the result.

    python benchmarks/logs.py learn=FOLDER held=FOLDER [--judged FILE]

FILE is the verdict of a reader who has compared each diagnosis with the established cause: {name: true|false}. Without
it a case counts as right when the class of the primary diagnosis is the established one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from dtctl.doctor.explain.diagnose import explain_all

RESULTS = Path(__file__).parent / "results"
CLASSES: dict[str, str] = {
    "gpu-oom": "cuda-oom cublas-memory",
    "host-oom": "oom-killer killed job-memory-limit host-memory ray-memory loader-killed worker-lost",
    "shm": "shm-full shm-attach bus-error",
    "disk-or-quota": "storage-failed disk-full write-failed read-only evicted",
    "permission": "permission not-executable read-only port-invalid",
    "network-interface": "no-interface gloo-no-interface loopback-advertised no-common-subnet "
                         "virtual-interfaces no-route connect-refused gloo-connect connect-aborted "
    "connect-timeout network-error address-not-local",
    "network-connect": "store-unreachable connect-refused connect-timeout data-ports-dropped no-route "
                       "gloo-connect connect-aborted ib-retry-exceeded "
    "ib-connect-timeout ib-local-protection ib-no-route ib-link-event network-error efa-security-group "
    "efa-missing rendezvous-host clients-missing "
    "address-not-local peer-closed remote-error mixed-link-types memlock",
    "name-resolution": "name-resolution ssh-name store-unreachable",
    "rendezvous": "store-barrier rendezvous-host rendezvous-timeout clients-missing store-unreachable "
                  "init-twice init-missing tasks-missing",
    "environment-variable": "rendezvous-variables environment-variable store-unreachable",
    "port-in-use": "port-taken",
    "ssh": "ssh-login ssh-host-key ssh-refused ssh-unreachable ssh-key-mode ssh-name",
    "scheduler": "slurm-launch slurm-refused slurm-communication requeued preempted cancelled time-limit node-failed "
                 "mpi-pmi mpi-slots pod-unscheduled evicted container-start",
    "preemption-or-time-limit": "time-limit preempted requeued",
    "node-failure": "node-failed mpi-daemon-lost slurm-communication",
    "cancelled-or-signalled": "segfault cancelled agent-signalled hangup interrupted stopped preempted killed "
                              "peer-closed worker-failed",
    "command-missing": "command-missing not-executable container-start conda-missing",
    "collective-mismatch": "collective-mismatch nccl-settings-differ store-barrier ddp-models-differ "
                           "sizes-differ watchdog-timeout rank-behind gloo-timeout",
    "collective-timeout-straggler": "collective-unfinished "
    "watchdog-timeout rank-silent rank-behind gloo-timeout "
    "heartbeat-timeout peer-late tasks-missing "
                                    "watchdog-stuck monitored-barrier "
    "clients-missing store-barrier nccl-id-missing collective-mismatch",
    "device-usage": "invalid-device duplicate-gpu world-too-large gpu-busy backend-device devices-differ "
                    "no-nccl device-map fork-cuda device-unknown no-bf16",
    "gpu-hardware": "gpu-fell-off nvml nvls",
    "driver": "nccl-cuda-failure driver-too-old driver-mismatch fabric-manager nvml nvls no-nccl",
    "version-conflict": "part-missing nccl-address gpu-architecture version-conflict undefined-symbol no-kernel-image "
                        "cuda-toolkit-differs weights-only "
                        "removed-api nccl-version-mismatch "
    "old-glibc import-failed missing-module local-rank-argument missing-library driver-too-old",
    "import-or-abi": "undefined-symbol missing-library missing-module import-failed version-conflict old-glibc "
                     "circular-import part-missing",
    "missing-module": "part-missing missing-module import-failed command-missing",
    "compile": "compile-cache "
    "gpu-architecture compile-failed build-failed missing-header cuda-toolkit-missing cuda-toolkit-differs",
    "checkpoint": "missing-file checkpoint-damaged shapes-differ world-size-changed checkpoint-missing lfs-pointer "
                  "weights-only bad-data write-failed",
    "download": "offline hub-forbidden hub-missing rate-limited server-error tls download-failed name-resolution",
    "dataset-or-file": "sample-error bad-sample missing-file no-data bad-data checkpoint-missing missing-script "
                       "storage-failed permission hub-missing missing-key",
    "dataloader": "loader-exited bad-sample loader-killed loader-timeout open-files shm-full bad-data segfault",
    "configuration": "shell-syntax not-divisible bad-arguments bad-configuration local-rank-argument command-missing "
                     "world-too-large mpi-slots mpi-root exception no-bf16 scaler-bf16 settings-missing "
    "library-error assertion not-supported version-conflict rendezvous-variables missing-script port-invalid "
    "store-barrier device-map",
    "nan-or-loss-scale": "loss-scale loss-nan",
    "ddp-usage": "ddp-unused-parameters ddp-ready-twice ddp-no-gradients ddp-models-differ ddp-attribute "
                 "autograd syncbn-cpu",
    "fsdp-or-sharding-usage": "fsdp-mixed sizes-differ library-error types-differ shapes-differ assertion",
    "program-error": "missing-key bad-sample sample-error exception sizes-differ device-assert index-range "
                     "types-differ devices-differ autograd "
                     "library-error batch-of-one recompute-differs "
    "init-twice init-missing circular-import ddp-attribute fork-cuda assertion bad-configuration",
    "library-error": "torch-internal library-error exception assertion not-supported version-conflict segfault "
    "compile-failed "
                     "launch-failure illegal-access recompute-differs "
    "sizes-differ autograd types-differ ddp-attribute",
    "segfault": "signalled segfault crashed aborted illegal-access launch-failure",
}  # fmt: skip
"""Class of an established cause -> ids of the diagnoses that say the same."""


def answer(log: Path) -> dict[str, Any]:
    """What is said about one log."""
    explained = explain_all([log])
    first = explained.diagnoses[0] if explained.verdict != "no-failure" else None
    return {
        "verdict": explained.verdict,
        "id": first.id if first else None,
        "confidence": first.confidence if first else None,
        "cause": first.cause if first else None,
        "fix": first.fix if first else None,
        "ranks": list(first.ranks) if first else [],
        "nodes": list(first.nodes) if first else [],
        "others": [one.id for one in explained.diagnoses[1 if first else 0 :]],
    }


def right(label: dict[str, Any], said: dict[str, Any]) -> bool:
    """Whether the primary diagnosis is of the established class; an unknown cause has to be left open."""
    if label["kind"] == "healthy":
        return said["verdict"] == "no-failure"
    if label["kind"] == "unknown":
        same = said["id"] in CLASSES.get(label["class"], "").split()
        return (
            said["verdict"] == "failed-unknown"
            or said["confidence"] in ("ambiguous", "low", "unknown")
            or (same and said["confidence"] == "medium")
        )
    return said["id"] in CLASSES.get(label["class"], "").split()


def who(label: dict[str, Any], said: dict[str, Any]) -> bool | None:
    """Whether rank and node are those that the text tells; None where it tells none."""
    wanted = []
    if label.get("rank") is not None:
        ranks = label["rank"] if isinstance(label["rank"], list) else [label["rank"]]
        wanted.append(set(map(int, ranks)) <= set(said["ranks"]))
    if label.get("node"):
        nodes = label["node"] if isinstance(label["node"], list) else [label["node"]]
        wanted.append(
            all(
                any(node == one or one.startswith(f"{node}.") or node.startswith(f"{one}.") for one in said["nodes"])
                for node in nodes
            )
        )
    return all(wanted) if wanted else None


def score(folder: Path, judged: dict[str, bool]) -> dict[str, Any]:
    """Figures of a folder, and every miss."""
    cases, misses, confident, told, told_right, healthy, silent = 0, [], [], 0, 0, 0, 0
    table = []
    for path in sorted(folder.glob("*.json")):
        log = path.with_suffix(".log")
        if not log.is_file():
            continue
        label = json.loads(path.read_text())
        said = answer(log)
        good = judged.get(path.stem, right(label, said))
        row = {
            "name": path.stem,
            "source": label["source"],
            "kind": label["kind"],
            "class": label["class"],
            "established": label["cause"],
            "rank": label.get("rank"),
            "node": label.get("node"),
            "right": good,
            **said,
        }
        table.append(row)
        if label["kind"] == "healthy":
            healthy += 1
            silent += good
        else:
            cases += 1
            if not good:
                misses.append(row)
                if said["confidence"] == "high" and said["verdict"] == "explained":
                    confident.append(path.stem)
        named = who(label, said)
        if named is not None and label["kind"] != "healthy":
            told += 1
            told_right += named
            row["who_right"] = named
    return {
        "cases": cases, "right": cases - len(misses), "share": round((cases - len(misses)) / max(1, cases), 3),
        "wrong_with_confidence": len(confident), "confident": confident, "healthy": healthy, "silent": silent,
        "who_told": told, "who_right": told_right, "misses": [row["name"] for row in misses], "table": table,
    }  # fmt: skip


def main() -> None:
    """Score the folders that were named and keep the result."""
    arguments = sys.argv[1:]
    judged: dict[str, bool] = {}
    if "--judged" in arguments:
        at = arguments.index("--judged")
        judged = json.loads(Path(arguments[at + 1]).read_text())
        del arguments[at : at + 2]
    keep = "--keep" in arguments
    result: dict[str, Any] = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        if folder:
            result[name] = score(Path(folder), judged)
            figures = {key: value for key, value in result[name].items() if key not in ("table",)}
            print(name, json.dumps(figures))
    if keep:
        path = RESULTS / f"logs-{time.strftime('%Y%m%d-%H%M')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path)
    for name in result:
        for row in result[name]["table"]:
            if not row["right"] or row.get("who_right") is False:
                print(f"-- {name} {row['name']} [{row['kind']} {row['class']}] r={row['rank']} "
                      f"n={row['node']}: {row['established'][:150]}\n"
                      f"     said {row['verdict']} {row['id']} {row['confidence']} r={row['ranks']} "
                      f"n={row['nodes']} also {row['others'][:4]}: {(row['cause'] or '')[:200]}")  # fmt: skip


if __name__ == "__main__":
    main()
