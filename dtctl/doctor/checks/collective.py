"""All-reduce with torch over all nodes, and search for the nodes that make it fail, by their reports or by bisection.

The all-reduce runs only if the nodes reach each other and all have the same torch. One process of each node takes part,
with the node's first GPU. For a test of every GPU there is one process per GPU, and each node is tested by itself
first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from dtctl.doctor.checks.bisect import find_bad_members
from dtctl.doctor.findings import Finding
from dtctl.doctor.node_probes import NodeProbes, Progress
from dtctl.doctor.node_report import NodeReport
from dtctl.plan import rendezvous
from dtctl.printable import format_count
from dtctl.supervisor.messages.probe import QueryPython, StartPython

RAN = ("collective",)
STAGES = ("start", "store", "group", "sum", "done")
LOAD_LIMIT_S = 90.0
"""Longest time for `import torch` in seconds, which is slow on a cold file system, or if many nodes share one."""
TIMEOUT_S = {"gloo": 8.0, "nccl": 60.0}
"""Longest duration of a round in seconds. The first context on each of eight GPUs takes 30 s without persistence
mode."""
GRACE_S = 6.0
"""Seconds that torch may take in addition to its own limit."""
SUSPECTS = ("GLOO_", "TORCH_", "NCCL_", "RCCL_", "HSA_", "PYTHONPATH", "TP_", "OMP_", "MKL_", "USE_", "LD_")
"""Prefixes of variables; a failing group is tested again without these variables before a node is blamed."""
MAX_ROUNDS = 24
"""Number of rounds after which every node without a successful round is reported."""


@dataclass(slots=True, kw_only=True)
class AllReduceResult:
    """Result of the all_reduce on all nodes."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """`backend`, `workers`, `bytes`, `seconds` and `busbw_gb_s` of an all_reduce over all nodes."""
    uses: dict[str, list[str]] = field(default_factory=dict)
    """Node -> modules that torch imports and that another module with the same name hides on this node."""


class _CollectiveWorkers:
    """Workers, one per node or one per GPU, and rounds with the workers of some nodes."""

    def __init__(
        self,
        probes: NodeProbes,
        reports: Sequence[NodeReport],
        *,
        backend: str,
        python: Mapping[str, str],
        env: Mapping[str, Mapping[str, str]],
        progress: Progress,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Store the settings; `counts` has each node's workers, one per GPU. None: one worker per node."""
        self._counts = counts
        self._probes = probes
        self._python, self._env = python, env
        self._seen = {node.name: node for node in reports}
        self._backend = backend
        self._unset: list[str] = []
        self._progress = progress
        self.rounds = 0
        self.broken: set[str] = set()
        """Nodes whose worker was killed or has ended; it is restarted before the node's next round."""

    def start(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Load torch on these nodes; return their answers."""
        text = resources.files("dtctl.doctor").joinpath("worker.py").read_text(encoding="utf-8")
        messages = {
            name: StartPython(
                python=self._python[name],
                text=text,
                hidden=self._list_shadowed_modules(name),
                unset=self._unset,
                env=dict(self._env[name]),
                interface=self._find_node_interface(name),
                count=self._count_node_workers(name),
                limit_s=LOAD_LIMIT_S,
            )
            for name in names
        }
        said = self._probes.send_requests(messages, limit_s=LOAD_LIMIT_S + GRACE_S, doing="loading torch")
        return {name: merge_worker_reports(one) for name, one in said.items()}

    def _count_node_workers(self, name: str) -> int:
        return self._counts[name] if self._counts else 1

    def _list_shadowed_modules(self, name: str) -> list[str]:
        return [row[0] for row in self._seen[name].facts["job"].get("shadows", ())]

    def _find_node_interface(self, name: str) -> str:
        ways = self._seen[name].facts["ways"]
        others = [node.address for node in self._seen.values() if node.name != name]
        return next((ways[address] for address in others if ways.get(address)), "")

    def variables(self) -> dict[str, dict[str, str]]:
        """Return node -> variables from the spec and the login that change torch's collectives."""
        return {
            name: {
                key: value
                for key, value in {**node.facts["env"], **self._env[name]}.items()
                if key.startswith(SUSPECTS) and key not in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            }
            for name, node in self._seen.items()
        }

    def exclude_variables(self, names: Iterable[str]) -> None:
        """Restart the workers in the next round, without these variables."""
        self._unset = list(names)
        self.broken |= {*self._seen}

    def used(self, name: str, said: Mapping[str, Any]) -> list[str]:
        """Return the hidden modules that torch imports, or all hidden modules if torch could not be loaded."""
        return list(said["uses"]) if "uses" in said else self._list_shadowed_modules(name)

    def round(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Run one all_reduce over these nodes; return the report of each."""
        again = [name for name in names if name in self.broken]
        if again:
            self.start(again)
            self.broken -= {*again}
        self._progress(f"adding up numbers with torch ({self._backend}) on {format_count(len(names), 'node')}")
        return self._run_group_round([names])

    def run_all_reduce_per_node(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Run an all_reduce on each of these nodes by itself, at the same time; return the report of each."""
        self._progress(f"adding up numbers with torch ({self._backend}) on each of {format_count(len(names), 'node')}")
        return self._run_group_round([[name] for name in names])

    def _run_group_round(self, groups: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
        self.rounds += 1
        port = rendezvous.list_rendezvous_ports("doctor-sums", self.rounds, None)[0]
        limit_s = TIMEOUT_S[self._backend] + GRACE_S
        messages: dict[str, QueryPython] = {}
        for names in groups:
            asked = {
                "world": sum(map(self._count_node_workers, names)),
                "address": self._seen[names[0]].data_address,
                "port": port,
                "backend": self._backend,
                "timeout_s": TIMEOUT_S[self._backend],
            }
            rank = 0
            for name in names:
                places = range(self._count_node_workers(name))
                asks = [{**asked, "rank": rank + place, **({"gpu": place} if self._counts else {})} for place in places]
                messages[name] = QueryPython(asks=asks, limit_s=limit_s)
                rank += len(asks)
        said = self._probes.send_requests(messages, limit_s=limit_s + GRACE_S, doing="waiting for torch")
        answers = {name: merge_worker_reports(said[name]) if name in said else {"silent": True} for name in messages}
        self.broken |= {name for name, one in answers.items() if one.get("silent") or "complained" in one}
        return answers


def merge_worker_reports(said: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the reports of a node's workers: the stage that all have reached, and the worst of the rest.

    A message begins with the position of its worker.
    """
    if "each" not in said:
        return dict(said)
    every = [*said["each"]] or [{"silent": True}]
    reached = [STAGES.index(one["stage"]) if one.get("stage") in STAGES else -1 for one in every]
    least = every[reached.index(min(reached))]
    merged_answer = {key: value for key, value in least.items() if key in ("stage", "nccl", "devices", "uses")}
    merged_answer["wrong"] = sum(int(one.get("wrong") or 0) for one in every)
    for key in ("complained", "error"):
        told = [f"worker {place}: {one[key]}" for place, one in enumerate(every) if one.get(key)]
        if told or (key == "complained" and any(key in one for one in every)):
            merged_answer[key] = told[0] if told else ""
    if any(one.get("silent") for one in every):
        merged_answer["silent"] = True
    if all("seconds" in one for one in every):
        merged_answer |= {"seconds": max(one["seconds"] for one in every), "bytes": every[0]["bytes"]}
    return merged_answer


def is_all_reduce_correct(answers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether all workers have finished with the right sums."""
    return all(answer.get("stage") == "done" and not answer.get("wrong") for answer in answers.values())


def find_faulty_nodes(answers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the nodes that caused a failure: a minority with wrong sums, no answer or an earlier stage."""
    few = len(answers) / 2
    wrong = tuple(name for name, one in answers.items() if one.get("wrong"))
    silent = tuple(name for name, one in answers.items() if one.get("silent"))
    ended = tuple(name for name, one in answers.items() if "complained" in one and name not in silent)
    stages = {name: STAGES.index(one["stage"]) if one.get("stage") in STAGES else -1 for name, one in answers.items()}
    behind = tuple(name for name, stage in stages.items() if stage < max(stages.values()))
    for named in (wrong, ended, silent, behind):
        if 0 < len(named) <= few:
            return named
    return ()


def check_all_reduce(
    probes: NodeProbes,
    reports: Sequence[NodeReport],
    *,
    python: Mapping[str, str],
    env: Mapping[str, Mapping[str, str]],
    progress: Progress,
    every_gpu: bool = False,
) -> AllReduceResult:
    """Run an all-reduce over all nodes with gloo, and also with NCCL if all nodes have GPUs.

    Args:
        probes: connections to the nodes' probes.
        reports: reports of the nodes without errors, the head node first.
        python: node -> Python of the job on that node.
        env: node -> variables of the job on that node.
        progress: called with the current activity.
        every_gpu: whether all GPUs take part, after a test of each node by itself; otherwise one GPU per node does.
    """
    done = AllReduceResult()
    names = [node.name for node in reports]
    counts: dict[str, int] | None = None
    for backend in ("gloo", "nccl") if all(node.facts["gpus"] for node in reports) else ("gloo",):
        counts = counts if backend == "nccl" and every_gpu else None
        gang = _CollectiveWorkers(
            probes, reports, backend=backend, python=python, env=env, progress=progress, counts=counts
        )
        loaded = gang.start(names)
        failed = {name: loaded.get(name, {}) for name in names if loaded.get(name, {}).get("stage") != "torch"}
        done.uses = {name: gang.used(name, loaded.get(name, {})) for name in names}
        if failed:
            done.findings.append(_no_torch(failed, gang.variables()))
            return done
        done.findings += check_loaded_nccl(
            {
                node.name: (node.facts["job"].get("nccl") or "", str(loaded[node.name].get("nccl", "")))
                for node in reports
            }
        )
        if done.findings:
            return done
        if backend == "gloo":
            counts = {name: max(1, int(loaded[name].get("devices") or 0)) for name in names}
        elif counts:
            done.findings += check_sums_within_nodes(gang.run_all_reduce_per_node(names), counts)
            if done.findings:
                return done
        answers = gang.round(names)
        if not is_all_reduce_correct(answers):
            done.findings += _locate_all_reduce_failure(gang, names, answers, backend)
            return done
        workers = sum(counts.values()) if backend == "nccl" and counts else len(names)
        done.figures = _compute_all_reduce_figures(backend, answers, workers)
    return done


def _compute_all_reduce_figures(backend: str, answers: Mapping[str, Mapping[str, Any]], workers: int) -> dict[str, Any]:
    seconds = max(float(answer["seconds"]) for answer in answers.values())
    size = int(next(iter(answers.values()))["bytes"])
    bus = size / seconds / 1e9 * 2 * (workers - 1) / workers
    return {"backend": backend, "workers": workers, "bytes": size, "seconds": seconds, "busbw_gb_s": round(bus, 4)}


def check_sums_within_nodes(answers: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a finding about nodes on which an all_reduce over their own GPUs fails, with one process per GPU. Pure.

    Args:
        answers: node -> merged reports of its workers.
        counts: node -> number of its workers.
    """
    bad = {name: one for name, one in answers.items() if not is_all_reduce_correct({name: one})}
    if bad:
        yield Finding(
            check="gpu-nccl",
            status="fail",
            nodes=tuple(bad),
            summary=f"{', '.join(bad)}: an all_reduce over the GPUs of the node fails (one process per GPU)",
            fix="set NCCL_DEBUG=WARN in job.env to see the reason; often: /dev/shm that is too small for a container "
            "(--shm-size=16g, --ipc=host), an nvidia-fabricmanager that does not run, ACS or an IOMMU between the "
            "GPUs (NCCL_P2P_DISABLE=1 as a trial)",
            evidence=tuple(
                f"{name}, {counts[name]} GPUs: {_describe_worker_progress(one, 'nccl')}" for name, one in bad.items()
            ),
        )


def check_loaded_nccl(versions: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """Yield a finding about nodes on which torch has loaded another NCCL than its wheel contains.

    Args:
        versions: node -> version in the wheel and loaded version; a version is empty if there is none.
    """
    other = {node: said for node, said in versions.items() if all(said) and not _is_same_nccl_version(*said)}
    if other:
        yield Finding(
            check="nccl",
            status="fail" if len(other) < len(versions) else "warn",
            nodes=tuple(other),
            summary=f"{', '.join(other)}: torch has loaded an NCCL other than the one that was installed with it",
            fix="remove the other libnccl from LD_LIBRARY_PATH and LD_PRELOAD: find it with ldconfig -p | grep nccl",
            evidence=tuple(f"{node}: installed {wheel}, loaded {loaded}" for node, (wheel, loaded) in other.items()),
        )


def _is_same_nccl_version(wheel: str, loaded: str) -> bool:
    return wheel.split(".")[:3] == loaded.split(".")[:3]


def _no_torch(failed: Mapping[str, Mapping[str, Any]], variables: Mapping[str, Mapping[str, str]]) -> Finding:
    told = {name: _format_worker_error(one) for name, one in failed.items()}
    # The variable to remove is the one whose name, value or folder appears in the message.
    named = dict.fromkeys(
        key for name, text in told.items() for key, value in variables[name].items() if _is_about(text, key, value)
    )
    return Finding(
        check="collective",
        status="fail",
        nodes=tuple(failed),
        summary=f"{', '.join(failed)}: torch cannot be loaded: {next(iter(told.values()))}",
        fix=f"take {', '.join(named)} out of job.env, cluster.nodes[].env and the login, or set it as the message "
        "describes"
        if named
        else "name what the job needs in job.environment, which installs it on every node; or install torch for the "
        "job's Python (cluster.python) and try `python -c 'import torch'` there",
        evidence=tuple(f"{name}: {text}" for name, text in told.items()),
    )


def _is_about(text: str, key: str, value: str) -> bool:
    folders = [
        part.rstrip("/") for part in value.replace(" ", ":").split(":") if part.startswith("/") and len(part) > 1
    ]
    if key in text or any(f"{folder}/" in text or text.endswith(folder) for folder in folders if folder):
        return True
    # The value itself counts if it is a word; a number would match by chance.
    return len(value) > 2 and not value.isdigit() and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def _locate_all_reduce_failure(
    gang: _CollectiveWorkers, names: Sequence[str], answers: Mapping[str, Mapping[str, Any]], backend: str
) -> Iterator[Finding]:
    set_there = gang.variables()
    suspects = list(dict.fromkeys(name for variables in set_there.values() for name in variables))
    if suspects:
        gang.exclude_variables(suspects)
        if is_all_reduce_correct(gang.round(names)):
            yield _by_variables(names, answers, backend, set_there)
            return
        gang.exclude_variables(())
    nodes, how = find_faulty_nodes(answers), "by what the nodes say"
    if not nodes:

        def works(group: Sequence[str]) -> bool:
            return gang.rounds >= MAX_ROUNDS or is_all_reduce_correct(gang.round(group))

        nodes, how = tuple(find_bad_members(names, works)), f"by bisection, in {gang.rounds} rounds"
    wrong = any(one.get("wrong") for one in answers.values())
    what = "gives wrong sums" if wrong else "never finishes"
    yield Finding(
        check="collective",
        status="fail",
        nodes=nodes,
        peers=tuple(name for name in names if name not in nodes),
        summary=f"an all_reduce over {len(names)} nodes ({backend}) {what}; {', '.join(nodes)} found {how}",
        fix=f"leave {', '.join(nodes)} out (cluster.nodes) and have memory, processors and network card tested there"
        if wrong
        else f"on {', '.join(nodes)}: compare torch's build and the job's variables with the others' (dtctl nccl env), "
        f"then dtctl launch with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        evidence=tuple(f"{name}: {_describe_worker_progress(one, backend)}" for name, one in list(answers.items())[:8]),
    )


def _by_variables(
    names: Sequence[str],
    answers: Mapping[str, Mapping[str, Any]],
    backend: str,
    set_there: Mapping[str, Mapping[str, str]],
) -> Finding:
    who = tuple(name for name in names if set_there.get(name))
    told = dict.fromkeys(f"{key}={value}" for variables in set_there.values() for key, value in variables.items())
    keys = dict.fromkeys(text.partition("=")[0] for text in told)
    return Finding(
        check="collective",
        status="fail",
        nodes=who,
        summary=f"an all_reduce over {len(names)} nodes ({backend}) fails with {', '.join(told)}, and works without",
        fix=f"take {', '.join(keys)} out of job.env, cluster.nodes[].env and the login"
        + (", one after the other" if len(keys) > 1 else ""),
        evidence=tuple(f"{name}: {_describe_worker_progress(one, backend)}" for name, one in list(answers.items())[:8]),
    )


def _describe_worker_progress(one: Mapping[str, Any], backend: str) -> str:
    if one.get("wrong"):
        return f"{one['wrong']} numbers are wrong"
    stage = f"reached stage {one.get('stage', 'none')!r}"
    return (
        f"{stage}, then nothing for {TIMEOUT_S[backend] + GRACE_S:g} s"
        if one.get("silent")
        else f"{stage}; {_format_worker_error(one)}"
    )


def _format_worker_error(one: Mapping[str, Any]) -> str:
    return str(one.get("complained") or one.get("error") or "it says nothing more")
